"""Plans, submits and finishes rounds over the core's sessions; engine thread only.

If the runner can run ahead, a round is in flight nearly all the time: the next one is submitted
before the one in flight is finished, so that the device never waits for the host. Results of a
session that ended or was closed meanwhile are dropped when their round is finished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from outrider import timeline
from outrider.watchdog import record_step
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.failure_handler import FailureHandler
from outrider_verifier.engine.in_flight_round import (
    InFlightRound,
    must_await_drafts,
    prompt_verdicts,
)
from outrider_verifier.engine.round_reporter import RoundReporter, RoundStorage
from outrider_verifier.engine.scheduler import Scheduler
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.model_runner.interface import ModelRunner, RunnerOutput
from outrider_verifier.model_runner.results import (
    CommittedRows,
    RowResult,
    VerdictInputs,
    commit_prompts,
    commit_rows,
)
from outrider_verifier.state.round_plan import TIME_EMA_WEIGHT, RoundLimits, RoundPlan
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED

logger = logging.getLogger(__name__)

YIELD_INTERVAL_S = 0.0001
"""How long this thread stands back when verdicts leave and no session can go on without a draft:
the thread that sends them needs the interpreter lock, and drafting takes longer than this."""
POLL_INTERVAL_S = 0.00005
"""How often a round in flight is looked after while something else may come before its end."""
BUSY_WAIT_S = 0.0003
"""How long before a round should land nothing else is waited for: sleeping takes as long."""
MASK_LOOK_S = 0.002
"""How often slow masks are looked after where no other session can go on."""
LONG_ROUND_S = 0.01
"""A round with prompts that lasts at least so long is nearly over when the next one is submitted:
prompts that come in meanwhile join that one, and need not wait for it, too."""
SUBMIT_LEAD_S = 0.003
"""How long before the end of such a round the next one is planned. Measured times leave out what
long contexts add, so there is more time than this."""
MAX_WAIT_S = 1.0
"""How long a round in flight is waited for at a time."""

_Failure = tuple[list[Session], Exception]
"""Sessions that a round was to have, and why it has not."""
_Attempt = tuple[InFlightRound | None, _Failure | None]
"""A round that was submitted, or whom it failed."""


class RoundExecutor:
    """Runs rounds on behalf of the loop; at most two are submitted and not finished."""

    def __init__(
        self,
        core: EngineCore,
        engine: ModelRunner,
        limits: RoundLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._engine = engine
        self._clock = clock
        self._in_flight: InFlightRound | None = None
        self._accounts = RoundReporter(core)
        self._plans = Scheduler(core, engine, limits)
        self._ended_at = 0.0
        """When the last round's outcome was there, on the clock of `time.perf_counter`."""
        self._idle_since = 0.0
        """The same on the clock of `plan`."""
        self._forward_s = 0.0
        """What a round takes of late; 0: not known."""
        self._outbox = core.outbox
        self.failing = FailureHandler(core, engine)
        self._keeping = RoundStorage(core, self.failing)

    @property
    def has_round_in_flight(self) -> bool:
        """Whether a round is in flight."""
        return self._in_flight is not None

    def enter_thread(self) -> None:
        """To be called once by the thread that will run the rounds."""
        self._engine.enter_thread()

    def plan_round(self, now: float) -> RoundPlan:
        """What to do now; while a round is in flight, an empty plan means to settle it, at once or,
        if the plan says when to look again, once it has `landed`."""
        self._keeping.fail_unstored_rounds()
        in_flight, block_manager = self._in_flight, self._core.block_manager
        under_way = () if in_flight is None else in_flight.plan
        recovery = self._core.draft_recovery
        is_ready = (
            not recovery.undrafted
            or recovery.recover_drafts(now, in_flight=under_way, round_s=self._forward_s)
        ) and block_manager.prepare_round(now, touched=self._core.touched, in_flight=under_way)
        self._handle_admissions()
        if not is_ready:
            return RoundPlan()
        self._plans.update_speculation(now, in_flight=None if in_flight is None else in_flight.plan)
        self._plans.update_overlap()
        if in_flight is None:
            plan = self._plan_next(now)
            if plan.is_empty:
                self._record_arrivals()
                plan = plan.wake_by(block_manager.next_check_at(now))
                if self._plans.num_sitting_out:
                    plan = plan.wake_by(now + MASK_LOOK_S)
                return plan
            return plan
        if self._plans.half is not None:
            return self._plans.plan_other_half(in_flight.plan, now)
        if self._stays_for_drafts(in_flight):
            return RoundPlan(wait_until=now + MAX_WAIT_S)
        if (spare_s := self._spare_s(in_flight)) > 0.0:
            return RoundPlan(wait_until=now + spare_s)
        return self._plans.plan_next_in_flight(in_flight.plan)

    def _handle_admissions(self) -> None:
        """Fail the sessions that could not be admitted, and let drafting follow the others."""
        for admission in self._core.block_manager.take_admissions():
            session = admission.session
            if session.phase is ENDED:
                continue
            if admission.error is not None:
                self.failing.fail_session(session, admission.error)
                continue
            if admission.has_prefix:
                self._core.drafters.queue_prefix(session)
            if admission.is_swapped_in:
                self._core.draft_recovery.add_session(session)

    def _spare_s(self, in_flight: InFlightRound) -> float:
        """How long the round behind this one need not be submitted; 0 where that is not known."""
        if not in_flight.prefill:
            return 0.0
        engine = self._engine
        piece = engine.chunk_tokens
        chunks = sum([-(-row.num_tokens // piece) for row in in_flight.prefill])
        own = engine.in_process_draft_length > 0
        lasts_s = engine.plain_round_s(len(in_flight.verify), own=own, chunks=chunks) or 0.0
        if lasts_s < LONG_ROUND_S:
            return 0.0
        began = max(in_flight.flight.launched_at, self._ended_at)
        return max(0.0, began + lasts_s - SUBMIT_LEAD_S - time.perf_counter())

    def _plan_next(self, now: float) -> RoundPlan:
        return self._plans.plan_round(now, idle_since=self._idle_since, round_s=self._forward_s)

    @property
    def is_round_finished(self) -> bool:
        """Whether the round in flight can be settled without waiting."""
        try:
            return self._in_flight is None or self._engine.is_finished(self._in_flight.flight)
        except Exception:
            # A lost device; `settle` finds out, and says whom that ends.
            return True

    @property
    def is_held_round_finished(self) -> bool:
        """Whether a round that stayed in flight for drafts of its outcome has landed."""
        in_flight = self._in_flight
        return in_flight is not None and in_flight.has_verdict_inputs and self.is_round_finished

    @property
    def poll_delay_s(self) -> float:
        """How long the round in flight need not be looked after; 0 where it is about to land."""
        in_flight = self._in_flight
        near = in_flight is not None and time.perf_counter() > in_flight.expected_end - BUSY_WAIT_S
        return 0.0 if near else POLL_INTERVAL_S

    def run_round(self, plan: RoundPlan, *, waited_s: float = 0.0, spent_s: float = 0.0) -> None:
        """Submit a round, then settle the one before it; the new one too unless the next round of
        its sessions could be submitted before that.

        An exception inside a round fails the sessions of that round only. `spent_s` is what
        taking commands and planning cost; it counts as part of the round.
        """
        in_flight, failure = self._attempt(plan, time.perf_counter() - spent_s, waited_s)
        if self._outbox.is_held:
            self._outbox.flush()
        self._core.drafters.send_queued_prefixes()
        # What the round in flight emitted counts even where its sessions cannot go on.
        self.finish_round(alone=in_flight is None)
        # While the device works, if that could be.
        self._keeping.run_deferred()
        self._in_flight = in_flight
        if failure is not None:
            self.failing.fail_round(*failure)
        elif in_flight is not None and not self._may_stay_in_flight(in_flight):
            self.finish_round()

    def finish_round(self, *, go_on: bool = False, alone: bool = True) -> None:
        """Wait for the round in flight and commit its outcome; no-op if there is none. `go_on`: if
        the next drafts are already there, submit the next round before the results are sent.
        `alone`: whether no round was submitted behind this one.

        If the device is lost, the round is discarded, and the caller must fail its sessions.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None or self.failing.device_lost:
            return
        failure: _Failure | None = None
        began = timeline.now()
        try:
            failure = self._settle(in_flight, go_on=go_on, alone=alone)
        except Exception as bug:
            self.failing.fail_round(in_flight.sessions, bug)
        record_step()
        timeline.mark_span("settle", began, len(in_flight.verify))
        if failure is not None:
            self.failing.fail_round(*failure)

    def _settle(self, in_flight: InFlightRound, *, go_on: bool, alone: bool) -> _Failure | None:
        """Act on the outcome of a round; what failed if the next one could not be submitted."""
        # While the device works.
        may_go_on = go_on and self._may_go_on(in_flight)
        verdict_inputs = (
            self._verdict_inputs(in_flight)
            if may_go_on
            else in_flight.verdict_inputs(self._core.touched)
        )
        outcome = self._collect(in_flight)
        failure: _Failure | None = None
        decoded: CommittedRows | None = None
        emitted = 0
        hits = 0
        if may_go_on and verdict_inputs is not None:
            hits = verdict_inputs.advance_inbox(outcome.decoded, self._core.inbox)
        if hits:
            gone_on = hits == len(in_flight.verify) and self._submit_early_round(in_flight, outcome)
            decoded = commit_rows(in_flight.verify, outcome.decoded, self._idle_since)
            # Who is at its end must not be in the next round.
            if ended := [row for row in decoded.special if row.ends]:
                emitted = self._accounts.record_rows(ended)
            if gone_on:
                self._in_flight, failure = gone_on
                self._record_arrivals()
            elif (
                self._core.block_manager.grow_running()
                and not (plan := self._plan_next(self._idle_since)).is_empty
            ):
                self._in_flight, failure = self._attempt(plan, self._ended_at, 0.0)
        told = None if verdict_inputs is None else verdict_inputs.make_batch(outcome.decoded)
        if told is not None:
            self._core.drafters.send_round(told)
        # A prompt's features take long to copy: who decodes does not wait for them.
        handed = self._outbox.flush()
        self._core.drafters.send_queued_prefixes()
        prompts = commit_prompts(in_flight.prefill, outcome.prefill, self._idle_since)
        if prompts:
            self._core.drafters.send_round(prompt_verdicts(prompts))
        if (
            (self._outbox.flush() or handed)
            and self._in_flight is None
            and must_await_drafts(in_flight)
        ):
            time.sleep(YIELD_INTERVAL_S)
        if decoded is None:
            decoded = commit_rows(in_flight.verify, outcome.decoded, self._idle_since)
            emitted = self._accounts.record_rows([row for row in decoded.special if row.ends])
        self._book(in_flight, outcome, prompts, decoded, emitted)
        # Where the device has nothing to do, and neither a drafter nor a first token is waited for,
        # the next round goes first: threads that hand out what this one emitted would hold this
        # thread up meanwhile.
        first = alone and self._in_flight is None and not prompts and told is None
        self._outbox.is_held = self._engine.can_run_ahead and first
        # Copying takes long: what clients wait for goes first.
        if not self._outbox.is_held:
            self._outbox.flush()
        if told is not None:
            # While drafters draft.
            self._grow_ahead(in_flight, 0)
        # Drafts may be here before it is done, and the next round waits for nothing else.
        awaited = told is not None and self._in_flight is None and must_await_drafts(in_flight)
        later = self._engine.can_run_ahead and awaited
        self._keeping.store_round(in_flight, outcome, prompts, decoded, later=later)
        return failure

    def _book(
        self,
        in_flight: InFlightRound,
        outcome: RunnerOutput,
        prompts: list[RowResult],
        decoded: CommittedRows,
        emitted: int,
    ) -> None:
        """Account for whoever goes on, and let the planner see the round; `emitted`: the tokens of
        those who do not."""
        settled = prompts + decoded.special
        emitted += self._accounts.record_rows(
            [row for row in settled if row.session.phase is not ENDED]
        )
        emitted += self._accounts.record_plain_rows(decoded.plain)
        self._core.policy.observe_round(
            settled,
            decoded.plain,
            seconds=self._accounts.report_round(in_flight, outcome, emitted),
            forward_s=outcome.forward_s,
            prompts=[row.num_tokens for row in in_flight.prefill],
            now=self._clock(),
        )

    def _collect(self, in_flight: InFlightRound) -> RunnerOutput:
        """Wait for a round, and note when it ended, as far as can be told."""
        landed = self._engine.is_finished(in_flight.flight)
        ended_at = time.perf_counter() if landed else 0.0
        began = timeline.now()
        outcome = self._engine.collect_round(in_flight.flight)
        self._ended_at = ended = ended_at or time.perf_counter()
        # 1: it was still at work.
        timeline.mark_span("wait for the device", began, int(not landed))
        rows = len(in_flight.verify)
        timeline.mark_span("forward", ended - outcome.forward_s, rows, ended=ended, track="forward")
        self._idle_since = self._clock()
        if not in_flight.prefill:
            known_s = self._forward_s or outcome.forward_s
            self._forward_s = known_s + TIME_EMA_WEIGHT * (outcome.forward_s - known_s)
        else:
            alone_s = self._forward_s if rows else 0.0
            tokens = sum([row.num_tokens for row in in_flight.prefill])
            self._core.block_manager.observe_prefill(tokens, max(0.0, outcome.forward_s - alone_s))
        return outcome

    def _may_go_on(self, in_flight: InFlightRound) -> bool:
        """Whether the next round may be submitted before this one is told: nothing is to be
        decided first."""
        if not self._engine.can_run_ahead or in_flight.prefill or self._plans.half is not None:
            return False
        # The planner turns, and the room preempts, sessions that are in no round only.
        return not (self._core.policy.changed or self._core.block_manager.pressed)

    def _verdict_inputs(self, in_flight: InFlightRound) -> VerdictInputs | None:
        """The sheet of a round that drafts for its outcome may be there for."""
        verdict_inputs = in_flight.verdict_inputs(self._core.touched)
        if verdict_inputs is not None and verdict_inputs.digests is None:
            verdict_builder = self._core.verdict_builder
            verdict_inputs.digests = verdict_builder.prefix_digests(
                verdict_inputs.handles, verdict_inputs.lengths, verdict_inputs.has_drafter
            )
        return verdict_inputs

    def _grow_ahead(self, in_flight: InFlightRound, tokens: int) -> None:
        """Blocks for the round after this one, which may yet commit so many tokens of each session.
        It saves time and may fail: the next round asks again, where a failure has somebody to end.
        """
        try:
            self._core.block_manager.grow_sessions(in_flight.sessions, tokens)
        except Exception as bug:
            logger.exception("blocks were not told of ahead of their round")
            self.failing.check_device(bug)

    def _submit_early_round(
        self, in_flight: InFlightRound, outcome: RunnerOutput
    ) -> _Attempt | None:
        """Submit the round of hits that follows `in_flight`, before that is booked; None where it
        is to be booked first."""
        found = self._plans.plan_prefetched_round(in_flight, outcome.decoded.counts.tolist())
        if found is None:
            return None
        plan, verify = found
        return self._guarded(plan, lambda: self._launch(plan, [], verify, self._ended_at, 0.0))

    def _record_arrivals(self) -> None:
        if self._core.incoming.arrivals:
            self._core.incoming.record_arrivals()

    def _attempt(self, plan: RoundPlan, began: float, waited_s: float) -> _Attempt:
        """Submit a round; whom it failed if that raised."""
        attempt = self._guarded(plan, lambda: self._submit(plan, began, waited_s))
        self._record_arrivals()
        return attempt

    def _guarded(self, plan: RoundPlan, submit: Callable[[], InFlightRound]) -> _Attempt:
        try:
            in_flight = submit()
        except Exception as bug:
            return None, ([self._core.sessions[name] for name in plan.session_ids], bug)
        if self._in_flight is None and in_flight.is_all_hits:
            in_flight.hit_idle_s = max(0.0, in_flight.flight.launched_at - self._ended_at)
        return in_flight, None

    def _submit(self, plan: RoundPlan, began: float, waited_s: float) -> InFlightRound:
        prefill = [
            PrefillRow.from_next_tokens(self._core.sessions[chunk.session_id], chunk.num_tokens)
            for chunk in plan.prefill
        ]
        return self._launch(plan, prefill, self._plans.take_verify_rows(plan), began, waited_s)

    def _launch(
        self,
        plan: RoundPlan,
        prefill: list[PrefillRow],
        verify: list[VerifyRow],
        began: float,
        waited_s: float,
    ) -> InFlightRound:
        marked = timeline.now()
        self._engine.set_draft_shape(self._core.policy.num_draft_nodes)
        flight = self._engine.submit_round(prefill, verify)
        timeline.mark_span("submit", marked, len(verify))
        for row in prefill:
            row.session.mark_submitted(row.end)
        return InFlightRound(
            plan=plan,
            prefill=prefill,
            verify=verify,
            flight=flight,
            began=began,
            waited_s=waited_s,
        )

    def _may_stay_in_flight(self, in_flight: InFlightRound) -> bool:
        if in_flight.plan.is_self_contained:
            return True
        if self._plans.half is not None and len(in_flight.sessions) < len(
            self._core.block_manager.running
        ):
            return True
        if self._stays_for_drafts(in_flight):
            return True
        # Proposals need the host after their round; so no command can come between.
        return all(
            row.session.phase is ENDED or row.held is None for row in in_flight.verify
        ) and all(
            session.phase is ENDED or self._plans.can_run_ahead(session)
            for session in in_flight.sessions
        )

    def _stays_for_drafts(self, in_flight: InFlightRound) -> bool:
        """Whether drafts for what the round may emit can be taken in while it runs."""
        if in_flight.plan.is_self_contained or not in_flight.expects_look_ahead:
            return False
        # It is ready when the round lands.
        if not in_flight.has_verdict_inputs and self._engine.can_run_ahead:
            self._grow_ahead(in_flight, 1 + in_flight.max_nodes)
        self._verdict_inputs(in_flight)
        in_flight.set_expected_end(self._engine.verify_round_s)
        return True
