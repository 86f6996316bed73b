"""A drafter's engine and a verifier's rounds in simulated time: what look-ahead is worth.

The engine is the real one; its source takes the time that it is told to. The verifier begins a
round as soon as drafts are there, takes hits at once, and waits for missed rows where that pays.
Outcomes are drawn from the distribution that the source tells of its scores.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.proposers.interface import (
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    ProposedDraft,
    SessionDrafts,
)
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.draft_engine import DraftEngine, OutgoingProposals
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES
from outrider_drafter.state.session import FollowedSession, VerdictLimits

from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import DraftTree
from outrider.wire.messages import Proposals, SessionStart, Verdict, Verdicts

CANDIDATES = 32
SESSIONS = (1, 4, 8, 16, 32)
_NODE, _FIRST = 1, 2
"""The token of every node, and the first candidate."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Milliseconds, in service."""

    nodes: int
    draft: tuple[float, ...]
    """By `SESSIONS`."""
    score: tuple[float, ...]
    """By `SESSIONS`."""
    branch: tuple[float, ...]
    """By `OUTCOME_BATCH_SIZES`."""
    foreseen: tuple[float, ...]
    """P(an outcome is among the first 8, 16, 32)."""
    slowdown: float = 1.0
    way: float = 0.15
    """Of a message, from one process's hand to the other's."""
    settle: float = 0.3
    """Between a round's end and the next round, or its verdicts."""
    round: float = 4.05
    row: float = 0.022

    def round_s(self, rows: int) -> float:
        """A verify forward of so many sessions."""
        return (self.round + self.row * rows * (self.nodes + 1)) / 1000.0

    def drafts_s(self, sessions: int) -> float:
        """A launch of drafts."""
        return float(np.interp(sessions, SESSIONS, self.draft)) * self.slowdown / 1000.0

    def scores_s(self, lives: int) -> float:
        """A launch of scores."""
        return float(np.interp(lives, SESSIONS, self.score)) * self.slowdown / 1000.0

    def branches_s(self, outcomes: int) -> float:
        """A launch of branches."""
        size = next(i for i, size in enumerate(OUTCOME_BATCH_SIZES) if outcomes <= size)
        return self.branch[size] * self.slowdown / 1000.0

    @property
    def law(self) -> NDArray[np.float64]:
        """[CANDIDATES]: of the outcomes, best first."""
        sums = np.interp(np.arange(CANDIDATES + 1), [0, 1, 4, 8, 16, 32], [0.0, *self._sums])
        return np.diff(sums)

    @property
    def _sums(self) -> tuple[float, ...]:
        first = self.foreseen[0]
        return (0.45 * first, 0.78 * first, *self.foreseen)


class Clock:
    """The drafter's time, seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class _Source(NgramProposer):
    """Drafts that mean nothing; all outcomes are at the root."""

    def __init__(self, costs: Costs, clock: Clock) -> None:
        super().__init__()
        self.costs, self._clock = costs, clock
        distribution = np.full((costs.nodes + 1, CANDIDATES), -np.inf, dtype=np.float32)
        distribution[0] = np.log(costs.law)
        tokens = np.full(distribution.shape, -1, dtype=np.int32)
        tokens[0] = _FIRST + np.arange(CANDIDATES)
        self._scores = tokens, distribution
        self._draft = ProposedDraft(
            tree=DraftTree.chain(np.full(costs.nodes, _NODE, dtype=np.int32))
        )
        self._lives: Sequence[PendingProposal] = ()

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        self._clock.now += self.costs.drafts_s(len(sessions))
        yield SessionDrafts.of_drafts([(session, self._draft) for session in sessions])

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        self._clock.now += self.costs.scores_s(len(lives))
        self._lives = lives
        tokens, distribution = self._scores
        return OutcomeScores.of_candidates(
            lives, [tokens] * len(lives), [distribution] * len(lives)
        )

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        self._clock.now += self.costs.branches_s(len(outcomes))
        drafted = SessionDrafts.of_drafts(
            [(self._lives[o.live].session, self._draft) for o in outcomes]
        )
        yield OutcomeDrafts.of_drafts(np.arange(len(outcomes)), drafted)


@dataclass
class _Row:
    """A session of the verifier."""

    handle: int
    length: int = 1
    digest: int = extend_digest(EMPTY_DIGEST, [0])
    ready: bool = False
    ahead: set[int] = field(default_factory=set)
    told: int = 0


class Verifier:
    """Rounds, as far as the time of the drafter has come."""

    def __init__(self, costs: Costs, sessions: int, seed: int, *, answer_s: float) -> None:
        self._costs, self._answer_s = costs, answer_s
        self._rng = np.random.default_rng(seed)
        self._distribution = costs.law
        self.rows = [_Row(handle) for handle in range(sessions)]
        self._arrivals: list[tuple[float, int, int]] = []
        self.verdicts: list[tuple[float, int, Verdicts]] = []
        """(arrival at the drafter, number, message)."""
        self._running: list[_Row] = []
        self._ends = self._begins = 0.0
        self.rounds = self.hits = self.sent = 0
        self.since_verdict: list[float] = []
        """Seconds that rows without a hit waited for their drafts."""
        self._missed_at: dict[int, float] = {}
        self._tell(self.rows, 0.0)

    def receive(self, answers: OutgoingProposals, now: float) -> None:
        """Drafts leave the drafter."""
        for _, message in answers:
            assert isinstance(message, Proposals)
            for handle, digest in zip(
                message.handles.tolist(), message.digests.tolist(), strict=True
            ):
                arrival = now + self._costs.way / 1000.0
                heapq.heappush(self._arrivals, (arrival, handle, digest))

    def advance(self, until: float) -> None:
        """All that happens up to a time."""
        while (when := self.next_event()) <= until:
            if self._running and when == self._ends:
                self._settle()
            while self._arrivals and self._arrivals[0][0] <= when:
                self._take(*heapq.heappop(self._arrivals))
            if not self._running:
                self._begin(when)

    def next_event(self) -> float:
        """When something happens here; inf: nothing will."""
        ends = self._ends if self._running else np.inf
        begins = np.inf
        if not self._running and any(row.ready for row in self.rows):
            begins = self._begins
        arrival = self._arrivals[0][0] if self._arrivals else np.inf
        return min(ends, begins, arrival)

    def _take(self, when: float, handle: int, digest: int) -> None:
        row = self.rows[handle]
        if digest != row.digest:
            row.ahead.add(digest)
        elif not row.ready and row not in self._running:
            if not self._running and not any(other.ready for other in self.rows):
                self._begins = max(self._begins, when + self._pause_s(1))
            row.ready = True
            self.since_verdict.append(when - self._missed_at.pop(handle))

    def _begin(self, now: float) -> None:
        ready = [row for row in self.rows if row.ready]
        if ready and (len(ready) == len(self.rows) or now >= self._begins):
            self._running = ready
            for row in ready:
                row.ready = False
            self._ends = now + self._costs.round_s(len(ready))

    def _settle(self) -> None:
        rows, self._running = self._running, []
        self.rounds += len(rows)
        for row in rows:
            rank = int((self._rng.random() > self._distribution.cumsum()).sum())
            token = _FIRST + rank if rank < CANDIDATES else 0
            row.digest = extend_digest(row.digest, [token])
            row.length += 1
            row.ready = row.digest in row.ahead
            self.hits += row.ready
            row.ahead.clear()
            self._emit(row, token)
        self._begins = self._ends + self._costs.settle / 1000.0
        self._begins += self._pause_s(sum(row.ready for row in self.rows))

    def _pause_s(self, found: int) -> float:
        """How long that many drafts wait for those of the other rows, where that pays."""
        missed = len(self.rows) - found
        pays = missed * self._costs.round_s(len(self.rows)) / len(self.rows)
        return pays if found and self._answer_s < pays else 0.0

    def _emit(self, row: _Row, token: int) -> None:
        if not row.ready:
            self._missed_at[row.handle] = self._ends
        verdict = _verdict(row, [token])
        self._send(verdict, self._ends)

    def _tell(self, rows: Sequence[_Row], now: float) -> None:
        for row in rows:
            self._missed_at[row.handle] = now
            self._send(_verdict(row, [0]), now)

    def _send(self, verdict: Verdict, now: float) -> None:
        self.sent += 1
        arrival = now + (self._costs.settle + self._costs.way) / 1000.0
        heapq.heappush(self.verdicts, (arrival, self.sent, Verdicts.of_verdicts([verdict])))


def _verdict(row: _Row, tokens: list[int]) -> Verdict:
    return Verdict(
        handle=row.handle,
        start=row.length - len(tokens),
        tokens=np.array(tokens, dtype=np.int32),
        prefix_digest=row.digest,
        feature_start=0,
        features=None,
        draft_wanted=True,
    )


@dataclass(frozen=True)
class Ran:
    """What came of a run."""

    rounds_per_s: float
    hits: float
    """Share of rounds whose next draft was there in time."""
    answer_s: float
    """How long a row that missed waited for its draft, in the mean."""
    cut: float
    """Passes that were not begun, a round."""


def run(
    costs: Costs,
    sessions: int,
    *,
    look_ahead: bool,
    in_time: bool = True,
    rounds: int,
    seed: int,
    then: Costs | None = None,
) -> Ran:
    """So many rounds of every session, in the mean; `then`: what costs are from the middle on."""
    clock = Clock()
    metrics = DrafterMetrics()
    source = _Source(costs, clock)
    engine = DraftEngine(
        [source],
        limits=VerdictLimits(
            vocab_size=_FIRST + CANDIDATES, feature_size=0, max_context=rounds * 4
        ),
        max_sessions=sessions,
        metrics=metrics,
        now=clock,
        in_time=in_time,
    )
    answer_s = costs.drafts_s(sessions) + 2 * costs.way / 1000.0
    verifier = Verifier(costs, sessions, seed, answer_s=answer_s)
    plan = SpeculationPlan(
        method=DraftMethod.NGRAM, draft_tokens=costs.nodes, look_ahead=int(look_ahead), fan_out=0
    )
    for row in verifier.rows:
        start = SessionStart(
            handle=row.handle,
            session_id=SessionId(f"s{row.handle}"),
            epoch=0,
            plan=plan,
            sampling=SamplingParams(),
            max_len=rounds * 4,
            prompt_len=1,
        )
        engine.handle_message(1, start)
    while verifier.rounds < rounds * sessions:
        if then is not None and verifier.rounds >= rounds * sessions // 2:
            source.costs = then
        _work(engine, verifier, clock)
    name = "outrider_drafter_shortened_look_aheads_total"
    made = metrics.registry.get_sample_value(name, {"part": "pass"})
    assert made is not None
    return Ran(
        verifier.rounds / sessions / clock.now,
        verifier.hits / verifier.rounds,
        float(np.mean(verifier.since_verdict)),
        made / verifier.rounds,
    )


def _work(engine: DraftEngine, verifier: Verifier, clock: Clock) -> None:
    """What a drafting thread does, once."""
    _look(engine, verifier, clock)
    if engine.has_wanted_drafts:
        for answers in engine.draft_wanted():
            verifier.receive(answers, clock.now)
    elif engine.has_look_ahead_work:
        ahead = engine.run_look_ahead()
        for answers in ahead:
            verifier.receive(answers, clock.now)
            verifier.advance(clock.now)
            if verifier.verdicts and verifier.verdicts[0][0] <= clock.now:
                break
            engine.record_poll(waited=False)
        ahead.close()
    elif engine.has_pending_metrics:
        engine.update_metrics()
    elif verifier.verdicts:
        before = clock.now
        clock.now = max(before, verifier.verdicts[0][0])
        _look(engine, verifier, clock, waited=clock.now > before)
    else:
        clock.now = max(verifier.next_event(), clock.now)


def _look(engine: DraftEngine, verifier: Verifier, clock: Clock, *, waited: bool = False) -> None:
    verifier.advance(clock.now)
    engine.record_poll(waited=waited)
    while verifier.verdicts and verifier.verdicts[0][0] <= clock.now:
        engine.handle_message(1, heapq.heappop(verifier.verdicts)[2])
