"""Assignment of drafters to verifiers and to sessions. Pure.

A session takes one slot of a drafter. The session's speedup depends on how soon the drafter's
proposals reach the verifier. Verifiers measure this time, which includes the network, the drafting
and the drafter's other sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.ids import DrafterId, RequestId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import AttachedDrafter, DrafterInfo, VerifierInfo
from outrider_router.base.reasons import MoveReason
from outrider_router.fleet.compatibility import can_serve

MIN_GAP = 2.0
"""Smallest difference between the costs of two drafters (`DrafterLoads.cost`) at which sessions are
moved from one to the other.
"""
GAP_SHARE = 0.25
"""Smallest difference between the costs of two drafters at which sessions are moved, as a fraction
of the larger cost. The difference must also be at least `MIN_GAP`.
"""
MIN_WEIGHT_DIFFERENCE = 0.25
"""Weights of drafters are rounded to multiples of this number, because smaller differences are
noise.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCandidate:
    """A drafter that is attached to a verifier and may draft for its sessions."""

    drafter_id: DrafterId
    methods: tuple[DraftMethod, ...]
    weight: float = 1.0
    """Duration of a round with this drafter's proposals, divided by the duration of a round with
    those of the fastest drafter.
    """
    same_host: bool = False
    accepts_sessions: bool = True
    """Whether the drafter takes new sessions; False while it is being removed or about to stop."""
    max_sessions: int | None = None
    """Largest number of sessions of all verifiers that the drafter may have; None if unlimited."""
    max_local_sessions: int | None = None
    """Largest number of sessions of this verifier that the drafter may have: 0 in quarantine, 1
    while it is probed, None if unlimited.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlacement:
    """A running session and its current drafter, as input of `plan_moves`."""

    request_id: RequestId
    verifier_id: VerifierId
    method: DraftMethod
    drafter_id: DrafterId | None
    tokens: int = 0
    """Number of tokens in the session's prefix, which a new drafter must receive."""
    is_movable: bool = True
    """Whether the session may be moved to balance loads or to probe a quarantined drafter. It may
    if it has emitted tokens and was not moved recently.
    """
    is_fixed: bool = False
    """Whether the session is never moved, because its verifier has refused too many moves."""


class SessionDrafter(NamedTuple):
    """Verifier and drafter of a running session, from which the loads of drafters are counted."""

    verifier_id: VerifierId
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class MoveSession:
    """Decision to give a session to another drafter."""

    request_id: RequestId
    drafter_id: DrafterId | None
    """The new drafter, or None if the session decodes without speculation."""
    reason: MoveReason


Candidates = Mapping[VerifierId, Sequence[DrafterCandidate]]


class DrafterLoads:
    """Number of sessions of each drafter, and of each pair of verifier and drafter."""

    def __init__(
        self,
        seats: Iterable[SessionPlacement | SessionDrafter],
        others: Mapping[DrafterId, int] | None = None,
    ) -> None:
        """Count the running sessions `seats` of this router. `others` has the number of other
        routers' sessions of each drafter.
        """
        self._all: Counter[DrafterId] = Counter(others or {})
        self._pairs: Counter[tuple[VerifierId, DrafterId]] = Counter()
        for seat in seats:
            self.count_session(seat, seat.drafter_id, 1)

    def count_session(
        self, seat: SessionPlacement | SessionDrafter, drafter_id: DrafterId | None, count: int
    ) -> None:
        """Change the number of sessions that a drafter has of `seat`'s verifier. `count` is 1 to
        add a session and -1 to remove one. Has no effect if `drafter_id` is None.
        """
        if drafter_id is not None:
            self._all[drafter_id] += count
            self._pairs[seat.verifier_id, drafter_id] += count

    def cost(self, candidate: DrafterCandidate, more: int = 0) -> float:
        """Return the cost of a drafter: the number of its sessions plus `more`, times its
        weight.
        """
        return (self._all[candidate.drafter_id] + more) * candidate.weight

    def has_room(self, candidate: DrafterCandidate, verifier_id: VerifierId) -> bool:
        """Return whether a drafter may get one more session of a verifier."""
        all_, here = candidate.max_sessions, candidate.max_local_sessions
        mine = self._pairs[verifier_id, candidate.drafter_id]
        return (
            candidate.accepts_sessions
            and (all_ is None or self._all[candidate.drafter_id] < all_)
            and (here is None or mine < here)
        )

    def choose_drafter(
        self, candidates: Sequence[DrafterCandidate], verifier_id: VerifierId, method: DraftMethod
    ) -> DrafterId | None:
        """Choose the drafter of one more session. Returns None if no candidate supports the method
        and has capacity.

        The chosen drafter has the lowest cost. Ties are broken in favour of drafters on the
        verifier's host, then of drafters with more of the verifier's sessions, so that the drafts
        of a round are made in few batches.
        """
        able = [c for c in candidates if method in c.methods and self.has_room(c, verifier_id)]
        chosen = min(
            able,
            key=lambda c: (
                self.cost(c, more=1),
                not c.same_host,
                -self._pairs[verifier_id, c.drafter_id],
                c.drafter_id,
            ),
            default=None,
        )
        return chosen.drafter_id if chosen is not None else None


def is_attached(drafter: DrafterInfo, verifier: VerifierInfo) -> bool:
    """Return whether the verifier is connected to this process of the drafter, not to an earlier
    one with the same id.
    """
    return any(
        attached.drafter_id == drafter.drafter_id and attached.incarnation == drafter.incarnation
        for attached in verifier.drafters
    )


def missing_attachments(drafter: DrafterInfo, verifiers: Mapping[str, VerifierInfo]) -> list[str]:
    """Return the addresses of the healthy verifiers to which this drafter should connect."""
    return [
        address
        for address, verifier in verifiers.items()
        if can_serve(drafter, verifier) and not is_attached(drafter, verifier)
    ]


def drafter_candidates(
    verifier: VerifierInfo,
    drafters: Iterable[DrafterInfo],
    *,
    detached: Collection[DrafterId] = (),
    draining: Collection[DrafterId] = (),
    rooms: Mapping[DrafterId, int] | None = None,
) -> tuple[DrafterCandidate, ...]:
    """Return the drafters that are attached to a verifier, as candidates for its sessions.

    `detached` are drafters that a session reported lost since the last poll of the verifier; they
    are not returned. `draining` are drafters that are being removed. `rooms` has, for each
    quarantined drafter, the largest number of the verifier's sessions that it may have.
    """
    bounds = rooms or {}
    attached = {link.drafter_id: link for link in verifier.drafters}
    able = [d for d in drafters if is_attached(d, verifier) and d.drafter_id not in detached]
    links = [attached[drafter.drafter_id] for drafter in able]
    soonest_ms = min((link.answer_ms for link in links if link.answer_ms), default=0.0)
    return tuple(
        DrafterCandidate(
            drafter_id=drafter.drafter_id,
            methods=drafter.methods,
            weight=_weight(link, soonest_ms, verifier.round_ms_p50),
            same_host=link.same_host,
            accepts_sessions=drafter.drafter_id not in draining and not drafter.draining,
            max_sessions=drafter.max_sessions or None,
            max_local_sessions=bounds.get(drafter.drafter_id),
        )
        for drafter, link in zip(able, links, strict=True)
    )


def _weight(link: AttachedDrafter, soonest_ms: float, round_ms: float) -> float:
    if not link.answer_ms or not round_ms:
        return 1.0
    ratio = (round_ms + link.answer_ms) / (round_ms + soonest_ms)
    return max(1.0, round(ratio / MIN_WEIGHT_DIFFERENCE) * MIN_WEIGHT_DIFFERENCE)


def plan_moves(
    seats: Sequence[SessionPlacement],
    candidates: Candidates,
    *,
    others: Mapping[DrafterId, int],
    max_homeless: int,
    max_balanced: int,
) -> list[MoveSession]:
    """Decide which sessions move to another drafter. `others` has the number of other routers'
    sessions of each drafter.

    Sessions of lost drafters come first, then those of quarantined drafters, then those of drafters
    that are being removed or about to stop; at most `max_homeless` of all these move. If there are
    none, each quarantined drafter that is to be probed gets one session. If there is nothing to
    probe either and the imbalance is large, at most `max_balanced` sessions move from busy to less
    busy drafters until the loads are even.
    """
    loads = DrafterLoads(seats, others)
    moves = list(_house(seats, candidates, loads, max_homeless))
    moves = moves or list(_probe(seats, candidates, loads))
    return moves or list(_balance(seats, candidates, loads, max_balanced))


def _house(
    seats: Sequence[SessionPlacement], candidates: Candidates, loads: DrafterLoads, most: int
) -> Iterator[MoveSession]:
    homeless: dict[MoveReason, list[SessionPlacement]] = {
        MoveReason.LOST: [],
        MoveReason.QUARANTINED: [],
        MoveReason.DRAINED: [],
    }
    for seat in seats:
        home = _home(seat, candidates)
        if seat.is_fixed:
            continue
        if home is None:
            homeless[MoveReason.LOST].append(seat)
        elif home.max_local_sessions == 0:
            homeless[MoveReason.QUARANTINED].append(seat)
        elif not home.accepts_sessions:
            homeless[MoveReason.DRAINED].append(seat)
    moved = 0
    for why, them in homeless.items():
        for seat in them:
            here = candidates.get(seat.verifier_id, ())
            target = loads.choose_drafter(here, seat.verifier_id, seat.method)
            # A quarantined drafter keeps no session. A leaving one keeps those that no other takes.
            if moved == most or (target is None and why is not MoveReason.QUARANTINED):
                continue
            moved += 1
            loads.count_session(seat, seat.drafter_id, -1)
            loads.count_session(seat, target, 1)
            yield MoveSession(seat.request_id, target, why)


def _probe(
    seats: Sequence[SessionPlacement], candidates: Candidates, loads: DrafterLoads
) -> Iterator[MoveSession]:
    """Move, to each drafter that is to be probed and has no session, the shortest session that may
    move.
    """
    settled = sorted(
        (seat for seat in seats if seat.is_movable and not seat.is_fixed),
        key=lambda seat: seat.tokens,
    )
    for verifier_id, here in candidates.items():
        for candidate in here:
            if candidate.max_local_sessions != 1 or not loads.has_room(candidate, verifier_id):
                continue
            for seat in settled:
                if seat.verifier_id == verifier_id and seat.method in candidate.methods:
                    settled.remove(seat)
                    loads.count_session(seat, seat.drafter_id, -1)
                    loads.count_session(seat, candidate.drafter_id, 1)
                    yield MoveSession(seat.request_id, candidate.drafter_id, MoveReason.PROBE)
                    break


def _balance(
    seats: Sequence[SessionPlacement], candidates: Candidates, loads: DrafterLoads, most: int
) -> Iterator[MoveSession]:
    movable: dict[tuple[VerifierId, DraftMethod, DrafterId], list[SessionPlacement]] = {}
    for seat in sorted(seats, key=lambda seat: seat.tokens, reverse=True):
        home = _home(seat, candidates)
        if seat.is_movable and not seat.is_fixed and home is not None:
            kind = seat.verifier_id, seat.method, home.drafter_id
            movable.setdefault(kind, []).append(seat)
    for number in range(most):
        found = _widest_gap(movable, candidates, loads)
        if found is None:
            return
        gap, busy, kind, target = found
        if number == 0 and gap < max(MIN_GAP, GAP_SHARE * busy):
            return
        # The shortest one: its prefix is the cheapest to send.
        seat = movable[kind].pop()
        loads.count_session(seat, seat.drafter_id, -1)
        loads.count_session(seat, target, 1)
        yield MoveSession(seat.request_id, target, MoveReason.BALANCE)


def _widest_gap(
    movable: Mapping[tuple[VerifierId, DraftMethod, DrafterId], Sequence[SessionPlacement]],
    candidates: Candidates,
    loads: DrafterLoads,
) -> tuple[float, float, tuple[VerifierId, DraftMethod, DrafterId], DrafterId] | None:
    """Find the move that reduces the imbalance most. Returns the difference between the current and
    the new cost, the current drafter's cost, the (verifier, method, drafter) of the session and the
    new drafter, or None if no move helps.
    """
    best = None
    for kind, them in movable.items():
        verifier_id, method, drafter_id = kind
        here = candidates[verifier_id]
        busy = next(loads.cost(c) for c in here if c.drafter_id == drafter_id)
        for other in here if them else ():
            if method not in other.methods or not loads.has_room(other, verifier_id):
                continue
            gap = busy - loads.cost(other, more=1)
            if gap > 0.0 and (best is None or gap > best[0]):
                best = gap, busy, kind, other.drafter_id
    return best


def _home(seat: SessionPlacement, candidates: Candidates) -> DrafterCandidate | None:
    """Return the candidate that is the session's drafter, or None if it is not attached."""
    here = candidates.get(seat.verifier_id, ())
    return next((c for c in here if c.drafter_id == seat.drafter_id), None)
