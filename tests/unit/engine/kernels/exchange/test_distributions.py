"""Distributions cross beside the drafts that were drawn from them; what cannot be true of one is as
if nothing had been said of its session's draft."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.drafts.distribution_sampling import ChainDistributions
from outrider.engine.kernels.exchange.buffers import DRAFT_FIELDS, ExchangeBuffer
from outrider.engine.kernels.exchange.distributions import (
    new_taken_distributions,
    take_distributions_torch,
    take_distributions_triton,
)
from outrider.engine.kernels.exchange.drafts import put_drafts_torch, put_drafts_triton
from outrider.engine.kernels.exchange.drafts_ahead import ChosenDrafts
from tests.unit.engine.kernels.exchange.pairs import (
    CHAIN,
    CPU,
    ENTRIES,
    SLOTS,
    VOCAB,
    chosen_drafts,
    draft_buffer,
    int32s,
    noise,
    open_state,
    taken_rows,
    taken_tokens,
)

PUTS = [put_drafts_torch, put_drafts_triton]
TAKES = [take_distributions_torch, take_distributions_triton]
ROWS = 3
OWN = (3, 0, 1)
"""Slots of the rows."""
Entries = list[tuple[list[int], list[int]]]
"""By step the ids and counts of a session."""


def given_distributions(length: int = CHAIN, width: int = ENTRIES) -> ChainDistributions:
    """Of each token one with 1, 2, .. entries, whose last id is 5 * (entries - 1)."""
    steps = range(length)
    sizes = int32s([[1 + (row + step) % ENTRIES for step in steps] for row in range(ROWS)])
    ids = torch.arange(width).expand(ROWS, length, -1) * 5
    counts = torch.randint(1, 65536, (ROWS, length, width))
    counts[0, 0, 0] = 65535
    return ChainDistributions(sizes, torch.stack((ids, counts)).int())


def drawn_tokens(given: ChainDistributions) -> Tensor:
    """Of each distribution the last id."""
    last = (given.sizes.clamp(min=1) - 1).long()[..., None]
    return given.entries[0].gather(2, last)[..., 0]


def put(
    function: Callable[..., None],
    arrays: ExchangeBuffer,
    tokens: Tensor,
    given: ChainDistributions | None,
) -> None:
    rows = taken_rows(ROWS)
    rows.source_slots[:], rows.counts[:] = int32s(OWN), 1
    function(arrays, open_state(), rows, tokens, given, length=CHAIN, entries=ENTRIES)


def take(
    function: Callable[..., None],
    arrays: ExchangeBuffer,
    tokens: Tensor,
    lengths: list[int],
    *,
    chosen: ChosenDrafts | None = None,
) -> list[Entries | None]:
    """Of each row and of the padding slot what acceptance is told; None: there is none."""
    taken, own = new_taken_distributions(SLOTS, CHAIN, ENTRIES, CPU), taken_tokens()
    own[list(OWN), : tokens.shape[1]] = tokens
    # What lay there before is no part of anything.
    for part in taken:
        part.copy_(noise(*part.shape))
    ranges = noise(ROWS + 1, CHAIN + 1, 2)
    function(
        arrays,
        open_state(),
        int32s([*OWN, SLOTS - 1]),
        own,
        int32s([*lengths, 0]),
        taken,
        ranges,
        chosen=chosen or chosen_drafts(),
        vocab_size=VOCAB,
    )
    ids, counts, _ = taken.with_ranges(ranges)
    found: list[Entries | None] = []
    for row in ranges.tolist():
        entries = [(ids[begin:end].tolist(), counts[begin:end].tolist()) for begin, end in row]
        found.append(entries if any(pair[0] for pair in entries) else None)
        assert all(begin <= end for begin, end in row)
    return found


def as_given(given: ChainDistributions, row: int, length: int = CHAIN) -> Entries:
    """What acceptance should be told of a row."""
    sizes = given.sizes[row].tolist()
    pairs = [
        (given.entries[0, row, step, :size].tolist(), given.entries[1, row, step, :size].tolist())
        for step, size in enumerate(sizes[:length])
    ]
    return pairs + [([], [])] * (CHAIN + 1 - len(pairs))


def array_of(arrays: ExchangeBuffer, name: str) -> Tensor:
    """An array of the buffer."""
    return arrays.bank(0)[DRAFT_FIELDS.index(name)]


@pytest.mark.parametrize("function", PUTS)
@pytest.mark.parametrize("taking", TAKES)
@pytest.mark.parametrize("length", [1, CHAIN])
def test_distributions_cross_as_they_are(
    function: Callable[..., None], taking: Callable[..., None], length: int
) -> None:
    arrays, given = draft_buffer(), given_distributions(length, ENTRIES + 2)
    tokens = drawn_tokens(given)
    put(function, arrays, tokens, given)
    found = take(taking, arrays, tokens, [length] * ROWS)
    assert found == [*(as_given(given, row, length) for row in range(ROWS)), None]


@pytest.mark.parametrize("function", PUTS)
@pytest.mark.parametrize("taking", TAKES)
def test_rows_without_distributions_have_none_of_an_earlier_round(
    function: Callable[..., None], taking: Callable[..., None]
) -> None:
    arrays, given = draft_buffer(), given_distributions()
    tokens = drawn_tokens(given)
    put(function, arrays, tokens, given)
    given.sizes[1] = 0
    put(function, arrays, tokens, given)
    found = take(taking, arrays, tokens, [CHAIN] * ROWS)
    assert found[1] is None and found[0] == as_given(given, 0)
    put(function, arrays, tokens, None)
    assert take(taking, arrays, tokens, [CHAIN] * ROWS) == [None] * (ROWS + 1)


@pytest.mark.parametrize("function", PUTS)
def test_a_distribution_that_does_not_fit_is_left_out_whole(function: Callable[..., None]) -> None:
    arrays, given = draft_buffer(), given_distributions(width=ENTRIES + 2)
    tokens = drawn_tokens(given)
    given.sizes[1, 2] = ENTRIES + 1
    put(function, arrays, tokens, given)
    found = take(take_distributions_torch, arrays, tokens, [CHAIN] * ROWS)
    assert found == [as_given(given, 0), None, as_given(given, 2), None]


@pytest.mark.parametrize("taking", TAKES)
def test_a_cut_draft_has_the_distributions_of_what_is_left(taking: Callable[..., None]) -> None:
    arrays, given = draft_buffer(), given_distributions()
    tokens = drawn_tokens(given)
    put(put_drafts_torch, arrays, tokens, given)
    array_of(arrays, "entry_ids")[OWN[1], CHAIN - 1] = -7
    found = take(taking, arrays, tokens, [CHAIN, CHAIN - 1, 0])
    assert found == [as_given(given, 0), as_given(given, 1, CHAIN - 1), None, None]


@pytest.mark.parametrize("taking", TAKES)
def test_a_draft_of_an_outcome_has_none(taking: Callable[..., None]) -> None:
    arrays, given, chosen = draft_buffer(), given_distributions(), chosen_drafts()
    tokens = drawn_tokens(given)
    put(put_drafts_torch, arrays, tokens, given)
    chosen.outcomes[OWN[1]] = 2
    found = take(taking, arrays, tokens, [CHAIN] * ROWS, chosen=chosen)
    assert found == [as_given(given, 0), None, as_given(given, 2), None]


@pytest.mark.parametrize("taking", TAKES)
@pytest.mark.parametrize(
    ("field", "place", "value"),
    [
        ("entry_ids", 2, VOCAB),
        ("entry_ids", 2, 2**31 - 1),
        ("entry_ids", 0, -1),
        # Not in order, and twice the same.
        ("entry_ids", 1, 0),
        ("entry_ids", 1, 10),
        # The token itself is not among them.
        ("entry_ids", 2, 11),
        ("entry_counts", 2, 0),
        ("entry_counts", 2, 65536),
        ("entry_counts", 0, -5),
        ("entry_counts", 0, -(2**31)),
        ("sizes", None, 0),
        ("sizes", None, -3),
        ("sizes", None, ENTRIES + 1),
        ("sizes", None, 2**31 - 1),
    ],
)
def test_a_session_with_a_bad_distribution_has_none(
    taking: Callable[..., None], field: str, place: int | None, value: int
) -> None:
    arrays, given = draft_buffer(), given_distributions()
    tokens = drawn_tokens(given)
    put(put_drafts_torch, arrays, tokens, given)
    # The second row's steps have 2, 3 and 4 entries.
    where = (OWN[1], 1) if place is None else (OWN[1], 1, place)
    array_of(arrays, field)[where] = value
    found = take(taking, arrays, tokens, [CHAIN] * ROWS)
    assert found == [as_given(given, 0), None, as_given(given, 2), None]


@pytest.mark.parametrize("taking", TAKES)
def test_any_words_are_outlived(taking: Callable[..., None]) -> None:
    torch.manual_seed(4)
    for _ in range(20):
        arrays = draft_buffer()
        for name in ("sizes", "entry_ids", "entry_counts"):
            array = array_of(arrays, name)
            array.copy_(
                noise(*array.shape) % (ENTRIES + 1) if name == "sizes" else noise(*array.shape)
            )
        tokens = torch.randint(0, VOCAB, (ROWS, CHAIN)).int()
        assert take(taking, arrays, tokens, [CHAIN] * ROWS) == [None] * (ROWS + 1)
