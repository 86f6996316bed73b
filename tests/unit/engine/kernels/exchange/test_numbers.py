"""Round numbers: waits end with the peer, at their bound or when cancelled, and a side that has
missed a round reads and writes nothing any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from outrider.engine.kernels.exchange import numbers
from outrider.engine.kernels.exchange.buffers import ExchangeBuffer, ExchangeState
from tests.unit.engine.kernels.exchange.pairs import int32s, open_state

Call = Callable[..., None]


@pytest.fixture(params=["torch", "triton"])
def call(request: pytest.FixtureRequest) -> Call:
    """Calls a function of `numbers` by its name, as kernel or reference."""

    def by_name(name: str, *args: object, **options: object) -> None:
        getattr(numbers, f"{name}_{request.param}")(*args, **options)

    return by_name


PADDING = 3
ROWS = (int32s([1, 0, PADDING]), int32s([-1, 2, -1, -1]))
"""Two sessions and padding; the outcome of one of them was drafted for."""
ALL_CHOSEN = (ROWS[0], int32s([0, 2, -1, -1]))


class Pair(NamedTuple):
    """Both buffers and both sides."""

    verdicts: ExchangeBuffer
    drafts: ExchangeBuffer
    verifier: ExchangeState
    drafter: ExchangeState


def number_only(value: int) -> ExchangeBuffer:
    """A buffer with nothing but a number, and how long drafts took."""
    number, rest, took = int32s([value]), int32s([0]), torch.zeros(1, dtype=torch.int64)
    arrays = (number, *[rest] * 5, took)
    addresses = torch.tensor([array.data_ptr() for array in arrays])
    return ExchangeBuffer(addresses, 1, 0, [arrays])


def pair(begun: int = 0, *, bound_us: int = 1_000_000) -> Pair:
    """Both sides after `begun` rounds."""
    return Pair(
        number_only(begun),
        number_only(begun),
        open_state(number=begun, bound_us=bound_us),
        open_state(number=begun, bound_us=bound_us),
    )


@pytest.mark.parametrize("begun", [0, 41, 2**31 - 2, -2])
def test_both_sides_count_the_same_rounds(call: Call, begun: int) -> None:
    both = pair(begun)
    for _ in range(5):
        call("wait_drafts", both.drafts, both.verifier, *ROWS, padding=PADDING)
        call("reserve_bank", both.drafts, both.verifier, depth=1)
        call("publish_number", both.verdicts, both.verifier, step=1)
        call("wait_round", both.verdicts, both.drafter)
        call("publish_number", both.drafts, both.drafter, step=0)
    call("wait_drafts", both.drafts, both.verifier, *ROWS, padding=PADDING)
    assert both.verifier.words[0] == both.drafter.words[0] == int32s([begun])[0] + 5
    assert both.verifier.words[[1, 3]].tolist() == both.drafter.words[[1, 3]].tolist() == [1, 1]
    for state in (both.verifier, both.drafter):
        assert state.host_control[2:].tolist() == [1, 1]


def test_a_wait_ends_when_the_peer_has_come() -> None:
    both = pair(bound_us=20_000_000)

    def come() -> None:
        time.sleep(0.05)
        both.verdicts.bank(0)[0][0] = 1

    peer = threading.Thread(target=come)
    peer.start()
    begun = time.monotonic()
    numbers.wait_round_torch(both.verdicts, both.drafter)
    peer.join()
    assert 0.04 < time.monotonic() - begun < 10.0
    assert both.drafter.words[[0, 1, 3]].tolist() == [1, 1, 1]
    assert int(both.drafter.stamps[1] - both.drafter.stamps[0]) > 40_000_000


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_drafter_without_its_round_is_closed(is_cancelled: bool) -> None:
    both = pair(3, bound_us=60_000_000 if is_cancelled else 1000)
    both.drafter.host_control[0] = int(is_cancelled)
    numbers.wait_round_torch(both.verdicts, both.drafter)
    assert both.drafter.words[[0, 1, 3]].tolist() == [3, 0, 0]
    assert both.drafter.host_control[2:].tolist() == [0, 0]
    # The round comes too late.
    both.verdicts.bank(0)[0][0] = 4
    both.drafter.host_control[:2] = int32s([0, 60_000_000])
    numbers.wait_round_torch(both.verdicts, both.drafter)
    numbers.publish_number_torch(both.drafts, both.drafter, step=0)
    assert both.drafter.words[[0, 1, 3]].tolist() == [3, 0, 0]
    assert both.drafts.bank(0)[0][0] == 3


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_verifier_without_drafts_goes_on_and_waits_for_late_ones_no_more(
    is_cancelled: bool,
) -> None:
    both = pair(3, bound_us=60_000_000 if is_cancelled else 1000)
    both.verifier.host_control[0] = int(is_cancelled)
    both.drafts.bank(0)[0][0] = 2
    numbers.wait_drafts_torch(both.drafts, both.verifier, *ROWS, padding=PADDING)
    assert both.verifier.words[[0, 1, 3]].tolist() == [3, 1, 0]
    both.verifier.host_control[:2] = int32s([0, 60_000_000])
    begun = time.monotonic()
    numbers.publish_number_torch(both.verdicts, both.verifier, step=1)
    numbers.wait_drafts_torch(both.drafts, both.verifier, *ROWS, padding=PADDING)
    assert time.monotonic() - begun < 10.0
    assert both.verifier.words[[0, 1, 3]].tolist() == [4, 1, 0]
    # Its drafter has caught up.
    both.drafts.bank(0)[0][0] = 4
    numbers.wait_drafts_torch(both.drafts, both.verifier, *ROWS, padding=PADDING)
    assert both.verifier.words[[0, 1, 3]].tolist() == [4, 1, 1]


def test_a_verifier_waits_again_for_a_drafter_that_has_only_the_last_round_to_answer() -> None:
    both = pair(3, bound_us=1000)
    both.drafts.bank(0)[0][0] = 2
    numbers.wait_drafts_torch(both.drafts, both.verifier, *ROWS, padding=PADDING)
    numbers.publish_number_torch(both.verdicts, both.verifier, step=1)
    assert both.verifier.words[[0, 3]].tolist() == [4, 0]
    both.drafts.bank(0)[0][0] = 3
    both.verifier.host_control[1] = 20_000_000

    def come() -> None:
        time.sleep(0.02)
        both.drafts.bank(0)[0][0] = 4

    peer = threading.Thread(target=come)
    peer.start()
    numbers.wait_drafts_torch(both.drafts, both.verifier, *ROWS, padding=PADDING)
    peer.join()
    assert both.verifier.words[[0, 1, 3]].tolist() == [4, 1, 1]


def test_a_verifier_is_closed_where_the_ring_is_full(call: Call) -> None:
    both = pair(2**31 - 2, bound_us=0)
    for place in range(4):
        call("reserve_bank", both.drafts, both.verifier, depth=3)
        assert both.verifier.words[1] == int(place < 3)
        assert place < 3 or both.verifier.host_control[2] == 0
        call("publish_number", both.verdicts, both.verifier, step=1)
    assert both.verdicts.bank(0)[0][0] == int32s([2**31 - 2])[0] + 3
    call("wait_drafts", both.drafts, both.verifier, *ROWS, padding=PADDING)
    assert both.verifier.words[3] == 0


def test_what_is_closed_is_not_touched(call: Call) -> None:
    both = pair(5)
    for state in (both.verifier, both.drafter):
        state.words[1] = 0
    # Nobody has joined: there is no buffer.
    for buffer in (both.verdicts, both.drafts):
        buffer.addresses.zero_()
        buffer.views.clear()
    call("wait_drafts", both.drafts, both.verifier, *ROWS, padding=PADDING)
    call("reserve_bank", both.drafts, both.verifier, depth=1)
    call("publish_number", both.verdicts, both.verifier, step=1)
    call("wait_round", both.verdicts, both.drafter)
    call("publish_number", both.drafts, both.drafter, step=0)
    for state in (both.verifier, both.drafter):
        assert state.words[[0, 1, 3]].tolist() == [5, 0, 0]


def test_rounds_whose_outcomes_were_all_drafted_for_do_not_wait(call: Call) -> None:
    both = pair(bound_us=60_000_000)
    both.verifier.words[0] = 5
    call("wait_drafts", both.drafts, both.verifier, *ALL_CHOSEN, padding=PADDING)
    assert both.verifier.words.tolist() == [5, 1, 0, 1]
    assert both.verifier.stamps[[5, 6]].tolist() == [0, 2]
    both.verifier.words[1] = 0
    call("wait_drafts", both.drafts, both.verifier, *ALL_CHOSEN, padding=PADDING)
    assert both.verifier.words[3] == 0
