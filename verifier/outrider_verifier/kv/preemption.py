"""Preemption policy: decides which sessions hold KV, wait, or are preempted. Pure.

Times are seconds. A session *waits* (no KV: it was opened, or preempted) or *runs*. Its claim is
its priority plus one for every `priority_aging_s` of its total waiting time, so that no session
starves behind later ones of a higher priority. Waiting sessions are admitted by claim, then in
order of opening, and none passes the first in line. Only a higher priority takes blocks from others
to be admitted; a running session that must grow may take them from any. No session is preempted
more than `max_preemptions` times: after the last time it is admitted only with all the blocks that
it may ever need, and keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

from outrider.ids import SessionId
from outrider_verifier.state.preemption_mode import PreemptionMode

OVERCOMMIT: Final = 1.25
"""How much of the pool running sessions may be expected to hold at their ends, all together: they
do not end at the same time."""
PRIOR_TOKENS: Final = 256.0
"""Length that an answer is expected to have before any has ended."""
MIN_GAIN: Final = 1 / 64
"""Weight of one answer's length in what is expected of the next ones, at least."""
GROWTH: Final = 1.25
"""A session that is longer than expected is expected to become so many times as long as it is."""


class SessionClaim(NamedTuple):
    """What the policy must know of one session."""

    session_id: SessionId
    priority: int
    opened_at: float
    blocks: int
    """That it holds; 0 while it waits."""
    next_blocks: int
    """That it must hold for its next rounds."""
    max_blocks: int
    """That it may ever have to hold."""
    expected_blocks: int
    """That it is expected to hold at its end."""
    tokens: int = 0
    """Whose KV is lost, or has to be copied, if it is preempted."""
    preemptions: int = 0
    waited_s: float = 0.0
    """In all, up to now."""
    is_protected: bool = False
    """Whether it was resumed too lately to be preempted again."""
    shared: tuple[int, ...] = ()
    """Numbers of those of its blocks that others hold, too: they are free once the last is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionLimits:
    """What preemption keeps to."""

    max_running: int
    """Sessions that hold KV at once."""
    max_preemptions: int
    """Of one session."""
    watermark: float
    """Share of the pool that stays free when sessions are admitted, besides a block for each that
    runs."""
    aging_s: float
    """What waiting so long adds one to a session's claim."""
    guard_blocks: int
    """Free blocks, beside what it takes, that a preempted session must find to be resumed: else it
    would be the next one to go."""

    def reserved_blocks(self, running: int, total_blocks: int) -> int:
        """Blocks that stay free when a session is admitted beside so many."""
        return max(int(self.watermark * total_blocks), running + 1)

    def priority_level(self, claim: SessionClaim) -> int:
        """A session's claim on the others' blocks."""
        return claim.priority + int(claim.waited_s / self.aging_s)

    def admission_order(self, claim: SessionClaim) -> tuple[float, float]:
        """Who is admitted first is smaller."""
        return -self.priority_level(claim), claim.opened_at

    def entry_blocks(self, claim: SessionClaim) -> int:
        """Blocks that a session takes when it is admitted."""
        last = claim.preemptions >= self.max_preemptions
        return claim.max_blocks if last else claim.next_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolState:
    """The pool and everybody's claims on it."""

    free_blocks: int
    total_blocks: int
    running: Sequence[SessionClaim]
    waiting: Sequence[SessionClaim]


def can_all_run(
    *, max_blocks: int, sessions: int, total_blocks: int, bounds: PreemptionLimits
) -> bool:
    """Return whether `sessions`, those that wait included, can all run to their maximum length
    without a preemption. `max_blocks`: blocks that they need together at most. If true,
    `plan_preemption` would preempt no session."""
    reserve = bounds.reserved_blocks(sessions, total_blocks)
    return max_blocks + reserve <= total_blocks and sessions <= bounds.max_running


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take a running session's blocks; it waits from now on."""

    session_id: SessionId


@dataclass(frozen=True, slots=True)
class AdmitSession:
    """Give a waiting session so many blocks; it runs from now on."""

    session_id: SessionId
    blocks: int


Action = Preempt | AdmitSession


def plan_preemption(state: KVPoolState, bounds: PreemptionLimits) -> list[Action]:
    """Return the preemptions and admissions to carry out now, in order. Afterwards every running
    session has free blocks for its next rounds, and at least one session runs if there is any."""
    book = _PoolLedger(state, bounds)
    book.preempt_for_growth()
    for claim in sorted(state.waiting, key=bounds.admission_order):
        if not book.admit(claim):
            break
    return book.actions


def admit_all(waiting: Iterable[SessionClaim], bounds: PreemptionLimits) -> list[Action]:
    """What to do where `can_all_run`; of a claim only who waits, how long and what for is looked
    at."""
    return [
        AdmitSession(claim.session_id, bounds.entry_blocks(claim))
        for claim in sorted(waiting, key=bounds.admission_order)
    ]


def choose_mode(
    *, swap_s: float | None, recompute_s: float, wanted: PreemptionMode | None = None
) -> PreemptionMode:
    """How a session is to get its KV back. `swap_s`: seconds of a swap out and in again, None
    where there is no room for it or nothing to be swapped; `recompute_s`: seconds of prefilling, 0
    where that was not measured. `wanted`: not to be weighed."""
    if swap_s is None or wanted is PreemptionMode.RECOMPUTE:
        return PreemptionMode.RECOMPUTE
    if wanted is PreemptionMode.SWAP or not recompute_s:
        return PreemptionMode.SWAP
    return PreemptionMode.SWAP if swap_s <= recompute_s else PreemptionMode.RECOMPUTE


class OutputLengthStats:
    """How long answers are expected to become, by those that have ended."""

    def __init__(self) -> None:
        self._mean = PRIOR_TOKENS
        self._seen = 1

    @property
    def mean(self) -> float:
        """Tokens of an answer, as seen of late."""
        return self._mean

    def observe(self, emitted: int) -> None:
        """An answer ended after so many tokens."""
        self._seen += 1
        self._mean += max(1 / self._seen, MIN_GAIN) * (emitted - self._mean)

    def expected_len(self, emitted: int, most: int) -> int:
        """Tokens that an answer will have of which so many are there, and that has `most` at most;
        at least `emitted`."""
        return max(emitted, min(most, int(max(self._mean, GROWTH * emitted))))


class _PoolLedger:
    """The pool as it would be after the actions so far."""

    def __init__(self, state: KVPoolState, bounds: PreemptionLimits) -> None:
        self._bounds = bounds
        self._total = state.total_blocks
        self._running = {claim.session_id: claim for claim in state.running}
        self._spare = state.free_blocks - sum(map(_missing, state.running))
        """Free blocks beyond those that running sessions are about to take; may be negative."""
        self._holders = Counter(block for claim in state.running for block in claim.shared)
        """Of blocks that several hold: who of them still runs."""
        self.actions: list[Action] = []

    def preempt_for_growth(self) -> None:
        """Preempt until everybody else finds the blocks for the next rounds."""
        while self._spare < 0:
            # Who reached the bound holds all that it needs, so somebody else lacks blocks.
            victim = min(self._open_to_preemption(), key=self._cost)
            self._preempt(victim)

    def admit(self, claim: SessionClaim) -> bool:
        """Let a session in, at the cost of lower priorities if need be; whether that can be."""
        victims: list[SessionClaim] = []
        if not self._fits(claim, victims):
            lesser = sorted(self._lesser(claim), key=self._cost)
            if not (lesser and self._fits(claim, lesser)):
                return False
            while not self._fits(claim, victims):
                victims.append(lesser[len(victims)])
        for victim in self._needed(claim, victims):
            self._preempt(victim)
        blocks = self._bounds.entry_blocks(claim)
        self._spare -= blocks
        self._running[claim.session_id] = claim._replace(blocks=blocks, next_blocks=blocks)
        self.actions.append(AdmitSession(claim.session_id, blocks))
        return True

    def _fits(self, claim: SessionClaim, gone: Sequence[SessionClaim]) -> bool:
        """Whether a session finds a place and blocks once these are gone."""
        stay = len(self._running) - len(gone)
        spare = self._spare + self._freed(gone)
        if not stay:
            return self._bounds.entry_blocks(claim) <= spare
        if stay >= self._bounds.max_running:
            return False
        reserve = self._bounds.reserved_blocks(stay, self._total)
        entry = self._bounds.entry_blocks(claim)
        guarded_blocks = min(
            claim.max_blocks, entry + self._bounds.guard_blocks * bool(claim.preemptions)
        )
        return max(guarded_blocks, entry + reserve) <= spare and self._expected(claim, gone)

    def _expected(self, claim: SessionClaim, gone: Sequence[SessionClaim]) -> bool:
        """Whether it is likely to stay: those that it cannot displace will leave it enough."""
        names = {lesser.session_id for lesser in gone}
        others = (
            other.expected_blocks
            for other in self._running.values()
            if other.priority >= claim.priority and other.session_id not in names
        )
        return sum(others) + claim.expected_blocks <= OVERCOMMIT * self._total

    def _needed(self, claim: SessionClaim, victims: list[SessionClaim]) -> list[SessionClaim]:
        """Without those whose going the others' going has made needless."""
        for lesser in sorted(victims, key=attrgetter("blocks")):
            rest = [other for other in victims if other is not lesser]
            if self._fits(claim, rest):
                victims = rest
        return victims

    def _preempt(self, victim: SessionClaim) -> None:
        del self._running[victim.session_id]
        self._spare += self._freed([victim])
        self._holders.subtract(victim.shared)
        self.actions.append(Preempt(victim.session_id))

    def _freed(self, gone: Sequence[SessionClaim]) -> int:
        """How much more is spare once these are gone."""
        last = Counter(block for claim in gone for block in claim.shared)
        alone = sum([claim.blocks - len(claim.shared) + _missing(claim) for claim in gone])
        return alone + sum([self._holders[block] == count for block, count in last.items()])

    def _open_to_preemption(self) -> Iterable[SessionClaim]:
        bound = self._bounds.max_preemptions
        return (claim for claim in self._running.values() if claim.preemptions < bound)

    def _lesser(self, claim: SessionClaim) -> Iterable[SessionClaim]:
        """Whom a session that waits may displace."""
        level = self._bounds.priority_level
        return (
            other
            for other in self._open_to_preemption()
            if other.priority < claim.priority
            and level(other) < level(claim)
            and not other.is_protected
        )

    def _cost(self, claim: SessionClaim) -> tuple[int, bool, int, float]:
        """Who goes first is smaller: the lowest claim, then the least progress, then the latest."""
        return (
            self._bounds.priority_level(claim),
            claim.is_protected,
            claim.tokens,
            -claim.opened_at,
        )


def _missing(claim: SessionClaim) -> int:
    return max(0, claim.next_blocks - claim.blocks)
