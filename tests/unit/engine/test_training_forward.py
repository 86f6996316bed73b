"""The target, batch decoding and the unrolled forward against slow plain versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.engine.heads import load_feature_projection, load_head
from outrider.engine.training import check
from outrider.engine.training.check import Difference, compare, load_trainable
from outrider.engine.training.data import Ids, PackShape, Sample, make_batch
from outrider.engine.training.export import save_head
from outrider.engine.training.generate import GenerateConfig, Request, generate
from outrider.engine.training.model import (
    TrainableHead,
    Unrolled,
    UnrolledForward,
    labels_from_ids,
    make_labels,
)
from outrider.engine.training.report import step_accuracies, tokens_per_round
from outrider.engine.training.serving import CHAIN, DraftShape, stable_rows, walk
from outrider.engine.training.target import Target, load_target, load_target_config
from tests.factories import make_eagle3_head, make_target


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("training")
    return make_target(root / "target"), make_eagle3_head(root / "head")


@pytest.fixture(scope="module")
def target(directories: tuple[Path, Path]) -> Target:
    return load_target(directories[0], dtype=torch.float32)


def load_pair(directories: tuple[Path, Path], target: Target) -> tuple[TrainableHead, check.Pair]:
    head = load_head(directories[1], embedding=target.embedding)
    return load_trainable(directories[1], head), (head, load_feature_projection(directories[1]))


def next_token(target: Target, ids: list[int]) -> int:
    """Greedy next token, everything recomputed."""
    size = len(ids)
    mask = torch.ones(1, size, size, dtype=torch.bool).tril()
    final, _ = target.forward(torch.tensor([ids]), torch.arange(size)[None], mask, ())
    return int(target.logits(final[0, -1]).argmax())


def test_refilled_decoding_equals_plain_greedy_decoding(target: Target) -> None:
    rng = np.random.default_rng(0)
    prompts: list[Ids] = [rng.integers(3, 384, size=n).astype(np.int32) for n in (3, 9, 1, 5, 7)]
    config = GenerateConfig(max_new_tokens=10, slots=2)
    stop = next_token(target, prompts[0].tolist())
    answers = generate(target, [Request(p, 0.0) for p in prompts], [stop], config)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt.tolist()
        while len(ids) < len(prompt) + 10:
            ids.append(next_token(target, ids))
            if ids[-1] == stop:
                break
        assert answer is not None
        assert answer.tolist() == ids[len(prompt) :]


def test_sampled_answers_repeat_by_seed_and_a_deadline_leaves_the_rest(target: Target) -> None:
    requests = [Request(np.asarray([5, 6], dtype=np.int32), 1.0)] * 3
    config = GenerateConfig(max_new_tokens=6, slots=3, seed=4)
    first, second = (generate(target, requests, [2], config) for _ in range(2))
    assert [a.tolist() for a in first if a is not None] == [
        a.tolist() for a in second if a is not None
    ]
    late = GenerateConfig(max_new_tokens=6, slots=1, deadline_s=-1.0)
    assert generate(target, requests, [2], late) == [None, None, None]


def test_other_skeletons_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"model_type": "llama"', '"model_type": "gemma"'))
    with pytest.raises(ValueError, match="model_type must be one of"):
        load_target_config(tmp_path)


def run_packed(
    target: Target, trainable: TrainableHead, samples: list[Sample], shape: PackShape, steps: int
) -> Unrolled:
    batch = make_batch(samples, [list(range(len(samples)))], shape)
    taps = trainable.config.tap_layers
    final, raw = target.forward(batch.ids_BS, batch.positions_BS, batch.attention_mask(), taps)
    forward = UnrolledForward(trainable, target.embedding, dtype=torch.float32)
    return forward(batch, raw, make_labels(trainable, target, final, batch), steps)


def test_packing_does_not_change_the_loss(directories: tuple[Path, Path], target: Target) -> None:
    trainable, _ = load_pair(directories, target)
    rng = np.random.default_rng(1)
    samples = [
        Sample(*np.split(rng.integers(3, 384, size=p + a).astype(np.int32), [p]))
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


def _counted(target: Target, trainable: TrainableHead, sample: Sample) -> int:
    """Rows of step 0 whose label the target puts inside the draft vocabulary."""
    ids = [*sample.prompt.tolist(), *sample.answer.tolist()]
    first = len(sample.prompt) + 1
    known = set(trainable.target_ids.tolist())
    return sum(next_token(target, ids[:i]) in known for i in range(first, len(ids)))


def test_training_and_serving_forwards_agree(
    directories: tuple[Path, Path], target: Target
) -> None:
    trainable, (head, projection) = load_pair(directories, target)
    ids = np.arange(10, 26, dtype=np.int32)
    assert compare(target, trainable, head, projection, ids) is None


def test_a_shifted_position_is_named(
    directories: tuple[Path, Path], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainable, (head, projection) = load_pair(directories, target)
    keys_of = type(head).kv

    def shifted(self: object, inputs: object, features: object, positions: torch.Tensor) -> object:
        return keys_of(self, inputs, features, positions + 1)  # type: ignore[arg-type]

    monkeypatch.setattr(type(head), "kv", shifted)
    found = compare(target, trainable, head, projection, np.arange(10, 26, dtype=np.int32))
    assert isinstance(found, Difference)
    assert (found.step, found.name) == (0, "key")


def test_a_saved_head_reads_back(
    directories: tuple[Path, Path], target: Target, tmp_path: Path
) -> None:
    trainable, (head, _) = load_pair(directories, target)
    save_head(tmp_path, trainable, dtype=torch.float32)
    again = load_head(tmp_path, embedding=target.embedding)
    assert again.config == head.config
    assert again.fingerprint == head.fingerprint
    assert torch.equal(again.target_ids, head.target_ids)


def test_serving_walk_equals_the_teacher_forced_figure(
    directories: tuple[Path, Path], target: Target
) -> None:
    trainable, (head, projection) = load_pair(directories, target)
    prompt = np.arange(40, 46, dtype=np.int32)
    answer = generate(
        target, [Request(prompt, 0.0)], [2], GenerateConfig(max_new_tokens=24, slots=1)
    )[0]
    assert answer is not None
    sample = Sample(prompt, answer)
    batch = make_batch([sample], [[0]], PackShape(rows=1, row_len=30, selected_len=len(answer)))
    taps = trainable.config.tap_layers
    final, raw = target.forward(batch.ids_BS, batch.positions_BS, batch.attention_mask(), taps)
    truth = batch.next_ids_BS.gather(1, batch.selected_BQ)
    logits = target.logits(final.gather(1, batch.selected_BQ[..., None].expand(-1, -1, 64)))
    forward = UnrolledForward(trainable, target.embedding, dtype=torch.float32)
    result = forward(batch, raw, labels_from_ids(trainable, logits, truth), 4)
    hits = torch.stack([c & v for c, v in zip(result.correct, result.valid, strict=True)])[
        :, 0
    ].numpy()
    rows = stable_rows(target, head, projection, sample)
    rounds, tokens = walk(head, rows, sample, CHAIN)
    assert tokens / rounds == pytest.approx(tokens_per_round([hits], 4))
    assert walk(head, rows, sample, DraftShape(draft_tokens=12, top_k=4, depth=4))[0] <= rounds


def test_rounds_are_counted_over_whole_answers() -> None:
    # Roots 0, 1, ... of an answer of 6 tokens; a hit at [j, i] is a right draft of step j there.
    hits = np.zeros((2, 6), dtype=bool)
    hits[:, 0] = True
    hits[1, 3] = True
    assert tokens_per_round([hits], 2) == pytest.approx(5 / 3)
    assert tokens_per_round([hits], 1) == pytest.approx(5 / 4)
    figures = step_accuracies([hits])
    assert figures["accuracy"] == [1 / 5, 2 / 4]
    assert figures["conditional"] == [1 / 5, 1.0]
