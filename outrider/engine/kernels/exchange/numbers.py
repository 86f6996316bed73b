# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Synchronisation of two devices by round numbers: wait for the peer's number, publish one's own.

Verifier and drafter are the two sides of an exchange. A side first writes its data into the other
side's memory and then its round number. The other side waits for that number before it reads the
data. Numbers wrap around at 2^32.

A verifier does not depend on its drafter. If a wait ends without drafts, the round runs without
drafts, and later rounds only poll once until the drafter is at most one round behind. The verifier
continues to write rounds while the ring has a free bank. If there is no free bank, the verifier
closes the exchange, because the drafter would miss tokens. The drafter closes it if a wait ends
without a round. A side that has closed the exchange no longer reads or writes buffers.
"""

from __future__ import annotations

import time
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.exchange.buffers import (
    ROUNDS_KEPT,
    ExchangeBuffer,
    ExchangeState,
)
from outrider.engine.kernels.runtime import INTERPRETED, next_power_of_2

_POLL_S: Final = 20e-6


def wait_drafts(
    drafts: ExchangeBuffer, state: ExchangeState, slots: Tensor, outcomes: Tensor, *, padding: int
) -> None:
    """Let the verifier's device wait until the drafts for its last published round have arrived.

    drafts: the draft buffer, in the verifier's memory. slots: int32 [R], the session slots of this
    round; `padding` for rows without a session. outcomes: int32 [X], see `ChosenDrafts`. The wait
    ends early at its time limit or when the host cancels it. There is no wait if all sessions have
    a look-ahead draft for their outcome. If the last wait ended without drafts and the drafter is
    more than one round behind, the kernel polls only once. Afterwards `state.words[3]` is 1 if
    there are drafts, else 0.
    """
    if state.words.is_cuda:
        wait_drafts_triton(drafts, state, slots, outcomes, padding=padding)
    else:
        wait_drafts_torch(drafts, state, slots, outcomes, padding=padding)


def wait_drafts_torch(
    drafts: ExchangeBuffer, state: ExchangeState, slots: Tensor, outcomes: Tensor, *, padding: int
) -> None:
    """Run `wait_drafts` on the host, for buffers in CPU memory."""
    words, begun = state.words, time.monotonic_ns()
    found, polls = False, 0
    real = slots[slots != padding].long()
    hits = int((outcomes[real] >= 0).sum())
    if int(words[1]) and hits == len(real):
        found = True
    elif int(words[1]):
        number = drafts.bank(0)[0]
        lasts = bool(words[3]) or int(number[0] - words[0]) >= -1
        found, polls = _poll(number, words[0], state, begun, bound=lasts)
    words[2], words[3] = polls, int(found)
    state.host_control[2:] = words[[1, 3]]
    state.stamps[0], state.stamps[1] = begun, time.monotonic_ns()
    state.stamps[5] = drafts.bank(0)[6][0] if found and hits < len(real) else 0
    state.stamps[6] = hits


def wait_drafts_triton(
    drafts: ExchangeBuffer, state: ExchangeState, slots: Tensor, outcomes: Tensor, *, padding: int
) -> None:
    """Launch the Triton kernel of `wait_drafts`, which uses one warp."""
    _wait_drafts[(1,)](
        drafts.addresses,
        state.words,
        state.stamps,
        state.control,
        slots,
        outcomes,
        len(slots),
        padding,
        BLOCK=next_power_of_2(len(slots)),
        num_warps=1,
    )


def wait_round(verdicts: ExchangeBuffer, state: ExchangeState) -> None:
    """Let the drafter's device wait for the round after the last one that it received.

    verdicts: the verdict buffer, in the drafter's memory. If the wait reaches its time limit or the
    host cancels it, the exchange is closed.
    """
    if state.words.is_cuda:
        wait_round_triton(verdicts, state)
    else:
        wait_round_torch(verdicts, state)


def wait_round_torch(verdicts: ExchangeBuffer, state: ExchangeState) -> None:
    """Run `wait_round` on the host, for buffers in CPU memory."""
    words, begun = state.words, time.monotonic_ns()
    found, polls = False, 0
    if int(words[1]):
        found, polls = _poll(verdicts.bank(0)[0], words[0] + 1, state, begun, bound=True)
        words[0] += int(found)
    words[1], words[2], words[3] = int(found), polls, int(found)
    state.host_control[2:] = words[[1, 3]]
    state.stamps[0], state.stamps[1] = begun, time.monotonic_ns()


def wait_round_triton(verdicts: ExchangeBuffer, state: ExchangeState) -> None:
    """Launch the Triton kernel of `wait_round`, which uses one warp."""
    _wait_round[(1,)](verdicts.addresses, state.words, state.stamps, state.control, num_warps=1)


def is_round_there(verdicts: ExchangeBuffer, state: ExchangeState) -> bool:
    """Return whether the next `wait_round` would return without waiting, because the round has
    arrived or the exchange is closed. Only for buffers in CPU memory."""
    return not int(state.words[1]) or int(verdicts.bank(0)[0][0] - state.words[0] - 1) >= 0


def reserve_bank(drafts: ExchangeBuffer, state: ExchangeState, *, depth: int) -> None:
    """Close the exchange on the verifier if the verdict buffer has no free bank for the next round.

    The verdict buffer is a ring of `depth` banks, each of which holds the data of one round. A bank
    is free once the drafter has received its round. drafts: the draft buffer, whose `number` is
    the last round that the drafter has received.
    """
    if state.words.is_cuda:
        reserve_bank_triton(drafts, state, depth=depth)
    else:
        reserve_bank_torch(drafts, state, depth=depth)


def reserve_bank_torch(drafts: ExchangeBuffer, state: ExchangeState, *, depth: int) -> None:
    """Do the work of `reserve_bank` on the host, for buffers in CPU memory: close the exchange if
    the verdict buffer, a ring of `depth` banks with the data of one round each, has no free bank
    for the next round."""
    words = state.words
    state.stamps[4] = time.monotonic_ns()
    if int(words[1]) and int(words[0] + 1 - drafts.bank(0)[0][0]) > depth:
        words[1] = state.host_control[2] = 0


def reserve_bank_triton(drafts: ExchangeBuffer, state: ExchangeState, *, depth: int) -> None:
    """Launch the Triton kernel of `reserve_bank`: it closes the exchange if the verdict buffer, a
    ring of `depth` banks with the data of one round each, has no free bank for the next round."""
    _reserve_bank[(1,)](
        drafts.addresses, state.words, state.stamps, state.control, DEPTH=depth, num_warps=1
    )


def publish_number(
    buffer: ExchangeBuffer, state: ExchangeState, *, step: int, rows: int = 0
) -> None:
    """Increase this side's round number by `step`, write it into the peer's memory once all earlier
    launches have finished, and add a row to the history. If the exchange is closed, do nothing.

    `step`: 1 for a verifier, whose rounds have consecutive numbers; 0 for a drafter, which answers
    with the number of the round that it received. `rows`: the value of `rows` in the history (see
    `ROUND_TIMES`).
    """
    if state.words.is_cuda:
        publish_number_triton(buffer, state, step=step, rows=rows)
    else:
        publish_number_torch(buffer, state, step=step, rows=rows)


def publish_number_torch(
    buffer: ExchangeBuffer, state: ExchangeState, *, step: int, rows: int = 0
) -> None:
    """Run `publish_number` on the host, for buffers in CPU memory."""
    if not int(state.words[1]):
        return
    state.words[0] += step
    state.stamps[2] = time.monotonic_ns()
    number = int(state.words[0])
    kept = state.history[number % ROUNDS_KEPT]
    kept[:8], kept[8], kept[9] = state.stamps, rows, number
    if step == 0:
        buffer.bank(0)[6][0] = state.stamps[4] - state.stamps[3]
    buffer.bank(0)[0][0] = state.words[0]


def publish_number_triton(
    buffer: ExchangeBuffer, state: ExchangeState, *, step: int, rows: int = 0
) -> None:
    """Launch the Triton kernel of `publish_number`. It begins after all earlier launches of the
    stream have ended, so its release store also makes their writes visible to the peer."""
    _publish[(1,)](
        buffer.addresses,
        state.words,
        state.stamps,
        state.control,
        rows,
        STEP=step,
        KEPT=ROUNDS_KEPT,
        num_warps=1,
    )


def _poll(
    number: Tensor, wanted: Tensor, state: ExchangeState, begun: int, *, bound: bool
) -> tuple[bool, int]:
    """Wait until `number` has reached `wanted`. Return whether it has, and the number of polls.
    Without `bound`, poll only once."""
    polls = 0
    while int(number[0] - wanted) < 0:
        polls += 1
        late = time.monotonic_ns() - begun > int(state.host_control[1]) * 1000
        if late or not bound or int(state.host_control[0]):
            return False, polls
        time.sleep(_POLL_S)
    return True, polls


if INTERPRETED:

    @triton.jit
    def device_clock():
        """Return 0, because interpreted kernels have no clock."""
        return tl.full((), 0, tl.int64)

    @triton.jit
    def load_acquire(pointer):
        """Return the int32 at `pointer`, with acquire semantics: no later read is moved before this
        one."""
        return tl.load(pointer)

    @triton.jit
    def store_release(pointer, value):
        """Write an int32, with release semantics: all earlier writes become visible before it."""
        tl.store(pointer, value)

else:

    @triton.jit
    def device_clock():
        """Return the current time of this device's clock, in nanoseconds."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def load_acquire(pointer):
        """Return the int32 at `pointer`, in the memory of any device, with acquire semantics: no
        later read is moved before this one."""
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];",
            "=r,l",
            [pointer],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def store_release(pointer, value):
        """Write an int32 into the memory of any device, with release semantics: all earlier writes
        become visible before it."""
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [pointer, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def array_at(addresses, place: tl.constexpr, dtype: tl.constexpr):
    """Return a pointer to the array of a buffer whose address is addresses[place]. In a ring, it
    lies in the first bank."""
    return tl.load(addresses + place).to(tl.pointer_type(dtype))


@triton.jit
def _tell_host(control, is_open, found):
    host = tl.load(control).to(tl.pointer_type(tl.int32))
    tl.store(host + 2, is_open)
    tl.store(host + 3, found)


@triton.jit
def _wait(number, wanted, control, begun, lasts):
    """Wait until `number` has reached `wanted`. Return whether it has, and the number of polls. If
    `lasts` is 0, poll only once."""
    host = tl.load(control).to(tl.pointer_type(tl.int32))
    bound = load_acquire(host + 1).to(tl.int64) * 1000
    found = 0
    polls = 0
    waiting = 1
    while waiting != 0:
        if load_acquire(number) - wanted >= 0:
            found = 1
            waiting = 0
        else:
            polls += 1
            waiting = lasts
            # The host's words lie across the bus: they are looked at now and then.
            if polls % 64 == 0:
                if device_clock() - begun > bound:
                    waiting = 0
                if load_acquire(host) != 0:
                    waiting = 0
    return found, polls


@triton.jit
def _wait_drafts(
    addresses, words, stamps, control, slots, outcomes, rows, padding, BLOCK: tl.constexpr
):
    begun = device_clock()
    found = 0
    polls = 0
    at = tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < rows, other=padding)
    chosen = tl.load(outcomes + slot, mask=slot != padding, other=-1)
    hits = tl.sum((chosen >= 0).to(tl.int32), axis=0)
    is_waiting = hits < tl.sum((slot != padding).to(tl.int32), axis=0)
    if tl.load(words + 1) != 0:
        found = 1
        if is_waiting:
            number = array_at(addresses, 0, tl.int32)
            wanted = tl.load(words)
            lasts = tl.load(words + 3)
            if load_acquire(number) - wanted >= -1:
                lasts = 1
            found, polls = _wait(number, wanted, control, begun, lasts)
    _tell_host(control, tl.load(words + 1), found)
    tl.store(words + 2, polls)
    tl.store(words + 3, found)
    tl.store(stamps, begun)
    tl.store(stamps + 1, device_clock())
    took = tl.full((), 0, tl.int64)
    if (found != 0) & is_waiting:
        took = tl.load(array_at(addresses, 6, tl.int64))
    tl.store(stamps + 5, took)
    tl.store(stamps + 6, hits.to(tl.int64))


@triton.jit
def _wait_round(addresses, words, stamps, control):
    begun = device_clock()
    found = 0
    polls = 0
    if tl.load(words + 1) != 0:
        number = array_at(addresses, 0, tl.int32)
        wanted = tl.load(words) + 1
        found, polls = _wait(number, wanted, control, begun, 1)
        if found != 0:
            tl.store(words, wanted)
    _tell_host(control, found, found)
    tl.store(words + 1, found)
    tl.store(words + 2, polls)
    tl.store(words + 3, found)
    tl.store(stamps, begun)
    tl.store(stamps + 1, device_clock())


@triton.jit
def _reserve_bank(addresses, words, stamps, control, DEPTH: tl.constexpr):
    tl.store(stamps + 4, device_clock())
    if tl.load(words + 1) != 0:
        taken = load_acquire(array_at(addresses, 0, tl.int32))
        if tl.load(words) + 1 - taken > DEPTH:
            tl.store(words + 1, 0)
            _tell_host(control, 0, 0)


@triton.jit
def _publish(addresses, words, stamps, control, rows, STEP: tl.constexpr, KEPT: tl.constexpr):
    if tl.load(words + 1) != 0:
        mine = tl.load(words) + STEP
        tl.store(words, mine)
        if STEP == 0:
            took = tl.load(stamps + 4) - tl.load(stamps + 3)
            tl.store(array_at(addresses, 6, tl.int64), took)
        tl.store(stamps + 2, device_clock())
        store_release(array_at(addresses, 0, tl.int32), mine)
        # For the host alone, so behind what the peer waits for.
        kept = (mine % KEPT + KEPT) % KEPT
        row = tl.load(control + 1).to(tl.pointer_type(tl.int64)) + kept * 10
        for place in range(8):
            tl.store(row + place, tl.load(stamps + place))
        tl.store(row + 8, tl.zeros((), tl.int64) + rows)
        tl.store(row + 9, mine.to(tl.int64))
