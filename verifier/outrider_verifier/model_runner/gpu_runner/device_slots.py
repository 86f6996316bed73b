"""Which sessions have a place on the device, and what the device is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.engine.device.drafting.in_process_drafter import OwnHead
from outrider.engine.device.slots.logits_slots import WarpSlots
from outrider.engine.device.slots.session_slots import SessionSlots
from outrider.engine.swap import SwapSpace
from outrider.spec.sampling import Rule
from outrider_verifier.model_runner.batch import PrefillRow
from outrider_verifier.model_runner.swapped_sessions import Suspended
from outrider_verifier.state.session import Session

MATCHING = (Rule.GREEDY, Rule.COUPLED)
"""Rules by which tokens are compared and no law is asked for."""
_NOBODY: Final[frozenset[int]] = frozenset()


@dataclass(slots=True, eq=False)
class Seat:
    """A session's place on the device, and what of it decides how its rows are launched."""

    slot: int
    matching: bool
    """Whether its rule compares tokens and asks for no law."""
    warped: bool
    """Whether its logits are warped before anything looks at them."""
    drafted: bool = False
    """Whether the own draft on the device follows the session's prefix."""
    whole: bool = False
    """Whether the own head has its K/V of all that was written so far."""
    told: int = 0
    """K/V blocks that the device knows of."""
    plain: bool = field(init=False)
    """Whether its tokens are compared, and by logits as they are."""

    def __post_init__(self) -> None:
        self.plain = self.matching and not self.warped

    @classmethod
    def of(cls, session: Session, slot: int, *, warped: bool) -> Seat:
        """The seat of a session that begins in `slot`."""
        matching = session.spec.sampling.effective_rule in MATCHING
        return cls(slot, matching, warped, told=session.kv.num_blocks)


class Seats:
    """Gives seats to sessions and takes them back. All that the device is told, it is told in the
    order of the stream, without waiting; what can be told at once waits for `tell`."""

    def __init__(self, slots: SessionSlots, own_head: OwnHead | None) -> None:
        self._slots, self._own_head = slots, own_head
        self._warps = [slots.warp] if own_head is None else [slots.warp, own_head.warp]
        self._seats: dict[int, Seat] = {}
        """By the session's ticket."""
        self._grown: dict[int, Session] = {}
        """Sessions with blocks that the device was not told of, by ticket."""
        self._suspended = Suspended()
        self._were_whole: set[int] = set()
        """Tickets of suspended sessions of which the own head had all K/V."""
        self._blank: set[int] = set()
        """Slots of sessions that came back, and have no own draft before their next round."""

    def of(self, session: Session) -> Seat:
        """The seat of a session that is not suspended."""
        return self._seats[session.ticket]

    def of_all(self, sessions: Sequence[Session]) -> list[Seat]:
        """[n]: the same of each."""
        seats = self._seats
        return [seats[session.ticket] for session in sessions]

    def resume(self, session: Session) -> bool:
        """See `RoundRunner`; the device is told all that it knew of the session, but for a draft of
        its own: the next round has none."""
        slot = self._slots.open(session.kv)
        kept = self._suspended.give(session)
        # What a grammar allows the own head to draft, the host says round by round.
        warped = [
            _begin_warp(warps, slot, session, target=warps is self._slots.warp)
            for warps in self._warps
        ]
        seat = self._seats[session.ticket] = Seat.of(session, slot, warped=any(warped))
        begun = session.emitted > 0
        self._slots.begin(
            slot,
            session.kv,
            session.spec.sampling,
            length=session.length if begun else 1,
            root=session.root if begun else 0,
        )
        if self._own_head is not None:
            # The head's K/V came back with the target's, or is about to be written with it; where
            # the session begins with that of others, it has the head's, too.
            seat.whole = session.ticket in self._were_whole if kept else session.own_draft > 0
            seat.drafted = begun and seat.whole
            if seat.drafted:
                self._own_head.forget(slot)
                self._blank.add(slot)
        self._were_whole.discard(session.ticket)
        return kept

    def suspend(self, session: Session, swap: SwapSpace | None) -> bool:
        """See `RoundRunner`."""
        seat = self._seats.pop(session.ticket)
        self._blank.discard(seat.slot)
        self._grown.pop(session.ticket, None)
        if seat.whole:
            self._were_whole.add(session.ticket)
        self._slots.close(seat.slot)
        return self._suspended.take(session, swap)

    def fetch(self, session: Session) -> bool:
        """See `RoundRunner`."""
        return self._suspended.fetch(session)

    def close(self, session: Session) -> None:
        """A session is over, suspended or not."""
        self._suspended.drop(session)
        self._were_whole.discard(session.ticket)
        self._grown.pop(session.ticket, None)
        seat = self._seats.pop(session.ticket, None)
        if seat is not None:
            self._blank.discard(seat.slot)
            self._slots.close(seat.slot)

    def note_drafts(
        self, seats: Sequence[Seat], prompts: Sequence[PrefillRow], *, own: bool
    ) -> frozenset[int]:
        """A launch of these rows and prompts is submitted, with own drafts or without: note whose
        own draft follows their prefix behind it. Which of the rows have none to verify yet."""
        if self._own_head is None:
            return _NOBODY
        if not own:
            # The head misses what is written.
            for seat in (*seats, *(self.of(row.session) for row in prompts)):
                seat.drafted = seat.whole = False
            return _NOBODY
        for row in prompts:
            if row.last and row.session.own_draft:
                seat = self.of(row.session)
                seat.drafted = seat.whole
        if not self._blank:
            return _NOBODY
        slots = [seat.slot for seat in seats]
        blank = frozenset(n for n, slot in enumerate(slots) if slot in self._blank)
        self._blank.difference_update(slots)
        return blank

    def grown(self, session: Session) -> None:
        """Remember to tell of a session's new blocks. Raises ResourceExhaustedError if a table does
        not hold them."""
        self._slots.check_blocks(session.kv.num_blocks)
        self._grown[session.ticket] = session

    def tell(self) -> None:
        """Tell the device of all sessions that began, and of blocks that were added, at once."""
        grown = [(self.of(session), session.kv.blocks) for session in self._grown.values()]
        added = [(s.slot, s.told, blocks[s.told :]) for s, blocks in grown if len(blocks) > s.told]
        self._slots.tell(added)
        # Only now: what the device was not told of is told again.
        for seat, blocks in grown:
            seat.told = max(seat.told, len(blocks))
        self._grown.clear()


def _begin_warp(warps: WarpSlots, slot: int, session: Session, *, target: bool) -> bool:
    """What the session does to its logits, by all that it has emitted."""
    spec, known = session.spec, session.tokens[: session.length]
    warps.begin(
        slot,
        spec.sampling,
        prompt_ids=known[: spec.prompt_len],
        output_ids=known[spec.prompt_len :],
        banned_first=spec.stop_token_ids if spec.min_new_tokens else (),
        banned_until=session.stops_from,
        legal=target and session.constraint is not None,
    )
    return warps.warps(slot)
