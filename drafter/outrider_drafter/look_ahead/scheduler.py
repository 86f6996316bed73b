"""LookAheadScheduler: drafts for likely outcomes of pending proposals before their verdicts.

For each session with look-ahead, the scheduler tracks the live proposal (the one whose verdict is
awaited) and the drafts sent for its outcomes. A verdict that ends in one of these outcomes is a
hit: the draft for that outcome becomes the live proposal, and no other draft is made for the
session's new prefix.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Final, Literal

import numpy as np

from outrider import timeline
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.spec.tree import DraftTree
from outrider.wire.messages import Proposals, SessionsLost
from outrider_drafter.look_ahead.calibration import (
    PRIOR_SHARPNESS,
    OutcomeCalibration,
    OutcomePredictor,
    RankCalibration,
)
from outrider_drafter.look_ahead.session_state import (
    LookAheadSession,
    ScoredProposal,
    SelectedOutcomes,
)
from outrider_drafter.look_ahead.time_budget import DEFAULT_MAX_FAN_OUT, DraftStep, LookAheadBudget
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.proposers.interface import (
    DraftTrees,
    LookAheadProposer,
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    Proposer,
    SessionDrafts,
)
from outrider_drafter.state.fair_share import MAX_BATCH_SESSIONS, choose_fairly
from outrider_drafter.state.outcomes import Indices, best_outcomes, follow_verdict, num_worthwhile
from outrider_drafter.state.session import FollowedSession
from outrider_drafter.state.session_table import SessionTable

logger = logging.getLogger(__name__)

_TEMPERATURES: Final = (0.0, 0.5, 0.85, 1.15)
"""Upper bounds of the temperature classes. Sessions of one class share their statistics."""

OutgoingProposals = list[tuple[int, Proposals | SessionsLost]]
"""Pairs (connection, message) that are sent together."""
CalibrationClass = tuple[DraftMethod, Rule, int, bool]


class LookAheadScheduler:
    """Runs look-ahead for all sessions. All methods must be called from the engine's thread."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        table: SessionTable,
        metrics: DrafterMetrics,
        *,
        now: Callable[[], float],
        later: Callable[[Callable[[], None]], None],
        failed: Callable[[], None],
        in_time: bool,
    ) -> None:
        """Create a scheduler without sessions.

        `now`: returns the time in seconds. `later`: takes a function that the caller runs when no
        draft is wanted. `failed`: called after every failure of a proposer. `in_time`: whether
        look-ahead passes are limited to the time until the next verdict.
        """
        self._proposers = {p.method: p for p in proposers if isinstance(p, LookAheadProposer)}
        self._table = table
        self._metrics = metrics
        self._now, self._later, self._failed = now, later, failed
        self.pace = LookAheadBudget(now, in_time=in_time)
        self.watched: dict[int, LookAheadSession] = {}
        """Sessions with look-ahead; the keys are slots of the session table."""
        slots = len(table.followed)
        self._is_watched = np.zeros(slots, dtype=np.bool_)
        self._open = np.zeros(slots, dtype=np.bool_)
        """[X]: whether the session in each slot may have outcomes that are not drafted for yet."""
        self._off: set[int] = set()
        """Slots of sessions whose look-ahead has failed."""
        self._predictors: dict[CalibrationClass, OutcomePredictor] = {}
        self._starved = False
        """Whether the last pass was stopped by a message before any of its scores were used. With
        many verifiers this could happen in every pass, so the next pass drafts before it polls for
        messages."""

    @property
    def has_work(self) -> bool:
        """Whether any live proposal has outcomes that may still be drafted for."""
        return bool(self.watched) and bool(self._open.any())

    def watch_session(self, session: FollowedSession) -> None:
        """Start look-ahead for a new session or a session with a new plan, if its plan asks for
        look-ahead. Earlier look-ahead state of the session is discarded."""
        self._unwatch(session.slot)
        plan = session.plan
        if not (plan.look_ahead and plan.is_speculative) or session.slot in self._off:
            return
        if plan.method in self._proposers:
            self.watched[session.slot] = LookAheadSession(session)
            self._is_watched[session.slot] = True

    def forget_session(self, session: FollowedSession) -> None:
        """Discard the look-ahead state of a session that has ended or was lost."""
        self._unwatch(session.slot)
        self._off.discard(session.slot)

    def _unwatch(self, slot: int) -> None:
        if self.watched.pop(slot, None) is not None:
            self._is_watched[slot] = self._open[slot] = False

    def start_proposals(self, drafted: SessionDrafts, seconds: float) -> None:
        """Make these drafts the live proposals of their sessions. `seconds`: time in seconds that
        drafting took."""
        found = [self.watched.get(session.slot) for session in drafted.sessions]
        watched = [one for one in found if one is not None]
        if not watched:
            return
        if drafted.node_counts.any():
            # An answer without drafts says nothing about the duration of drafting.
            self.pace.steps.observe_step(_step("draft", watched), len(found), seconds)
        now = self._now()
        for one, tree in zip(found, _trees(drafted), strict=True):
            if one is not None:
                one.start_proposal(tree if len(tree) else None, now)
                # An outcome's token needs one level, and a draft for the outcome at least one more.
                self._open[one.session.slot] = (
                    one.tree is not None and one.session.draft_levels_left >= 2
                )

    def advance_sessions(self, slots: Indices) -> None:
        """Update look-ahead after verdicts were applied to the sessions in these slots. If a draft
        for a verdict's outcome was already sent (a hit), that draft becomes the live proposal, and
        the session's request for a draft is cleared."""
        mine = slots[self._is_watched[slots]]
        for slot, length, digest in zip(
            mine.tolist(),
            self._table.lengths[mine].tolist(),
            self._table.digests[mine].tolist(),
            strict=True,
        ):
            one = self.watched[slot]
            if one.tree is not None and length > one.length:
                self._move_on(one, slot, digest)

    def _move_on(self, one: LookAheadSession, slot: int, digest: int) -> None:
        metrics = self._metrics
        self.pace.record_verdict(one)
        if one.num_pending:
            metrics.dropped_outcomes.inc(one.num_pending)
        if one.scored is not None:
            told = self._table.tokens[slot, one.length : self._table.lengths[slot]].tolist()
            predictor = self._predictor(_kind(one.session))
            self._later(partial(_learn, predictor, one.scored, told))
        tree = one.outcome_drafts.get(digest)
        hit = tree is not None and bool(self._table.wanting[slot])
        timeline.mark_instant("hit" if hit else "miss")
        metrics.outcomes.labels("hit" if hit else "miss").inc()
        if hit:
            self._table.wanting[slot] = False
        one.start_proposal(tree if hit else None, self._now(), is_hit=hit)
        self._open[slot] = hit and one.session.draft_levels_left >= 2

    def run_look_ahead_pass(self) -> Generator[OutgoingProposals]:
        """Draft for outcomes of live proposals, best expected gain first. If there are more live
        proposals than fit into a batch, verifiers get fair shares of it.

        Yields lists of (connection, message) pairs that are ready together. An empty list only
        gives the caller an opportunity to poll for messages. The caller must close the iterator
        before it processes a message. The next pass scores the proposals again and selects from the
        remaining outcomes.
        """
        slots = np.flatnonzero(self._open)
        if len(slots) > MAX_BATCH_SESSIONS:
            owners = [self.watched[slot].session.key.connection for slot in slots.tolist()]
            used_at = self._table.used_at[slots]
            slots = slots[choose_fairly(np.array(owners), used_at, MAX_BATCH_SESSIONS)]
        open_ones = [self.watched[slot] for slot in slots.tolist()]
        open_ones.sort(key=lambda one: one.session.plan.method)
        for method, group in groupby(open_ones, key=lambda one: one.session.plan.method):
            ones = list(group)
            try:
                yield from self._look(self._proposers[method], ones)
            except Exception:
                logger.exception("look-ahead failed", extra={"sessions": len(ones)})
                self._metrics.look_ahead_failures.labels(method).inc()
                for one in ones:
                    self._unwatch(one.session.slot)
                    self._off.add(one.session.slot)
                self._failed()

    def _look(
        self, proposer: LookAheadProposer, ones: Sequence[LookAheadSession]
    ) -> Generator[OutgoingProposals]:
        step, pace = _step("score", ones), self.pace
        opening, chosen = pace.plan_look_ahead_pass(
            step, ones, self.watched.values(), straight=self._starved
        )
        if not chosen:
            self._metrics.cut_look_aheads.labels("pass").inc(len(ones))
            self._close(ones)
            return
        left, first = self._score(proposer, chosen, step), True
        while len(left.lives):
            if not (first and opening.skips_poll):
                self._starved = first
                yield []
            first = False
            count = pace.next_launch_size(step, chosen, self.watched.values(), left)
            if not count:
                self._starved = False
                self._metrics.cut_look_aheads.labels("slice").inc(len(left.lives))
                break
            yield from self._branch(proposer, chosen, left.select(slice(0, count)))
            left = left.select(slice(count, None))
        self._close(chosen)

    def _score(
        self, proposer: LookAheadProposer, ones: Sequence[LookAheadSession], step: DraftStep
    ) -> SelectedOutcomes:
        """Score live proposals and select outcomes, best expected value first."""
        started = self._now()
        expected = self.pace.order_by_value(step, ones, self._choose(proposer, ones))
        took = self._now() - started
        self.pace.steps.observe_step(step, len(ones), took)
        timeline.mark_span("score", started, len(ones))
        self._later(partial(self._metrics.look_ahead_seconds.labels("score").observe, took))
        self._later(partial(self.pace.record_scores, step, ones, expected))
        return expected

    def _branch(
        self,
        proposer: LookAheadProposer,
        ones: Sequence[LookAheadSession],
        launch: SelectedOutcomes,
    ) -> Generator[OutgoingProposals]:
        """Draft for outcomes in one launch, or in one launch for each draft shape."""
        columns = (launch.lives.tolist(), launch.nodes.tolist(), launch.tokens.tolist())
        outcomes = [Outcome(*entry) for entry in zip(*columns, strict=True)]
        step = _step("branch", ones)
        started = began = self._now()
        for branches in proposer.draft_outcomes(outcomes):
            self._starved = False
            timeline.mark_span("branch", began, len(branches.outcomes))
            answers = self._sent(ones, launch, branches, self._now() - started)
            took = self._now() - began
            self.pace.steps.observe_step(step, len(branches.outcomes), took)
            self._later(partial(self._metrics.look_ahead_seconds.labels("branch").observe, took))
            yield answers
            began = self._now()

    def _close(self, ones: Sequence[LookAheadSession]) -> None:
        """Mark these sessions' live proposals as finished: no further outcomes are drafted for."""
        for one in ones:
            one.num_pending = 0
            self._open[one.session.slot] = False

    def _choose(
        self, proposer: LookAheadProposer, ones: Sequence[LookAheadSession]
    ) -> SelectedOutcomes:
        """Score live proposals and select outcomes, most likely first."""
        self._metrics.look_aheads.labels(proposer.method).inc()
        scored = proposer.score_proposals(
            [PendingProposal(one.session, one.tree) for one in ones if one.tree is not None]
        )
        kinds: dict[CalibrationClass, list[int]] = {}
        for live, one in enumerate(ones):
            kinds.setdefault(_kind(one.session), []).append(live)
        parts = [
            part
            for kind, lives in kinds.items()
            for part in self._outcomes(kind, lives, [ones[live] for live in lives], scored)
        ]
        found = parts[0]
        if len(parts) > 1:
            found = SelectedOutcomes(
                *(np.concatenate(column) for column in zip(*parts, strict=True))
            )
            found = found.select(np.argsort(-found.gains, kind="stable"))
        mine = np.array([one.session.plan.fan_out == 0 for one in ones])
        if mine.any():
            # Sessions whose plan sets no fan-out share the outcomes of one launch.
            mine = mine[found.lives]
            left_out = np.flatnonzero(mine)[num_worthwhile(found.gains[mine]) :]
            found = found.select(np.delete(np.arange(len(mine)), left_out))
        pending = np.bincount(found.lives, minlength=len(ones)).tolist()
        for one, count in zip(ones, pending, strict=True):
            one.num_pending = count
        return found

    def _outcomes(
        self,
        kind: CalibrationClass,
        lives: Sequence[int],
        ones: Sequence[LookAheadSession],
        scored: OutcomeScores,
    ) -> Iterator[SelectedOutcomes]:
        """Yield the selected outcomes of each proposal, most likely first. All proposals belong to
        sessions of the same calibration class."""
        layout = scored.layout(lives)
        logprobs = np.concatenate([scored.logprobs[live] for live in lives])
        gains = self._predictor(kind).expected_gains(layout, logprobs)
        for proposal, (live, one) in enumerate(zip(lives, ones, strict=True)):
            one.scored = ScoredProposal(layout, logprobs, proposal)
            wanted, there = one.session.plan.fan_out or DEFAULT_MAX_FAN_OUT, one.outcome_drafts
            count = wanted + len(there)
            chosen = best_outcomes(
                layout, gains, proposal, room=one.session.draft_levels_left, count=count
            )
            within = chosen.places - layout.roots[proposal]
            found = SelectedOutcomes(
                lives=np.full(len(within), live),
                nodes=within - 1,
                tokens=chosen.tokens,
                parent_digests=scored.digests[scored.places.roots[live] + within],
                lengths=one.length + layout.depths[chosen.places] + 1,
                gains=chosen.gains,
            )
            if there:
                # An earlier pass was interrupted by a message: skip the outcomes that it drafted.
                news = [i for i, d in enumerate(found.prefix_digests().tolist()) if d not in there]
                found = found.select(np.array(news[: max(wanted - len(there), 0)], dtype=np.int64))
            yield found

    def _sent(
        self,
        ones: Sequence[LookAheadSession],
        launch: SelectedOutcomes,
        branches: OutcomeDrafts,
        seconds: float,
    ) -> OutgoingProposals:
        """Record the drafts that were made for outcomes, and return the messages that carry
        them."""
        places = branches.outcomes
        lives = launch.lives[places].tolist()
        trees = _trees(branches)
        digests = launch.select(places).prefix_digests()
        gains = launch.gains[places].tolist()
        for live, digest, tree, gain in zip(lives, digests.tolist(), trees, gains, strict=True):
            ones[live].num_pending -= 1
            if len(tree):
                ones[live].outcome_drafts[digest] = tree
                ones[live].covered_probability += gain
        keys = [ones[live].session.key for live in lives]
        handles = np.array([key.handle for key in keys], dtype=np.int64)
        proposals = branches.proposals(handles, digests, launch.lengths[places], seconds)
        method = ones[0].session.plan.method
        made = int(np.count_nonzero(branches.node_counts))
        self._later(partial(self._metrics.branches.labels(method).inc, made))
        owners = np.array([key.connection for key in keys], dtype=np.int64)
        there = branches.node_counts > 0
        return [
            (number, proposals.select(np.flatnonzero(there & (owners == number))))
            for number in dict.fromkeys(owners[there].tolist())
        ]

    def _predictor(self, kind: CalibrationClass) -> OutcomePredictor:
        if kind not in self._predictors:
            rule = kind[1]
            spread = rule is Rule.REJECTION
            begins = PRIOR_SHARPNESS.get(rule, 1.0)
            self._predictors[kind] = RankCalibration() if spread else OutcomeCalibration(begins)
        return self._predictors[kind]


def _step(kind: Literal["draft", "score", "branch"], ones: Sequence[LookAheadSession]) -> DraftStep:
    """Return the draft step for these sessions, which all use the same draft method."""
    plans = [one.session.plan for one in ones]
    return DraftStep(plans[0].method, kind, max(plan.draft_tokens for plan in plans))


def _kind(session: FollowedSession) -> CalibrationClass:
    """Return the class of sessions that share calibration statistics with this session."""
    sampling = session.sampling
    warmth = bisect_left(_TEMPERATURES, sampling.temperature)
    return session.plan.method, sampling.effective_rule, warmth, session.has_constraint


def _learn(predictor: OutcomePredictor, scored: ScoredProposal, told: Sequence[int]) -> None:
    what = follow_verdict(scored.layout, scored.proposal, told)
    predictor.learn_from_verdict(scored.layout, scored.logprobs, what)


def _trees(drafts: DraftTrees) -> list[DraftTree]:
    """Return each draft's tree, copied out of the batch's arrays."""
    tokens, parents = drafts.tokens.copy(), drafts.parents.copy()
    logprobs = drafts.logprobs.copy()
    ends = drafts.node_counts.cumsum().tolist()
    return [
        DraftTree(tokens[begin:end], parents[begin:end], logprobs[begin:end])
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
