"""The target model against transformers, and its own invariants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from outrider.engine.kv_cache import KVSequence
from outrider.engine.model_loader import load_target
from outrider.engine.target import FINAL_NORM, ForwardBatch, Segment, TargetModel
from outrider.errors import ResourceExhaustedError
from tests.unit.engine.checkpoints import (
    FAMILIES,
    LAYERS,
    VOCAB,
    assert_near,
    chain,
    feed,
    random_ids,
    reference,
    run,
    tree,
    write_checkpoint,
)

TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3)
"""Row 0 is the root; rows 3 and 4 are children of row 1, and so on."""


@pytest.fixture(scope="module")
def model(checkpoints: Callable[[str], Path]) -> TargetModel:
    return load_target(checkpoints("llama"), kv_tokens=1024, block_tokens=4)


@pytest.fixture
def sequence(model: TargetModel) -> Iterator[KVSequence]:
    allocated = model.pool.allocate(128)
    yield allocated
    allocated.release()


def path_to(row: int) -> list[int]:
    return [*(path_to(TREE_PARENTS[row]) if TREE_PARENTS[row] >= 0 else []), row]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_logits_and_taps_are_those_of_transformers(
    family: str, packed: bool, tmp_path: Path
) -> None:
    expected_model = write_checkpoint(family, tmp_path)
    target = load_target(tmp_path, kv_tokens=64, packed=packed)
    ids = random_ids(40)
    logits, states = reference(expected_model, ids)
    taps = (0, LAYERS - 2, FINAL_NORM)
    output = run(target, [chain(target.pool.allocate(64), 40)], ids, tap_layers=taps)
    assert_near(output.logits, logits)
    expected_taps = torch.cat([states[1], states[LAYERS - 1], states[-1]], dim=-1)
    assert output.taps is not None
    assert_near(output.taps, expected_taps)


@pytest.mark.parametrize("family", ["llama3", "mistral-sliding", "qwen2", "qwen3"])
def test_chunked_prefill_and_decoding_equal_one_shot(
    family: str, checkpoints: Callable[[str], Path]
) -> None:
    target = load_target(checkpoints(family), kv_tokens=128)
    ids = random_ids(33)
    whole = feed(target, target.pool.allocate(40), ids)
    piecewise = target.pool.allocate(40)
    chunks = [feed(target, piecewise, chunk) for chunk in torch.split(ids, [16, 9, 1, 1, 4, 2])]
    assert_near(torch.cat(chunks), whole)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_a_tree_row_equals_its_path_run_alone(
    family: str, checkpoints: Callable[[str], Path]
) -> None:
    target = load_target(checkpoints(family), kv_tokens=256)
    prompt, nodes = random_ids(11), random_ids(len(TREE_PARENTS), seed=1)
    sequence, alone = target.pool.allocate(32), target.pool.allocate(32)
    feed(target, sequence, prompt)
    feed(target, alone, prompt)
    output = run(target, [tree(sequence, TREE_PARENTS)], nodes, tap_layers=(2,))
    assert output.taps is not None
    for row in range(len(TREE_PARENTS)):
        path = path_to(row)
        expected = run(target, [chain(alone, len(path))], nodes[path], tap_layers=(2,))
        assert expected.taps is not None
        assert_near(output.logits[row], expected.logits[-1])
        assert_near(output.taps[row], expected.taps[-1])


@pytest.mark.parametrize("accepted", [[0], [0, 1], [0, 2, 5], [0, 1, 3, 6]])
def test_after_a_commit_of_tree_rows_decoding_equals_a_recompute(
    model: TargetModel, sequence: KVSequence, accepted: list[int]
) -> None:
    prompt, nodes, following = random_ids(9), random_ids(7, seed=1), random_ids(3, seed=2)
    feed(model, sequence, prompt)
    run(model, [tree(sequence, TREE_PARENTS)], nodes)
    sequence.commit(accepted)
    assert sequence.len == 9 + len(accepted)
    logits = feed(model, sequence, following)
    fresh = model.pool.allocate(64)
    expected = feed(model, fresh, torch.cat([prompt, nodes[accepted], following]))
    fresh.release()
    assert_near(logits, expected[-3:])


def test_a_truncated_sequence_goes_on_from_there(model: TargetModel, sequence: KVSequence) -> None:
    ids, others = random_ids(12), random_ids(4, seed=3)
    feed(model, sequence, ids)
    sequence.truncate(7)
    logits = feed(model, sequence, others)
    fresh = model.pool.allocate(64)
    expected = feed(model, fresh, torch.cat([ids[:7], others]))
    fresh.release()
    assert_near(logits, expected[-4:])


def test_a_tree_grown_level_by_level_equals_its_paths(
    model: TargetModel, sequence: KVSequence
) -> None:
    """Nodes committed earlier hide behind a mask that reaches back over them."""
    prompt, first, second = random_ids(6), random_ids(2, seed=4), random_ids(2, seed=5)
    feed(model, sequence, prompt)
    level = Segment(
        sequence=sequence,
        num_rows=2,
        positions=torch.tensor([6, 6]),
        mask=torch.eye(2, dtype=torch.bool),
    )
    run(model, [level], first)
    sequence.commit([0, 1])
    # One child under each of the two nodes: visible are the parent and the row itself.
    mask = torch.tensor([[True, False, True, False], [False, True, False, True]])
    level = Segment(sequence=sequence, num_rows=2, positions=torch.tensor([7, 7]), mask=mask)
    logits = run(model, [level], second).logits
    sequence.commit([0, 1])
    for branch in (0, 1):
        fresh = model.pool.allocate(16)
        tokens = torch.cat([prompt, first[[branch]], second[[branch]]])
        assert_near(logits[branch], feed(model, fresh, tokens)[-1])
        fresh.release()


def test_a_row_that_runs_alone_sees_no_more_than_its_mask_shows(
    model: TargetModel, sequence: KVSequence
) -> None:
    prompt, first, second = random_ids(6), random_ids(2, seed=4), random_ids(1, seed=5)
    feed(model, sequence, prompt)
    siblings = torch.eye(2, dtype=torch.bool)
    level = Segment(sequence=sequence, num_rows=2, positions=torch.tensor([6, 6]), mask=siblings)
    run(model, [level], first)
    sequence.commit([0, 1])
    mask = torch.tensor([[True, False, True]])
    level = Segment(sequence=sequence, num_rows=1, positions=torch.tensor([7]), mask=mask)
    logits = run(model, [level], second).logits
    fresh = model.pool.allocate(16)
    tokens = torch.cat([prompt, first[:1], second])
    assert_near(logits[0], feed(model, fresh, tokens)[-1])
    fresh.release()


def test_sessions_in_one_ragged_batch_equal_each_alone(model: TargetModel) -> None:
    prompts = [random_ids(n, seed=n) for n in (13, 1, 5)]
    together = [model.pool.allocate(32) for _ in prompts]
    alone = [model.pool.allocate(32) for _ in prompts]
    for prompt, a, b in zip(prompts, together, alone, strict=True):
        feed(model, a, prompt)
        feed(model, b, prompt)
    newcomer, newcomer_alone = model.pool.allocate(32), model.pool.allocate(32)
    nodes, chunk = random_ids(7, seed=8), random_ids(6, seed=9)
    ids = torch.cat([nodes, nodes[:1], nodes[:3], chunk])
    segments = [
        tree(together[0], TREE_PARENTS),
        chain(together[1], 1),
        chain(together[2], 3),
        chain(newcomer, 6),
    ]
    logits = run(model, segments, ids).logits
    expected = [
        run(model, [tree(alone[0], TREE_PARENTS)], nodes).logits,
        run(model, [chain(alone[1], 1)], nodes[:1]).logits,
        run(model, [chain(alone[2], 3)], nodes[:3]).logits,
        run(model, [chain(newcomer_alone, 6)], chunk).logits,
    ]
    assert_near(logits, torch.cat(expected))
    for held in (*together, *alone, newcomer, newcomer_alone):
        held.release()
    assert model.pool.free_blocks == model.pool.total_blocks


def test_a_fragmented_sequence_reads_the_same_as_a_contiguous_one(
    checkpoints: Callable[[str], Path],
) -> None:
    target = load_target(checkpoints("qwen3"), kv_tokens=64, block_tokens=2)
    contiguous = target.pool.allocate(24)
    small = [target.pool.allocate(2) for _ in range(20)]
    for held in small[1::2]:
        held.release()
    fragmented = target.pool.allocate(20)
    assert contiguous.start is not None
    assert fragmented.start is None
    prompt, nodes = random_ids(9), random_ids(7, seed=1)
    assert_near(feed(target, fragmented, prompt), feed(target, contiguous, prompt))
    for sequence in (fragmented, contiguous):
        run(target, [tree(sequence, TREE_PARENTS)], nodes)
        sequence.commit([0, 2, 5])
    assert_near(feed(target, fragmented, nodes[:2]), feed(target, contiguous, nodes[:2]))


def test_only_requested_rows_get_logits(model: TargetModel, sequence: KVSequence) -> None:
    ids, rows = random_ids(8), torch.tensor([7, 2])
    everything = run(model, [chain(sequence, 8)], ids).logits
    some = run(model, [chain(sequence, 8)], ids, logit_rows=rows).logits
    assert everything.shape == (8, VOCAB)
    assert_near(some, everything[rows])
    none = run(model, [chain(sequence, 8)], ids, logit_rows=torch.tensor([], dtype=torch.int64))
    assert none.logits.shape == (0, VOCAB)
    assert none.logits.dtype == torch.float32


def test_a_forward_without_a_commit_leaves_no_trace(
    model: TargetModel, sequence: KVSequence
) -> None:
    feed(model, sequence, random_ids(5))
    before = run(model, [chain(sequence, 2)], random_ids(2, seed=1)).logits
    run(model, [tree(sequence, TREE_PARENTS)], random_ids(7, seed=2))
    assert sequence.len == 5
    again = run(model, [chain(sequence, 2)], random_ids(2, seed=1)).logits
    assert torch.equal(before, again)


def test_a_sequence_that_is_full_is_refused_before_anything_is_written(
    model: TargetModel,
) -> None:
    sequence = model.pool.allocate(8)
    feed(model, sequence, random_ids(6))
    with pytest.raises(ResourceExhaustedError, match="9 slots"):
        run(model, [chain(sequence, 3)], random_ids(3))
    assert feed(model, sequence, random_ids(2)).shape == (2, VOCAB)
    sequence.release()
    with pytest.raises(ValueError, match="released"):
        run(model, [chain(sequence, 1)], random_ids(1))


@pytest.mark.parametrize(
    ("rows", "ids", "taps", "message"),
    [
        (3, 2, (), "do not match"),
        (3, 3, (LAYERS,), "tap layers"),
        (3, 3, (-2,), "tap layers"),
    ],
)
def test_a_batch_that_does_not_add_up_is_a_value_error(
    model: TargetModel,
    sequence: KVSequence,
    rows: int,
    ids: int,
    taps: tuple[int, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        run(model, [chain(sequence, rows)], random_ids(ids), tap_layers=taps)


def test_malformed_segments_are_value_errors(model: TargetModel, sequence: KVSequence) -> None:
    positions = torch.arange(2)
    wrong_mask = torch.ones((2, 5), dtype=torch.bool)
    cases = [
        [Segment(sequence=sequence, num_rows=2, positions=torch.arange(3))],
        [Segment(sequence=sequence, num_rows=2, positions=positions, mask=wrong_mask)],
        [Segment(sequence=sequence, num_rows=1, positions=positions[:1])] * 2,
    ]
    for segments in cases:
        with pytest.raises(ValueError, match=r"positions|mask|one segment"):
            model.forward(ForwardBatch(token_ids=random_ids(2), segments=segments))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_stays_close_to_float32(family: str, checkpoints: Callable[[str], Path]) -> None:
    ids = random_ids(24)
    logits = [
        feed(target, target.pool.allocate(32), ids)
        for target in (
            load_target(checkpoints(family), kv_tokens=32, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
    ]
    assert logits[1].dtype == torch.float32
    correlation = torch.corrcoef(torch.stack([part.flatten() for part in logits]))[0, 1]
    assert correlation > 0.99
