"""A verifier's rounds under load, in simulated time: the planner decides, the costs are given.

Sessions follow each other in a closed loop, so that prompts arrive all the time. Which rows share a
round is decided by the real schedule; drafts come from a drafter that answers a round's verdicts
together and may have drafted ahead of them, or from a head in the verifier itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from outrider_verifier.engine.schedule_policy import plan_round
from outrider_verifier.exchange.proposal_inbox import HeldProposal
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.model_runner.interface import DraftShapeTimes, RowOutput
from outrider_verifier.model_runner.results import RowResult
from outrider_verifier.planner.speculation_policy import SpeculationPolicy
from outrider_verifier.state.round_plan import (
    PrefillChunk,
    RoundEstimates,
    RoundLimits,
    RoundPlan,
    RowState,
)
from outrider_verifier.state.session import Session

from outrider.ids import DrafterId, SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import Proposals, SessionSpec
from tests.fakes.target import NO_BLOCKS

ROWS = (1, 8, 32, 64)
DRAFT = 4
TREE = 16
"""Nodes of the trees that in-process drafts may be."""
TREE_TOKENS = 1.3
"""Tokens of a row with a tree over those of one with a chain."""
MAX_TREE_ROWS = 16
PIECE = 64
LIMITS = RoundLimits(
    prefill_tokens=16 * PIECE, chunk_tokens=PIECE, decode_tokens=1024, batch_wait_s=0.005
)
ARRIVAL_S = 0.001
"""Until the client of a session that ended has opened its next one."""
PASSAGE = 96
"""Tokens after which an answer that drifts is as hard again as it was."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Milliseconds by `ROWS`, and of a prefill chunk beside rows and alone."""

    plain: tuple[float, ...]
    verify: tuple[float, ...]
    """A round of so many rows with drafts; with a head of the verifier's own, its drafting too."""
    trees: tuple[float, ...] = ()
    """The same with in-process trees; without it there are only chains."""
    exchange: tuple[float, ...]
    """From the end of a round to its sessions' next proposals; zeros for in-process drafts."""
    piece: float
    host: float = 0.0
    """What a round takes beyond what the device was measured to."""
    own_host: float = 0.0
    """How much more of that there is with in-process drafts."""
    reading: float = 0.2
    """What the drafter takes for a prompt, or for what was missed in a pause."""
    opening: float = 0.0
    """What a session that is opened takes the host, before the next round."""
    queued: float = 0.0
    """Share of an exchange in which the drafter works, and takes up no other batch."""

    def of(self, row: Sequence[float], sessions: int) -> float:
        """Seconds for so many sessions."""
        return _between(tuple(row), sessions) / 1000.0

    def times(self, rows: int, *, own: bool, chunks: int = 0) -> float | None:
        """What a warm-up finds."""
        row = self.verify if own else self.plain
        return self.of(row, rows) - (self.host - chunks * self.piece) / 1000.0

    def draft_shapes(self, sessions: int) -> list[DraftShapeTimes]:
        """The same, of each shape that in-process drafts may have."""
        found = [DraftShapeTimes(1 + DRAFT, False, self.of(self.verify, sessions))]
        if self.trees and sessions <= MAX_TREE_ROWS:
            found.append(DraftShapeTimes(1 + TREE, True, self.of(self.trees, sessions)))
        return found


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What a drafter makes of look-ahead."""

    hits: float
    """P(the verdict of a draft was drafted for)."""
    stale: float = 0.95
    """Draft accepted tokens on a hit, over those of a draft made after the verdict."""
    late: float = 0.0
    """Milliseconds by which a draft for a miss comes later: the drafter was drafting ahead."""
    stretch: float = 1.0
    """What a round takes over one beside which nothing is drafted ahead: cores are shared."""


@dataclass(kw_only=True)
class Service:
    """One run: `waves` answers of each of `sessions` clients."""

    costs: Costs
    sessions: int
    extra_tokens: float
    """Draft accepted tokens in a round, in the mean."""
    policy: SpeculationPolicy | None
    """None: no session speculates."""
    speculative: bool = True
    """Whether sessions ask for drafts, where there is a policy."""
    own: bool = False
    ahead: Ahead | None = None
    """None: plans are of lock-step."""
    texts: float = 0.0
    """By how much the tokens of drafts that stand differ from answer to answer: the deviation of
    their logarithm."""
    drift: float = 0.0
    """By how much they do within an answer: the amplitude of slow waves of their logarithm."""
    waves: int = 2
    spread_s: float = 1e-5
    """From one of the first arrivals to the next."""
    seed: int = 0
    noise: float = 0.08
    stalls: float = 0.001
    temperature: float = 0.0
    now: float = 0.0
    tokens: int = 0
    rounds: int = 0
    decoded: int = 0
    """Session rounds."""
    paused: int = 0
    """Session rounds that were decoded plainly by the planner's decision."""
    looked: int = 0
    """Session rounds under look-ahead."""
    trees: int = 0
    """Rounds with trees."""
    turns: int = 0
    """How often sessions went from one of lock-step and look-ahead to the other."""

    def run(self) -> float:
        """Seconds that it takes until the last answer has ended."""
        # Lengths are the same whatever is decided; all the rest may differ.
        lengths = np.random.default_rng(self.seed)
        count = self.waves * self.sessions
        self._answers = np.minimum(lengths.geometric(1.0 / 110.0, count), 256).tolist()
        self._prompts = lengths.integers(42, 244, count).tolist()
        self._rng = np.random.default_rng((self.seed, 1))
        texts = np.random.default_rng((self.seed, 2))
        self._ease = (self.texts * texts.normal(size=count) - self.texts**2 / 2.0).tolist()
        self._phases = texts.uniform(0.0, 2.0 * math.pi, count).tolist()
        self._live: dict[SessionId, Session] = {}
        self._left = list(range(count))
        self._arrivals: list[float] = [self.now + self.spread_s * i for i in range(self.sessions)]
        self._proposals: list[tuple[float, int, SessionId, int]] = []
        self._ready: dict[SessionId, float] = {}
        self._hits: set[SessionId] = set()
        """Those of whom the next draft was made ahead."""
        self._branched: set[SessionId] = set()
        """Those for whose present drafts the drafter drafts ahead."""
        self._drafter_busy = self.now
        self._idle_since = began = self.now
        self._round_s = self._opening_s = 0.0
        while self._left or self._live:
            self._step()
        return self.now - began

    # ---- what happens --------------------------------------------------------------------------

    def _step(self) -> None:
        self._take_in()
        self._turn()
        answer_s = 0.0 if self.policy is None else self.policy.slowest_response_s()
        plan = plan_round(
            [self._state(s) for s in self._live.values()],
            self.now,
            LIMITS,
            times=RoundEstimates(answer_s=answer_s, round_s=self._round_s),
        )
        pieces = [-(-session.prefill_left // PIECE) for session in self._live.values()]
        plan = self._paced(plan, sum(count > 0 for count in pieces), sum(pieces))
        if plan.is_empty:
            due = [] if plan.wait_until is None else [plan.wait_until]
            due += self._arrivals[:1] if self._left else []
            due += [self._proposals[0][0]] if self._proposals else []
            self.now = max(self.now + 1e-7, min(due))
            return
        self._round(plan)

    def _paced(self, plan: RoundPlan, waiting: int, left: int) -> RoundPlan:
        """`plan` with fewer prompt tokens beside sessions that decode, where `waiting` sessions
        have so many pieces `left`: the prompts of a burst come in over many rounds, as where
        clients do not all ask at once. The floors of the tests are for such a load."""
        if not plan.decode:
            return plan
        crowded = 6 * waiting >= waiting + len(plan.decode) and left > 12
        budget, chunks = (8 if crowded else 4) * PIECE, list[PrefillChunk]()
        for chunk in plan.prefill:
            if budget > 0:
                chunks.append(replace(chunk, num_tokens=min(chunk.num_tokens, budget)))
                budget -= -(-chunks[-1].num_tokens // PIECE) * PIECE
        return replace(plan, prefill=tuple(chunks))

    def _take_in(self) -> None:
        while self._left and self._arrivals and self._arrivals[0] <= self.now:
            heapq.heappop(self._arrivals)
            self._open(self._left.pop(0))
            self._opening_s += self.costs.opening / 1000.0
        while self._proposals and self._proposals[0][0] <= self.now:
            _, _, name, length = heapq.heappop(self._proposals)
            session = self._live.get(name)
            if session is None or self.policy is None:
                continue
            usable = session.length == length and not session.is_speculation_off
            self.policy.record_arrival(session, prefix_len=length, usable=usable, now=self.now)
            if usable:
                self._ready[name] = session.proposal_at = self.now

    def _open(self, index: int) -> None:
        name, speculative = SessionId(f"s{index}"), self.policy is not None and self.speculative
        plan = SpeculationPlan(
            method=DraftMethod.EAGLE3,
            draft_tokens=DRAFT,
            proposal_timeout_ms=2000,
            look_ahead=int(self.ahead is not None),
        )
        spec = SessionSpec(
            session_id=name,
            epoch=0,
            token_ids=(1,) * self._prompts[index],
            prompt_len=self._prompts[index],
            max_new_tokens=self._answers[index] + 8,
            stop_token_ids=(),
            sampling=SamplingParams(temperature=self.temperature),
            plan=plan if speculative else SpeculationPlan(),
            drafter_id=DrafterId("drafter") if speculative and not self.own else None,
        )
        kv = NO_BLOCKS.new_sequence()
        session = Session.create(spec, ticket=index, kv=kv, now=self.now, keeps_features=False)
        session.mark_admitted(self.now, kept=False)
        session.handle = self._answers[index]
        if self.policy is not None:
            session.link_id = None if self.own else 1
            session.in_process_draft_length = DRAFT if self.own and speculative else 0
            self.policy.add_session(session)
        self._live[name] = session

    def _turn(self) -> None:
        if self.policy is None:
            return
        self.policy.begin_round(len(self._live), self.now)
        if not self.policy.changed:
            return
        self.policy.changed = False
        resumed = []
        for session in self._live.values():
            session.draft_limit = self.policy.draft_limit(session)
            pauses = self.policy.should_pause(session)
            if pauses != session.is_speculation_off:
                self.policy.record_pause(session, paused=pauses)
                if not pauses:
                    session.root_known_at = self.now
                    resumed.append(session)
            ahead = self.policy.should_look_ahead(session)
            if not session.is_speculation_off and ahead != session.is_look_ahead_on:
                self.policy.record_look_ahead(session, ahead=ahead)
                self.turns += 1
        self._tell(resumed, first=True)

    def _state(self, session: Session) -> RowState:
        at = self._ready.get(session.session_id)
        awaits = at is None and session.awaits_proposal
        proposal_timeout = (
            self.policy.proposal_timeout_s(session) if awaits and self.policy is not None else 0.0
        )
        return RowState(
            session_id=session.session_id,
            prefill_left=session.prefill_left,
            nodes=None if at is None else DRAFT,
            in_process_nodes=session.in_process_depth,
            awaits_proposal=awaits,
            root_known_at=session.root_known_at,
            proposal_at=at or 0.0,
            proposal_timeout_s=proposal_timeout,
            tokens_left=session.remaining,
        )

    def _round(self, plan: RoundPlan) -> None:
        began = self.now
        rows = [self._live[row.session_id] for row in plan.decode]
        for row, session in zip(plan.decode, rows, strict=True):
            if row.is_timed_out and self.policy is not None:
                self.policy.record_timeout(session)
        drafted = [s.session_id in self._ready or s.in_process_depth > 0 for s in rows]
        chunks = sum(-(-chunk.num_tokens // PIECE) for chunk in plan.prefill)
        stretches = self.ahead is not None and any(
            s.is_look_ahead_on and not s.is_speculation_off for s in rows
        )
        self.trees += any(drafted) and self._has_trees
        took_s = self._took(len(rows), any(drafted), chunks, stretches=stretches)
        self.now += took_s
        self._idle_since, self._round_s = self.now, self.now - began
        settled, told = [], []
        for chunk in plan.prefill:
            session = self._live[chunk.session_id]
            session.mark_submitted(session.prefill.sent + chunk.num_tokens)
            if not session.prefill_left:
                settled.append(self._commit(session, 0, None))
                told.append(session)
        for session, row, with_draft in zip(rows, plan.decode, drafted, strict=True):
            settled.append(self._commit(session, DRAFT * with_draft, row.is_timed_out))
            self._ready.pop(session.session_id, None)
            self._hits.discard(session.session_id)
            if not with_draft:
                self._branched.discard(session.session_id)
            self.decoded += 1
            self.paused += session.is_speculation_off
            self.looked += session.is_look_ahead_on and not session.is_speculation_off
            told.append(session)
        first = [s for s in told if s.length == s.spec.prompt_len + 1]
        self._tell([s for s in told if s not in first], first=False)
        self._tell(first, first=True)
        if self.policy is not None:
            self.policy.observe_round(
                settled,
                seconds=self.now - began,
                forward_s=self.now - began - self.costs.host / 1000.0,
                prompts=[chunk.num_tokens for chunk in plan.prefill],
                now=self.now,
            )
        self.rounds += 1
        for session in told:
            if session.emitted >= session.handle:
                self._end(session)

    def _took(self, rows: int, drafted: bool, chunks: int, *, stretches: bool) -> float:
        costs = self.costs
        seconds, self._opening_s = self._opening_s + chunks * costs.piece / 1000.0, 0.0
        if rows:
            drafts = costs.trees if self._has_trees else costs.verify
            seconds += costs.of(drafts if drafted else costs.plain, rows)
            seconds += costs.own_host / 1000.0 * drafted
        else:
            seconds += costs.of(costs.plain, 1)
        if stretches and self.ahead is not None:
            seconds *= self.ahead.stretch
        seconds *= math.exp(self._rng.normal(0.0, self.noise))
        if self._rng.random() < self.stalls:
            seconds += self._rng.uniform(0.0, 20.0) * costs.of(costs.plain, 1)
        return seconds

    def _commit(self, session: Session, drafted: int, missed: bool | None) -> RowResult:
        stood, hit = 0, session.session_id in self._hits
        rate = self._rate_of(session, hit=hit) if drafted else 0.0
        while stood < drafted and self._rng.random() < rate:
            stood += 1
        count = min(1 + stood, session.handle - session.emitted)
        session.commit_tokens((1,) * count, self.now)
        self.tokens += count
        nodes = TREE if drafted and self._has_trees else drafted
        result = RowOutput((1,) * (1 + stood), None, nodes if self.own else 0)
        if missed is None:
            return RowResult(session, result, (1,))
        held = HeldProposal(NOTHING, 0, drafted, hit) if drafted and not self.own else None
        verified = VerifyRow(session=session, held=held)
        return RowResult(session, result, (1,) * count, None, verified, missed)

    def _rate_of(self, session: Session, *, hit: bool) -> float:
        """Acceptance of each token of a draft at this place of the session's answer; `hit`: the
        draft was made ahead."""
        wave = math.sin(2.0 * math.pi * session.emitted / PASSAGE + self._phases[session.ticket])
        ease = math.exp(self._ease[session.ticket] + self.drift * wave)
        stale = self.ahead.stale if hit and self.ahead is not None else 1.0
        extra = self.extra_tokens * ease * stale
        if self._has_trees:
            extra = TREE_TOKENS * (1.0 + extra) - 1.0
        return _rate(round(extra, 2))

    @property
    def _has_trees(self) -> bool:
        return self.policy is not None and self.policy.num_draft_nodes == 1 + TREE

    def _tell(self, sessions: Sequence[Session], *, first: bool) -> None:
        """The drafter hears of roots and answers, those of one round together."""
        told = [s for s in sessions if s.link_id is not None and not s.is_speculation_off]
        told = [s for s in told if not self._hit(s)]
        if not told:
            return
        took = self.costs.of(self.costs.exchange, len(told)) * math.exp(
            self._rng.normal(0.0, self.noise)
        )
        if first:
            # Prompts, or what was missed in a pause, have to be read.
            took = 1.5 * took + self.costs.reading / 1000.0 * len(told)
        begins = max(self.now, self._drafter_busy)
        self._drafter_busy = begins + self.costs.queued * took
        for session in told:
            late = self.ahead.late / 1000.0 if self.ahead and session.is_look_ahead_on else 0.0
            entry = (begins + took + late, session.ticket, session.session_id, session.length)
            heapq.heappush(self._proposals, entry)

    def _hit(self, session: Session) -> bool:
        """Whether a verdict is one of those that were drafted for."""
        name = session.session_id
        drafted_for = name in self._branched
        # For whatever draft is verified next, its outcomes are drafted now.
        (self._branched.add if session.is_look_ahead_on else self._branched.discard)(name)
        if not drafted_for or self.ahead is None or self._rng.random() >= self.ahead.hits:
            return False
        self._hits.add(name)
        # It was there when the round ended.
        self._ready[name] = session.proposal_at = self.now - 1e-6
        return True

    def _end(self, session: Session) -> None:
        if self.policy is not None:
            self.policy.remove_session(session)
        del self._live[session.session_id]
        self._ready.pop(session.session_id, None)
        heapq.heappush(self._arrivals, self.now + ARRIVAL_S)


NOTHING = Proposals.of_proposals([])
"""Nobody reads the drafts."""


@cache
def _between(row: tuple[float, ...], sessions: int) -> float:
    """The value at so many sessions of what is given for `ROWS`."""
    return float(np.interp(sessions, ROWS, row))


@cache
def _rate(extra: float) -> float:
    """Acceptance of each draft token with which so many of them stand in the mean."""
    low, high = 0.0, 1.0
    for _ in range(40):
        rate = (low + high) / 2.0
        stood = sum(rate**depth for depth in range(1, DRAFT + 1))
        low, high = (rate, high) if stood < extra else (low, rate)
    return low


def over_plain(make: Callable[[], SpeculationPolicy], service: Service, *, seeds: int) -> float:
    """Speed relative to the same service without drafts, over whole runs that begin with a planner
    that knows nothing."""
    plain = drafts = 0.0
    for seed in range(seeds):
        plain += plain_s(service.costs, service.sessions, service.waves, seed)
        drafts += replace(service, seed=seed, policy=make()).run()
    return plain / drafts


@cache
def plain_s(costs: Costs, sessions: int, waves: int, seed: int) -> float:
    """Seconds of a run without drafts."""
    return Service(
        costs=costs, sessions=sessions, extra_tokens=0.0, policy=None, waves=waves, seed=seed
    ).run()
