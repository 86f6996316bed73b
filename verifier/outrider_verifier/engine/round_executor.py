"""Rounds over the core's sessions: plan, submit, settle each row (engine thread only).

A runner that can run ahead has a round in flight nearly all the time: the next one is submitted
before the one in flight is settled, so that the device never waits for the host. What a session
turns out not to need (it ended, or was closed) is dropped when its round is settled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from outrider import timeline
from outrider.speculation.cost_table import GAIN
from outrider.watchdog import record_step
from outrider_verifier.engine.core import Core
from outrider_verifier.engine.early_proposals import straight_on
from outrider_verifier.engine.failure_handler import Failing
from outrider_verifier.engine.in_flight_round import InFlight, await_drafts, prompted
from outrider_verifier.engine.round_reporter import Accounts
from outrider_verifier.engine.round_storage import Keeping
from outrider_verifier.engine.scheduler import NextRound
from outrider_verifier.engine.speculation_switch import turn
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.model_runner.interface import RoundOutcome, RoundRunner
from outrider_verifier.model_runner.results import (
    Committed,
    Settled,
    Sheet,
    commit_prompts,
    commit_rows,
)
from outrider_verifier.state.round_plan import Limits, RoundPlan
from outrider_verifier.state.session import Session

logger = logging.getLogger(__name__)

GIVE_WAY_S = 0.0001
"""How long this thread stands back when verdicts leave and no session can go on without a draft:
the thread that sends them needs the interpreter lock, and drafting takes longer than this."""
LANDING_S = 0.00005
"""How often a round in flight is looked after while something else may come before its end."""
NEAR_S = 0.0003
"""How long before a round should land nothing else is waited for: sleeping takes as long."""
MASK_LOOK_S = 0.002
"""How often slow masks are looked after where no other session can go on."""
LOOK_S = 1.0
"""How long a round in flight is waited for at a time."""

_Failure = tuple[list[Session], Exception]
"""Sessions that a round was to have, and why it has not."""
_Attempt = tuple[InFlight | None, _Failure | None]
"""A round that was submitted, or whom it failed."""


class Rounds:
    """Runs rounds on behalf of the loop; at most two are submitted and not settled."""

    def __init__(
        self,
        core: Core,
        engine: RoundRunner,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._flying: InFlight | None = None
        self._accounts = Accounts(core)
        self._plans = NextRound(core, engine, limits)
        self._ended_at = 0.0
        """When the last round's outcome was there, on the clock of `time.perf_counter`."""
        self._idle_since = 0.0
        """The same on the clock of `plan`."""
        self._forward_s = 0.0
        """What a round takes of late; 0: not known."""
        self.flush: Callable[[], bool] = lambda: False
        """Called when the verdicts of a round are posted, before anything that can follow them;
        whether another thread has them now."""
        self.holds_back = False
        """Whether what the last round emitted is handed over once the next one was submitted."""
        self.failing = Failing(core, engine)
        self._keeping = Keeping(core, self._accounts, self.failing)
        core.room.failed = self.failing.one

    @property
    def flying(self) -> bool:
        """Whether a round is in flight."""
        return self._flying is not None

    def enter_thread(self) -> None:
        """To be called once by the thread that will run the rounds."""
        self._engine.enter_thread()

    def plan(self, now: float) -> RoundPlan:
        """What to do now; while a round is in flight, an empty plan means to settle it, at once or,
        if the plan says when to look again, once it has `landed`."""
        self._keeping.end_unkept()
        flying, room = self._flying, self._core.room
        under_way = () if flying is None else flying.plan
        if not room.ready(now, touched=self._core.touched, flying=under_way):
            return RoundPlan()
        turn(self._core, now, flying=None if flying is None else flying.plan)
        self._plans.share_rounds()
        if flying is None:
            plan = self._plan_next(now)
            if plan.empty:
                self._core.incoming.book_arrivals()
                plan = plan.by(room.look_at(now))
                if self._plans.rows.num_sitting_out:
                    plan = plan.by(now + MASK_LOOK_S)
                return plan
            return plan
        if self._plans.half is not None:
            return self._plans.beside(flying.plan, now)
        if self._stays_for_drafts(flying):
            return RoundPlan(wait_until=now + LOOK_S)
        return self._plans.behind(flying.plan)

    def _plan_next(self, now: float) -> RoundPlan:
        return self._plans.next(now, idle_since=self._idle_since, round_s=self._forward_s)

    @property
    def landed(self) -> bool:
        """Whether the round in flight can be settled without waiting."""
        try:
            return self._flying is None or self._engine.landed(self._flying.flight)
        except Exception:
            # A lost device; `settle` finds out, and says whom that ends.
            return True

    @property
    def over(self) -> bool:
        """Whether a round that stayed in flight for drafts of its outcome has landed."""
        flying = self._flying
        return flying is not None and flying.ready and self.landed

    @property
    def pause_s(self) -> float:
        """How long the round in flight need not be looked after; 0 where it is about to land."""
        flying = self._flying
        near = flying is not None and time.perf_counter() > flying.lands_at - NEAR_S
        return 0.0 if near else LANDING_S

    def run(self, plan: RoundPlan, *, waited_s: float = 0.0, spent_s: float = 0.0) -> None:
        """Submit a round, then settle the one before it; the new one too unless the next round of
        its sessions could be submitted before that.

        An exception inside a round fails the sessions of that round only. `spent_s` is what
        taking commands and planning cost; it counts as part of the round.
        """
        flying, failure = self._attempt(plan, time.perf_counter() - spent_s, waited_s)
        if self.holds_back:
            self.flush()
        self._core.drafters.tell_begun()
        # What the round in flight emitted counts even where its sessions cannot go on.
        self.settle(alone=flying is None)
        # While the device works, if that could be.
        self._keeping.catch_up()
        self._flying = flying
        if failure is not None:
            self.failing.all(*failure)
        elif flying is not None and not self._may_stay_in_flight(flying):
            self.settle()

    def settle(self, *, go_on: bool = False, alone: bool = True) -> None:
        """Wait for the round in flight and act on its outcome; no-op if there is none. `go_on`: if
        drafts for what it emitted are there already, submit the next round before anybody is told.
        `alone`: whether no round was submitted behind it.

        On a lost device it is dropped; its sessions have yet to be failed.
        """
        flying, self._flying = self._flying, None
        if flying is None or self.failing.device_lost:
            return
        failure: _Failure | None = None
        began = timeline.now()
        try:
            failure = self._settle(flying, go_on=go_on, alone=alone)
        except Exception as bug:
            self.failing.all(flying.sessions, bug)
        record_step()
        timeline.span("settle", began, len(flying.verify))
        if failure is not None:
            self.failing.all(*failure)

    def _settle(self, flying: InFlight, *, go_on: bool, alone: bool) -> _Failure | None:
        """Act on the outcome of a round; what failed if the next one could not be submitted."""
        # While the device works.
        may_go_on = go_on and self._may_go_on(flying)
        sheet = self._sheet(flying) if may_go_on else flying.sheet(self._core.touched)
        outcome = self._collect(flying)
        failure: _Failure | None = None
        decoded: Committed | None = None
        emitted = 0
        if may_go_on and (hits := sheet.step(outcome.decoded, self._core.inbox)):
            gone_on = hits == len(flying.verify) and self._straight_on(flying, outcome)
            decoded = commit_rows(flying.verify, outcome.decoded, self._idle_since)
            # Who is at its end must not be in the next round.
            if ended := [row for row in decoded.apart if row.ends]:
                emitted = self._accounts.follow_up(ended)
            if gone_on:
                self._flying, failure = gone_on
                self._core.incoming.book_arrivals()
            elif self._core.room.grow() and not (plan := self._plan_next(self._idle_since)).empty:
                self._flying, failure = self._attempt(plan, self._ended_at, 0.0)
        told = sheet.verdicts(outcome.decoded)
        if len(told):
            followed = self._core.handover.follow(told)
            self._core.drafters.say(self._core.handover.verdicts(followed))
        # A prompt's features take long to copy: who decodes does not wait for them.
        handed = self.flush()
        self._core.drafters.tell_begun()
        prompts = commit_prompts(flying.prefill, outcome.prefill, self._idle_since)
        if prompts:
            self._core.drafters.tell_round(prompted(prompts))
        if (self.flush() or handed) and self._flying is None and await_drafts(flying):
            time.sleep(GIVE_WAY_S)
        if decoded is None:
            decoded = commit_rows(flying.verify, outcome.decoded, self._idle_since)
            emitted = self._accounts.follow_up([row for row in decoded.apart if row.ends])
        self._book(flying, outcome, prompts, decoded, emitted)
        # Where the device has nothing to do, and neither a drafter nor a first token is waited for,
        # the next round goes first: threads that hand out what this one emitted would hold this
        # thread up meanwhile.
        first = alone and self._flying is None and not (prompts or len(told))
        self.holds_back = self._engine.run_ahead and first
        # Copying takes long: what clients wait for goes first.
        if not self.holds_back:
            self.flush()
        self._core.stand_ins.observe(prompts + decoded.apart)
        if len(told):
            # While drafters draft.
            self._grow_ahead(flying, 0)
        # Drafts may be here before it is done, and the next round waits for nothing else.
        awaited = len(told) > 0 and self._flying is None and await_drafts(flying)
        later = self._engine.run_ahead and awaited
        self._keeping.keep(flying, outcome, prompts, decoded, later=later)
        return failure

    def _book(
        self,
        flying: InFlight,
        outcome: RoundOutcome,
        prompts: list[Settled],
        decoded: Committed,
        emitted: int,
    ) -> None:
        """Account for whoever goes on, and let the planner see the round; `emitted`: the tokens of
        those who do not."""
        settled = prompts + decoded.apart
        emitted += self._accounts.follow_up([row for row in settled if not row.session.ended])
        emitted += self._accounts.follow_up_alike(decoded.alike)
        self._core.policy.observe_round(
            settled,
            decoded.alike,
            seconds=self._accounts.report(flying, outcome, emitted),
            forward_s=outcome.forward_s,
            prompts=[row.num_tokens for row in flying.prefill],
            now=self._clock(),
        )

    def _collect(self, flying: InFlight) -> RoundOutcome:
        """Wait for a round, and note when it ended, as far as can be told."""
        landed = self._engine.landed(flying.flight)
        ended_at = time.perf_counter() if landed else 0.0
        began = timeline.now()
        outcome = self._engine.collect(flying.flight)
        self._ended_at = ended = ended_at or time.perf_counter()
        # 1: it was still at work.
        timeline.span("wait for the device", began, int(not landed))
        rows = len(flying.verify)
        timeline.span("forward", ended - outcome.forward_s, rows, ended=ended, track="forward")
        self._idle_since = self._clock()
        if not flying.prefill:
            known_s = self._forward_s or outcome.forward_s
            self._forward_s = known_s + GAIN * (outcome.forward_s - known_s)
        else:
            alone_s = self._forward_s if rows else 0.0
            tokens = sum([row.num_tokens for row in flying.prefill])
            self._core.room.saw_prefill(tokens, max(0.0, outcome.forward_s - alone_s))
        return outcome

    def _may_go_on(self, flying: InFlight) -> bool:
        """Whether the next round may be submitted before this one is told: nothing is to be
        decided first."""
        if not self._engine.run_ahead or flying.prefill or self._plans.half is not None:
            return False
        # The planner turns, and the room preempts, sessions that are in no round only.
        return not (self._core.policy.changed or self._core.room.pressed)

    def _sheet(self, flying: InFlight) -> Sheet:
        """The sheet of a round that drafts for its outcome may be there for."""
        sheet = flying.sheet(self._core.touched)
        if sheet.digests is None:
            handover = self._core.handover
            sheet.digests = handover.digests(sheet.handles, sheet.lengths, sheet.told)
        return sheet

    def _grow_ahead(self, flying: InFlight, tokens: int) -> None:
        """Blocks for the round after this one, which may yet commit so many tokens of each session.
        It saves time and may fail: the next round asks again, where a failure has somebody to end.
        """
        try:
            self._core.room.grow_ahead(flying.sessions, tokens)
        except Exception as bug:
            logger.exception("blocks were not told of ahead of their round")
            self.failing.check_device(bug)

    def _straight_on(self, flying: InFlight, outcome: RoundOutcome) -> _Attempt | None:
        """Submit the round of hits that follows `flying`, before that is booked; None where it is
        to be booked first."""
        found = straight_on(flying, outcome.decoded.counts.tolist(), self._core, self._limits)
        if found is None:
            return None
        plan, verify = found
        return self._guarded(plan, lambda: self._launch(plan, [], verify, self._ended_at, 0.0))

    def _attempt(self, plan: RoundPlan, began: float, waited_s: float) -> _Attempt:
        """Submit a round; whom it failed if that raised."""
        attempt = self._guarded(plan, lambda: self._submit(plan, began, waited_s))
        self._core.incoming.book_arrivals()
        return attempt

    def _guarded(self, plan: RoundPlan, submit: Callable[[], InFlight]) -> _Attempt:
        try:
            flying = submit()
        except Exception as bug:
            return None, ([self._core.sessions[name] for name in plan.session_ids], bug)
        if self._flying is None and flying.all_hits:
            flying.hit_idle_s = max(0.0, flying.flight.launched_at - self._ended_at)
        return flying, None

    def _submit(self, plan: RoundPlan, began: float, waited_s: float) -> InFlight:
        prefill = [
            PrefillRow.next_of(self._core.sessions[chunk.session_id], chunk.num_tokens)
            for chunk in plan.prefill
        ]
        return self._launch(plan, prefill, self._plans.rows.verified(plan), began, waited_s)

    def _launch(
        self,
        plan: RoundPlan,
        prefill: list[PrefillRow],
        verify: list[VerifyRow],
        began: float,
        waited_s: float,
    ) -> InFlight:
        marked = timeline.now()
        flight = self._engine.submit(prefill, verify)
        timeline.span("submit", marked, len(verify))
        for row in prefill:
            row.session.prefill_sent = row.end
        return InFlight(
            plan=plan,
            prefill=prefill,
            verify=verify,
            flight=flight,
            began=began,
            waited_s=waited_s,
        )

    def _may_stay_in_flight(self, flying: InFlight) -> bool:
        if flying.plan.alone:
            return True
        if self._plans.half is not None and len(flying.sessions) < len(self._core.room.running):
            return True
        if self._stays_for_drafts(flying):
            return True
        # Proposals need the host after their round; so no command can come between.
        return all(row.session.ended or row.held is None for row in flying.verify) and all(
            session.ended or self._plans.rows.runs_ahead(session) for session in flying.sessions
        )

    def _stays_for_drafts(self, flying: InFlight) -> bool:
        """Whether drafts for what the round may emit can be taken in while it runs."""
        if flying.plan.alone or not flying.looks_ahead:
            return False
        # It is ready when the round lands.
        if not flying.ready and self._engine.run_ahead:
            self._grow_ahead(flying, 1 + flying.most_nodes)
        self._sheet(flying)
        flying.expect(self._engine.verify_s)
        return True
