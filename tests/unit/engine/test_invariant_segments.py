"""The CPU engine with `batch_invariant`: KV and logits of a text have the same bits by every way to
compute them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.engine.kv_cache import KVSequence
from outrider.engine.linear import can_pack
from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from outrider.errors import FailedPreconditionError
from tests.unit.engine.checkpoints import chain, random_ids, run, tree

LENGTH = 150
PARENTS = (-1, 0, 0, 2, 2, 1, 4, 6)
"""Row 7 has the path 0, 2, 4, 6, 7."""
PATH = (0, 2, 4, 6, 7)
DTYPES = (torch.bfloat16, torch.float32)

pytestmark = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU cannot pack bfloat16"
)


@pytest.fixture(
    scope="module",
    params=[
        (family, dtype) for family in ("llama", "mistral-sliding", "qwen3") for dtype in DTYPES
    ],
    ids=lambda param: f"{param[0]}-{param[1]}".replace("torch.", ""),
)
def model(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> TargetModel:
    family, dtype = request.param
    return load_target(
        checkpoints(family), kv_tokens=2048, block_tokens=4, dtype=dtype, batch_invariant=True
    )


def kv_of(model: TargetModel, sequence: KVSequence, first: int, end: int) -> Tensor:
    return model.pool.storage.index_select(3, sequence.slots(first, end)).clone()


class Text:
    """Logits and KV of a text that was computed as one prompt."""

    def __init__(self, model: TargetModel, length: int = LENGTH) -> None:
        self.model, self.ids = model, random_ids(length)
        sequence = model.pool.allocate(length)
        self.logits = run(model, [chain(sequence, length)], self.ids).logits
        self.kv = kv_of(model, sequence, 0, length)
        sequence.release()

    def prefix(self, length: int) -> KVSequence:
        """A sequence that holds the first tokens of the text."""
        sequence = self.model.pool.allocate(LENGTH + 50)
        run(self.model, [chain(sequence, length)], self.ids[:length])
        sequence.commit(range(length))
        return sequence

    def check(self, logits: Tensor, kv: Tensor, first: int) -> None:
        end = first + len(logits)
        assert torch.equal(logits, self.logits[first:end])
        assert torch.equal(kv, self.kv[:, :, :, first:end])


@pytest.fixture(scope="module")
def text(model: TargetModel) -> Text:
    return Text(model)


@pytest.mark.parametrize("cuts", [(1,), (64,), (3, 63, 66, 130), tuple(range(140, LENGTH))])
def test_prompts_may_be_cut_anywhere(model: TargetModel, text: Text, cuts: tuple[int, ...]) -> None:
    sequence = model.pool.allocate(LENGTH)
    for first, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        logits = run(model, [chain(sequence, end - first)], text.ids[first:end]).logits
        text.check(logits, kv_of(model, sequence, first, end), first)
        sequence.commit(range(end - first))
    sequence.release()


@pytest.mark.parametrize("others", [1, 8])
def test_other_sequences_change_no_bit(model: TargetModel, text: Text, others: int) -> None:
    sequence, beside = text.prefix(70), [model.pool.allocate(90) for _ in range(others)]
    segments = [chain(one, 11 * (place + 1)) for place, one in enumerate(beside)]
    segments.insert(others // 2, chain(sequence, 4))
    ids = [random_ids(segment.num_rows, seed=9) for segment in segments]
    ids[others // 2] = text.ids[70:74]
    start = sum(len(one) for one in ids[: others // 2])
    logits = run(model, segments, torch.cat(ids)).logits[start : start + 4]
    text.check(logits, kv_of(model, sequence, 70, 74), 70)
    for one in (sequence, *beside):
        one.release()


@pytest.mark.parametrize("context", [30, 61, 64, 130])
def test_nodes_of_a_tree_have_the_bits_of_the_prompt(
    model: TargetModel, text: Text, context: int
) -> None:
    sequence = text.prefix(context)
    ids = random_ids(len(PARENTS), seed=5)
    ids[list(PATH)] = text.ids[context : context + len(PATH)]
    logits = run(model, [tree(sequence, PARENTS)], ids).logits[list(PATH)]
    sequence.commit(PATH)
    end = context + len(PATH)
    text.check(logits, kv_of(model, sequence, context, end), context)
    # What follows the accepted nodes reads them as if they had been decoded.
    logits = run(model, [chain(sequence, 3)], text.ids[end : end + 3]).logits
    text.check(logits, kv_of(model, sequence, end, end + 3), end)
    sequence.release()


def test_fragmented_sequences_have_the_same_bits(model: TargetModel, text: Text) -> None:
    first, other = model.pool.allocate(8), model.pool.allocate(8)
    place = 0
    while place < 40:
        first.reserve(place + 4)
        other.reserve(place + 4)
        logits = run(model, [chain(first, 4)], text.ids[place : place + 4]).logits
        text.check(logits, kv_of(model, first, place, place + 4), place)
        first.commit(range(4))
        place += 4
    first.release()
    other.release()


def test_without_the_setting_bits_depend_on_the_way(checkpoints: Callable[[str], Path]) -> None:
    model = load_target(checkpoints("llama"), kv_tokens=512, block_tokens=4, dtype=torch.bfloat16)
    text, sequence = Text(model), model.pool.allocate(LENGTH)
    logits = [run(model, [chain(sequence, 1)], text.ids[:1]).logits]
    for place in range(1, LENGTH):
        sequence.commit(range(1))
        logits.append(run(model, [chain(sequence, 1)], text.ids[place : place + 1]).logits)
    assert not torch.equal(torch.cat(logits), text.logits)


def test_weights_that_are_not_packed_are_refused(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(FailedPreconditionError, match="batch_invariant on a CPU needs packed"):
        load_target(checkpoints("llama"), kv_tokens=64, packed=False, batch_invariant=True)
