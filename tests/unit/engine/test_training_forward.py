"""The target, batch decoding and the unrolled forward against slow plain versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from outrider.engine.heads import (
    DraftHead,
    FeatureProjection,
    load_feature_projection,
    load_head,
)
from outrider.engine.training import parity_check
from outrider.engine.training.answer_generation import (
    AnswerRequest,
    GenerateConfig,
    generate_answers,
)
from outrider.engine.training.data import (
    PackShape,
    TokenIdArray,
    TrainingSample,
    make_batch,
    repeated_share,
)
from outrider.engine.training.drafting import (
    CHAIN,
    DraftedRows,
    DraftShape,
    grow_drafts,
    run_paths,
    score_trees,
    stable_rows,
)
from outrider.engine.training.export import save_head
from outrider.engine.training.head import TrainableHead
from outrider.engine.training.held_out_report import (
    hits_by_sample,
    step_accuracies,
    tokens_per_round,
)
from outrider.engine.training.parity_check import ParityDifference, compare_forwards, load_trainable
from outrider.engine.training.serving_report import SimulatedRound, serving_report, simulate_rounds
from outrider.engine.training.target import TrainingTarget, load_target, load_target_config
from outrider.engine.training.trainer import TrainConfig, Trainer
from outrider.engine.training.unrolled_forward import (
    DeepSteps,
    Unrolled,
    UnrolledForward,
    make_labels,
)
from outrider.spec.tree import DraftTree, validate_tree
from tests.factories import make_eagle3_head, make_target


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("training")
    return make_target(root / "target"), make_eagle3_head(root / "head")


@pytest.fixture(scope="module")
def target(directories: tuple[Path, Path]) -> TrainingTarget:
    return load_target(directories[0], dtype=torch.float32)


def load_pair(
    directories: tuple[Path, Path], target: TrainingTarget
) -> tuple[TrainableHead, parity_check.HeadPair]:
    head = load_head(directories[1], embedding=target.embedding)
    return load_trainable(directories[1], head), (head, load_feature_projection(directories[1]))


def next_token(target: TrainingTarget, ids: list[int]) -> int:
    """Greedy next token, everything recomputed."""
    size = len(ids)
    mask = torch.ones(1, size, size, dtype=torch.bool).tril()
    final, _ = target.forward(torch.tensor([ids]), torch.arange(size)[None], mask, ())
    return int(target.logits(final[0, -1]).argmax())


def test_refilled_decoding_equals_plain_greedy_decoding(target: TrainingTarget) -> None:
    rng = np.random.default_rng(0)
    prompts: list[TokenIdArray] = [
        rng.integers(3, 384, size=n).astype(np.int32) for n in (3, 9, 1, 5, 7)
    ]
    config = GenerateConfig(max_new_tokens=10, slots=2)
    stop = next_token(target, prompts[0].tolist())
    answers = generate_answers(target, [AnswerRequest(p, 0.0) for p in prompts], [stop], config)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt.tolist()
        while len(ids) < len(prompt) + 10:
            ids.append(next_token(target, ids))
            if ids[-1] == stop:
                break
        assert answer is not None
        assert answer.tolist() == ids[len(prompt) :]


def test_sampled_answers_repeat_by_seed_and_a_deadline_leaves_the_rest(
    target: TrainingTarget,
) -> None:
    requests = [AnswerRequest(np.asarray([5, 6], dtype=np.int32), 1.0)] * 3
    config = GenerateConfig(max_new_tokens=6, slots=3, seed=4)
    first, second = (generate_answers(target, requests, [2], config) for _ in range(2))
    assert [a.tolist() for a in first if a is not None] == [
        a.tolist() for a in second if a is not None
    ]
    late = GenerateConfig(max_new_tokens=6, slots=1, deadline_s=-1.0)
    assert generate_answers(target, requests, [2], late) == [None, None, None]


def test_other_skeletons_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"model_type": "llama"', '"model_type": "gemma"'))
    with pytest.raises(ValueError, match="model_type must be one of"):
        load_target_config(tmp_path)


def run_packed(
    target: TrainingTarget,
    trainable: TrainableHead,
    samples: list[TrainingSample],
    shape: PackShape,
    steps: int,
) -> Unrolled:
    batch = make_batch(samples, [list(range(len(samples)))], shape)
    taps = trainable.config.tap_layers
    final, raw = target.forward(batch.ids_BS, batch.positions_BS, batch.attention_mask(), taps)
    forward = UnrolledForward(trainable, target.embedding, dtype=torch.float32)
    return forward(batch, raw, make_labels(trainable, target, final, batch), steps)


def test_packing_does_not_change_the_loss(
    directories: tuple[Path, Path], target: TrainingTarget
) -> None:
    trainable, _ = load_pair(directories, target)
    rng = np.random.default_rng(1)
    samples = [
        TrainingSample(*np.split(rng.integers(3, 384, size=p + a).astype(np.int32), [p]))
        for p, a in ((4, 12), (7, 9))
    ]
    alone = [
        run_packed(target, trainable, [s], PackShape(rows=1, row_len=20, selected_len=15), 4)
        for s in samples
    ]
    shape = PackShape(rows=1, row_len=40, selected_len=30)
    packed = run_packed(target, trainable, samples, shape, 4)
    for step in range(4):
        parts = [(a.correct[step] & a.valid[step]).sum() for a in alone]
        together = packed.correct[step] & packed.valid[step]
        assert int(together.sum()) == int(sum(parts))
        counts = [int(a.valid[step].sum()) for a in alone]
        assert int(packed.valid[step].sum()) == sum(counts) == 19 - 2 * step
    # Step 0 of every row counts alike, so equal labels must give equal totals of the loss.
    labelled = [_counted(target, trainable, s) for s in samples]
    total = sum(a.losses[0].item() * n for a, n in zip(alone, labelled, strict=True))
    assert packed.losses[0].item() * sum(labelled) == pytest.approx(total, rel=1e-4)


def _counted(target: TrainingTarget, trainable: TrainableHead, sample: TrainingSample) -> int:
    """Rows of step 0 whose label the target puts inside the draft vocabulary."""
    ids = [*sample.prompt.tolist(), *sample.answer.tolist()]
    first = len(sample.prompt) + 1
    known = set(trainable.target_ids.tolist())
    return sum(next_token(target, ids[:i]) in known for i in range(first, len(ids)))


def test_training_and_serving_forwards_agree(
    directories: tuple[Path, Path], target: TrainingTarget
) -> None:
    trainable, (head, projection) = load_pair(directories, target)
    ids = np.arange(10, 26, dtype=np.int32)
    assert compare_forwards(target, trainable, head, projection, ids) is None


def test_a_shifted_position_is_named(
    directories: tuple[Path, Path], target: TrainingTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable, (head, projection) = load_pair(directories, target)
    keys_of = type(head).kv

    def shifted(self: object, inputs: object, features: object, positions: torch.Tensor) -> object:
        return keys_of(self, inputs, features, positions + 1)  # type: ignore[arg-type]

    monkeypatch.setattr(type(head), "kv", shifted)
    found = compare_forwards(target, trainable, head, projection, np.arange(10, 26, dtype=np.int32))
    assert isinstance(found, ParityDifference)
    assert (found.step, found.name) == (0, "key")


def test_a_saved_head_reads_back(
    directories: tuple[Path, Path], target: TrainingTarget, tmp_path: Path
) -> None:
    trainable, (head, _) = load_pair(directories, target)
    save_head(tmp_path, trainable, dtype=torch.float32)
    again = load_head(tmp_path, embedding=target.embedding)
    assert again.config == head.config
    assert again.fingerprint == head.fingerprint
    assert torch.equal(again.target_ids, head.target_ids)


def answers_of(target: TrainingTarget, count: int) -> list[TrainingSample]:
    """Greedy answers of 24 tokens to prompts of different lengths."""
    prompts = [np.arange(40 + i, 46 + 3 * i, dtype=np.int32) for i in range(count)]
    config = GenerateConfig(max_new_tokens=24, slots=1)
    answers = generate_answers(target, [AnswerRequest(p, 0.0) for p in prompts], [], config)
    return [TrainingSample(p, a) for p, a in zip(prompts, answers, strict=True) if a is not None]


class Fitted(NamedTuple):
    """A head that was trained until some of its drafts are right, and what it was trained on."""

    trainable: TrainableHead
    head: DraftHead
    projection: FeatureProjection
    samples: list[TrainingSample]


@pytest.fixture(scope="module")
def fitted(
    directories: tuple[Path, Path], target: TrainingTarget, tmp_path_factory: pytest.TempPathFactory
) -> Fitted:
    trainable, _ = load_pair(directories, target)
    samples = answers_of(target, 3)
    shape = PackShape(rows=2, row_len=64, selected_len=48)
    config = TrainConfig(steps=40, learning_rate=5e-3, warmup_steps=5, log_every=40)
    Trainer(target, samples, shape).run(trainable, config)
    out = tmp_path_factory.mktemp("fitted")
    save_head(out, trainable, dtype=torch.float32)
    head = load_head(out, embedding=target.embedding)
    return Fitted(trainable, head, load_feature_projection(out), samples)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_serving_walk_equals_the_teacher_forced_figure(
    target: TrainingTarget, fitted: Fitted, look_ahead: bool
) -> None:
    trainable, head, projection, samples = fitted
    hits = hits_by_sample(target, trainable, samples, 11)
    rows = stable_rows(target, head, projection, samples)
    counted = simulate_rounds(head, rows, samples, CHAIN, look_ahead=look_ahead)
    for index, found in enumerate(counted):
        expected = tokens_per_round([hits[index]], 5, look_ahead=look_ahead)
        assert found.tokens / found.rounds == pytest.approx(expected)
    assert min(found.rounds for found in counted) < 20
    tree = DraftShape(draft_tokens=12, top_k=4, depth=5)
    wider = simulate_rounds(head, rows, samples, tree, look_ahead=look_ahead)
    assert sum(w.rounds for w in wider) <= sum(c.rounds for c in counted)


def test_answers_are_drafted_for_together_as_alone(target: TrainingTarget, fitted: Fitted) -> None:
    _, head, projection, samples = fitted
    roots = [len(s.prompt) + 3 for s in samples]
    shape = DraftShape(draft_tokens=9, top_k=3, depth=4)

    def drafts(which: Sequence[int]) -> list[DraftTree]:
        rows = stable_rows(target, head, projection, [samples[i] for i in which])
        own = DraftedRows(head, rows, [roots[i] for i in which])
        paths = [samples[i].answer[4 : 4 + i].tolist() for i in which]
        return grow_drafts(own, run_paths(own, paths), shape)

    for index, tree in enumerate(drafts(range(3))):
        alone = drafts([index])[0]
        validate_tree(tree, vocab_size=384, max_nodes=9)
        assert tree.tokens.tolist() == alone.tokens.tolist()
        assert tree.parents.tolist() == alone.parents.tolist()
        np.testing.assert_allclose(tree.logprobs, alone.logprobs, rtol=1e-4, atol=1e-5)


def test_scoring_a_tree_finds_its_own_probabilities_again(
    target: TrainingTarget, fitted: Fitted
) -> None:
    _, head, projection, samples = fitted
    rows = stable_rows(target, head, projection, samples)
    roots = [len(s.prompt) - 1 for s in samples]
    own = DraftedRows(head, rows, roots)
    trees = grow_drafts(
        own, run_paths(own, [[]] * 3), DraftShape(draft_tokens=12, top_k=4, depth=4)
    )
    for tree, found in zip(
        trees, score_trees(DraftedRows(head, rows, roots), trees, 4), strict=True
    ):
        assert found.tokens.shape == found.logprobs.shape == (13, 4)
        total = np.concatenate(([0.0], tree.logprobs))
        for node, (token, parent) in enumerate(
            zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        ):
            column = found.tokens[parent + 1].tolist().index(token)
            step = total[node + 1] - total[parent + 1]
            assert found.logprobs[parent + 1, column] == pytest.approx(step, rel=1e-3, abs=1e-5)


def test_every_round_is_watched_with_what_came_of_it(
    target: TrainingTarget, fitted: Fitted
) -> None:
    _, head, projection, samples = fitted
    seen: list[SimulatedRound] = []
    tasks = {"task": samples}
    report = serving_report(
        target, head, projection, tasks, {"chain": CHAIN}, lambda shape, ahead: seen.append
    )
    clean = [s for s in samples if repeated_share(s.answer) <= 0.5]
    rounds = sum(len(r.verdicts) for r in seen)
    emitted = [v.accepted_len + 1 for r in seen for v in r.verdicts]
    assert sum(emitted) == 2 * sum(len(s.answer) - 1 for s in clean)
    assert sum(sum(r.ended) for r in seen) == 2 * len(clean)
    figures = report["all"]["chain"]
    lock_step, look_ahead = figures["lock_step"], figures["look_ahead"]
    assert figures["stale_over_fresh"] == pytest.approx(look_ahead / lock_step)
    assert sum(emitted) / 2 * (1 / lock_step + 1 / look_ahead) == pytest.approx(rounds)


@torch.no_grad()
def unrolled(
    target: TrainingTarget, fitted: Fitted, packed: Sequence[Sequence[int]], **options: Any
) -> Unrolled:
    """Six draft steps over a batch of these rows of samples."""
    trainable, samples = fitted.trainable, fitted.samples
    shape = PackShape(rows=len(packed), row_len=64, selected_len=48)
    batch = make_batch(samples, packed, shape)
    taps = trainable.config.tap_layers
    final, raw = target.forward(batch.ids_BS, batch.positions_BS, batch.attention_mask(), taps)
    labels = make_labels(trainable, target, final, batch)
    forward = UnrolledForward(trainable, target.embedding, dtype=torch.float32, **options)
    return forward(batch, raw, labels, 6)


def test_deep_steps_run_on_the_first_rows_alone(
    target: TrainingTarget, fitted: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, alone = (unrolled(target, fitted, packed) for packed in ([[0, 1], [2]], [[0, 1]]))
    # Compiled, rows are padded to two fixed shapes; what is computed must not change by that.
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    deep = DeepSteps(first=4, share=0.5)
    for options in ({"compile": True}, {"deep": deep}, {"deep": deep, "compile": True}):
        part = unrolled(target, fitted, [[0, 1], [2]], max_steps=8, **options)
        for step in range(6):
            expected = alone if step >= 4 and "deep" in options else whole
            assert torch.equal(part.valid[step], expected.valid[step])
            assert torch.equal(part.correct[step], expected.correct[step])
            torch.testing.assert_close(part.losses[step], expected.losses[step])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unroll_late": 17}, "within 1..16, not from 7 to 17"),
        ({"unroll_early": 14}, "not from 14 to 13"),
        ({"whole_steps": 0}, "at least 1 step runs on the whole batch, not 0"),
        ({"deep_share": 0.0}, "share of deep steps must be within"),
        ({"step_decay": 1.1}, "decay of steps must be within"),
    ],
)
def test_an_unroll_that_cannot_be_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(steps=1, **options)


def test_rounds_are_counted_over_whole_answers() -> None:
    # Roots 0, 1, ... of an answer of 6 tokens; a hit at [j, i] is a right draft of step j there.
    hits = np.zeros((3, 6), dtype=bool)
    hits[:, 0] = True
    hits[1, 3] = True
    assert tokens_per_round([hits], 2) == pytest.approx(5 / 3)
    assert tokens_per_round([hits], 1) == pytest.approx(5 / 4)
    # With look-ahead the second round goes on in the first one's column, deeper.
    assert tokens_per_round([hits], 1, look_ahead=True) == pytest.approx(5 / 3)
    figures = step_accuracies([hits])
    assert figures["accuracy"] == [1 / 5, 2 / 4, 1 / 3]
    assert figures["conditional"] == [1 / 5, 1.0, 1.0]
