"""Preemption policy: decides which sessions hold KV, wait, or are preempted. Pure.

Times are seconds. A session *runs* if it holds KV, and *waits* if it was only opened or was
preempted. Its priority level is its priority plus one for every `priority_aging_s` of its total
waiting time, so that a session does not starve behind later sessions of a higher priority. Waiting
sessions are admitted by priority level, then in order of opening. If the first of them cannot be
admitted, the others wait, too. To be admitted, a session may preempt only sessions of a lower
priority. A running session that must grow may cause the preemption of any other. No session is
preempted more than `max_preemptions` times: after the last time it is admitted only with all the
blocks that it may ever need, and keeps them.
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
"""Maximum number of blocks that all running sessions together are expected to hold at their ends,
relative to the size of the pool. It is above 1 because sessions end at different times."""
PRIOR_TOKENS: Final = 256.0
"""Expected length of an answer, in tokens, before any answer has ended."""
MIN_GAIN: Final = 1 / 64
"""Minimum weight of a finished answer in the moving average of answer lengths."""
GROWTH: Final = 1.25
"""Expected final length of an answer that is longer than the mean, relative to its present
length."""


class SessionClaim(NamedTuple):
    """One session's need for KV blocks, as seen by the policy."""

    session_id: SessionId
    priority: int
    opened_at: float
    blocks: int
    """Number of blocks that the session holds; 0 while it waits."""
    next_blocks: int
    """Number of blocks that the session needs for its next rounds."""
    max_blocks: int
    """Maximum number of blocks that the session may ever need."""
    expected_blocks: int
    """Number of blocks that the session is expected to hold at its end."""
    tokens: int = 0
    """Number of tokens whose KV is lost, or must be copied, if the session is preempted."""
    preemptions: int = 0
    waited_s: float = 0.0
    """Total waiting time of the session so far, in seconds."""
    is_protected: bool = False
    """Whether the session was resumed so recently that it should not be preempted again."""
    shared: tuple[int, ...] = ()
    """Numbers of the session's blocks that other sessions hold, too. A shared block becomes free
    when its last session frees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionLimits:
    """Limits of admission and preemption."""

    max_running: int
    """Maximum number of sessions that hold KV at the same time."""
    max_preemptions: int
    """Maximum number of preemptions of one session."""
    watermark: float
    """Share of the pool that stays free when sessions are admitted, in [0, 1). At least one block
    per running session stays free, too."""
    aging_s: float
    """Waiting time, in seconds, that raises a session's priority level by one."""
    guard_blocks: int
    """Number of additional free blocks that must exist before a preempted session is resumed, since
    otherwise it might soon be preempted again."""

    def reserved_blocks(self, running: int, total_blocks: int) -> int:
        """Return the number of blocks that must stay free when a session is admitted to `running`
        other sessions."""
        return max(int(self.watermark * total_blocks), running + 1)

    def priority_level(self, claim: SessionClaim) -> int:
        """Return the session's priority plus one for every `aging_s` seconds that it has waited."""
        return claim.priority + int(claim.waited_s / self.aging_s)

    def admission_order(self, claim: SessionClaim) -> tuple[float, float]:
        """Return the sort key of a waiting session. Sessions with smaller keys are admitted
        first."""
        return -self.priority_level(claim), claim.opened_at

    def entry_blocks(self, claim: SessionClaim) -> int:
        """Return the number of blocks that a session gets when it is admitted: those for its next
        rounds or, if it may not be preempted again, all that it may ever need."""
        last = claim.preemptions >= self.max_preemptions
        return claim.max_blocks if last else claim.next_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolState:
    """The KV pool and the claims of all sessions."""

    free_blocks: int
    total_blocks: int
    running: Sequence[SessionClaim]
    waiting: Sequence[SessionClaim]


def can_all_run(
    *, max_blocks: int, sessions: int, total_blocks: int, bounds: PreemptionLimits
) -> bool:
    """Return whether all running and waiting sessions can run at the same time to their maximum
    length without a preemption. `sessions` is their number, and `max_blocks` the number of blocks
    that they may need together. If the result is True, `plan_preemption` would preempt no
    session."""
    reserve = bounds.reserved_blocks(sessions, total_blocks)
    return max_blocks + reserve <= total_blocks and sessions <= bounds.max_running


@dataclass(frozen=True, slots=True)
class Preempt:
    """Action that frees a running session's blocks and makes the session wait."""

    session_id: SessionId


@dataclass(frozen=True, slots=True)
class AdmitSession:
    """Action that gives a waiting session `blocks` blocks and lets it run."""

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
    """Return actions that admit all waiting sessions, in order of admission. Use this only if
    `can_all_run` is true. Only the claims' priority, waiting time, opening time, preemption count,
    `next_blocks` and `max_blocks` are used."""
    return [
        AdmitSession(claim.session_id, bounds.entry_blocks(claim))
        for claim in sorted(waiting, key=bounds.admission_order)
    ]


def choose_mode(
    *, swap_s: float | None, recompute_s: float, wanted: PreemptionMode | None = None
) -> PreemptionMode:
    """Return how a preempted session should get its KV back. `swap_s` is the time, in seconds, of
    swapping out and in; None if swapping is impossible. `recompute_s` is the time of prefilling, in
    seconds; 0 if unknown. `wanted` overrides the comparison of both, if swapping is possible."""
    if swap_s is None or wanted is PreemptionMode.RECOMPUTE:
        return PreemptionMode.RECOMPUTE
    if wanted is PreemptionMode.SWAP or not recompute_s:
        return PreemptionMode.SWAP
    return PreemptionMode.SWAP if swap_s <= recompute_s else PreemptionMode.RECOMPUTE


class OutputLengthStats:
    """Moving average of the lengths of finished answers, from which the lengths of other answers
    are predicted."""

    def __init__(self) -> None:
        self._mean = PRIOR_TOKENS
        self._seen = 1

    @property
    def mean(self) -> float:
        """Recent mean number of tokens of an answer."""
        return self._mean

    def observe(self, emitted: int) -> None:
        """Record that an answer ended after `emitted` tokens."""
        self._seen += 1
        self._mean += max(1 / self._seen, MIN_GAIN) * (emitted - self._mean)

    def expected_len(self, emitted: int, most: int) -> int:
        """Return the expected final length of an answer that has `emitted` tokens now and can have
        `most` tokens at most."""
        return max(emitted, min(most, int(max(self._mean, GROWTH * emitted))))


class _PoolLedger:
    """The state of the pool after the actions planned so far."""

    def __init__(self, state: KVPoolState, bounds: PreemptionLimits) -> None:
        self._bounds = bounds
        self._total = state.total_blocks
        self._running = {claim.session_id: claim for claim in state.running}
        self._spare = state.free_blocks - sum(map(_missing, state.running))
        """Free blocks beyond those that running sessions are about to take; may be negative."""
        self._holders = Counter(block for claim in state.running for block in claim.shared)
        """Number of running sessions that hold each shared block."""
        self.actions: list[Action] = []

    def preempt_for_growth(self) -> None:
        """Preempt sessions until all others find the blocks for their next rounds."""
        while self._spare < 0:
            # Sessions that reached the preemption limit hold all the blocks that they need, so
            # another session lacks blocks and can be preempted.
            victim = min(self._open_to_preemption(), key=self._cost)
            self._preempt(victim)

    def admit(self, claim: SessionClaim) -> bool:
        """Plan the admission of a session, preempting sessions of lower priority if necessary.
        Return False if the session cannot be admitted."""
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
        """Return whether a session could be admitted once the sessions `gone` were preempted."""
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
        """Return whether the session can probably run to its end: sessions that it cannot displace
        are expected to leave enough blocks."""
        names = {lesser.session_id for lesser in gone}
        others = (
            other.expected_blocks
            for other in self._running.values()
            if other.priority >= claim.priority and other.session_id not in names
        )
        return sum(others) + claim.expected_blocks <= OVERCOMMIT * self._total

    def _needed(self, claim: SessionClaim, victims: list[SessionClaim]) -> list[SessionClaim]:
        """Return `victims` without those sessions that need not be preempted, given the others."""
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
        """Return the number of blocks that become spare once the sessions `gone` are preempted."""
        last = Counter(block for claim in gone for block in claim.shared)
        alone = sum([claim.blocks - len(claim.shared) + _missing(claim) for claim in gone])
        return alone + sum([self._holders[block] == count for block, count in last.items()])

    def _open_to_preemption(self) -> Iterable[SessionClaim]:
        bound = self._bounds.max_preemptions
        return (claim for claim in self._running.values() if claim.preemptions < bound)

    def _lesser(self, claim: SessionClaim) -> Iterable[SessionClaim]:
        """Return the running sessions that a waiting session may displace."""
        level = self._bounds.priority_level
        return (
            other
            for other in self._open_to_preemption()
            if other.priority < claim.priority
            and level(other) < level(claim)
            and not other.is_protected
        )

    def _cost(self, claim: SessionClaim) -> tuple[int, bool, int, float]:
        """Return the sort key of preemption; sessions with smaller keys are preempted first: lowest
        priority level, then unprotected, then least progress, then opened last."""
        return (
            self._bounds.priority_level(claim),
            claim.is_protected,
            claim.tokens,
            -claim.opened_at,
        )


def _missing(claim: SessionClaim) -> int:
    return max(0, claim.next_blocks - claim.blocks)
