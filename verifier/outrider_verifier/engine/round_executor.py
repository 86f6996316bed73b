"""Plans, submits and finishes rounds of the core's sessions. Used on the engine thread only.

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
"""Time, in seconds, for which the engine thread sleeps after it has sent verdicts, if no session
can continue without a draft. The sending thread needs the interpreter lock, and drafting takes
longer than this."""
POLL_INTERVAL_S = 0.00005
"""Interval, in seconds, at which a round in flight is polled while commands may arrive before its
end."""
BUSY_WAIT_S = 0.0003
"""Time before the expected end of a round, in seconds, from which the thread polls without
sleeping, since a sleep would take as long."""
MASK_LOOK_S = 0.002
"""Interval, in seconds, at which slow grammar masks are checked while no other session can
continue."""
LONG_ROUND_S = 0.01
"""Minimum duration, in seconds, of a round with prompts whose successor is submitted late. Prompts
that arrive during the round can then join its successor instead of waiting for one more round."""
SUBMIT_LEAD_S = 0.003
"""Time before the end of such a long round, in seconds, at which its successor is planned. The
estimated end ignores the cost of long contexts, so the real margin is larger."""
MAX_WAIT_S = 1.0
"""Maximum time, in seconds, of one wait for a round in flight."""

_Failure = tuple[list[Session], Exception]
"""The sessions of a round that could not be submitted, and the exception."""
_Attempt = tuple[InFlightRound | None, _Failure | None]
"""The submitted round, or the failure that prevented it; exactly one of both is None."""


class RoundExecutor:
    """Plans, submits and finishes rounds for the engine loop. At most two rounds are in flight at
    any time."""

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
        """Time when the last round's outcome was available, on the clock of `time.perf_counter`."""
        self._idle_since = 0.0
        """Time when the last round's outcome was available, on the clock of `plan_round`."""
        self._forward_s = 0.0
        """Moving average of the forward time of rounds without prompts, in seconds; 0 if
        unknown."""
        self._outbox = core.outbox
        self.failing = FailureHandler(core, engine)
        self._keeping = RoundStorage(core, self.failing)

    @property
    def has_round_in_flight(self) -> bool:
        """Whether a round is in flight."""
        return self._in_flight is not None

    def enter_thread(self) -> None:
        """Prepare the calling thread for running rounds. The engine thread calls this once, before
        its first round."""
        self._engine.enter_thread()

    def plan_round(self, now: float) -> RoundPlan:
        """Return the plan of the next round.

        While a round is in flight, an empty plan means that this round must be finished first. If
        the empty plan has a `wait_until`, the caller waits until that time or the end of the round;
        otherwise it finishes the round immediately.
        """
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
        """Fail the sessions that could not be admitted, and prepare the drafting of the admitted
        ones."""
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
        """Return the time, in seconds, for which the next round need not be submitted; 0 if
        unknown."""
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
        """Whether the round in flight can be finished without waiting; True if there is none."""
        try:
            return self._in_flight is None or self._engine.is_finished(self._in_flight.flight)
        except Exception:
            # The device is lost; `finish_round` handles this and fails the sessions.
            return True

    @property
    def is_held_round_finished(self) -> bool:
        """Whether a round that stayed in flight to receive drafts for its outcome has finished on
        the device."""
        in_flight = self._in_flight
        return in_flight is not None and in_flight.has_verdict_inputs and self.is_round_finished

    @property
    def poll_delay_s(self) -> float:
        """Time, in seconds, until the next poll of the round in flight; 0 if the round is about to
        end."""
        in_flight = self._in_flight
        near = in_flight is not None and time.perf_counter() > in_flight.expected_end - BUSY_WAIT_S
        return 0.0 if near else POLL_INTERVAL_S

    def run_round(self, plan: RoundPlan, *, waited_s: float = 0.0, spent_s: float = 0.0) -> None:
        """Submit a round, then finish the round before it. The new round is finished too, unless it
        may stay in flight while the next one is planned.

        An exception inside a round fails only the sessions of that round. `spent_s` is the time, in
        seconds, of taking commands and planning; it counts as part of the round. `waited_s` is the
        time, in seconds, for which the engine waited before that.
        """
        in_flight, failure = self._attempt(plan, time.perf_counter() - spent_s, waited_s)
        if self._outbox.is_held:
            self._outbox.flush()
        self._core.drafters.send_queued_prefixes()
        # The outcome of the round before counts even if its sessions cannot continue.
        self.finish_round(alone=in_flight is None)
        # If a new round was submitted, this work overlaps with the device's.
        self._keeping.run_deferred()
        self._in_flight = in_flight
        if failure is not None:
            self.failing.fail_round(*failure)
        elif in_flight is not None and not self._may_stay_in_flight(in_flight):
            self.finish_round()

    def finish_round(self, *, go_on: bool = False, alone: bool = True) -> None:
        """Wait for the round in flight and commit its outcome; do nothing if there is none.

        If `go_on` and the next drafts are already in the inbox, submit the next round before the
        results are sent. `alone` says whether this round is the last one that was submitted. If the
        device is lost, the round is discarded, and the caller must fail its sessions.
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
        """Commit the outcome of a round and send its results. Return the failure if the
        next round could not be submitted, else None."""
        # This runs while the device is still busy.
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
            # Sessions that have ended must not be in the next round.
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
        # Copying a prompt's features takes long, so verdicts of decoding sessions are sent first.
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
        # If the device is idle and neither drafters nor clients wait for this round, submit the
        # next round before the effects are sent: the threads that send them would delay this
        # thread.
        first = alone and self._in_flight is None and not prompts and told is None
        self._outbox.is_held = self._engine.can_run_ahead and first
        # Copying takes long, so events for clients are sent first.
        if not self._outbox.is_held:
            self._outbox.flush()
        if told is not None:
            # This runs while drafters draft.
            self._grow_ahead(in_flight, 0)
        # Drafts may arrive before the copy ends, and the next round waits only for them.
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
        """Account for the rows of sessions that continue, and pass the round to the planner.
        `emitted` is the number of tokens of rows already accounted for."""
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
        """Wait for a round, record its end as exactly as possible, and return its output."""
        landed = self._engine.is_finished(in_flight.flight)
        ended_at = time.perf_counter() if landed else 0.0
        began = timeline.now()
        outcome = self._engine.collect_round(in_flight.flight)
        self._ended_at = ended = ended_at or time.perf_counter()
        # The mark's value is 1 if the round was still running.
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
        """Return whether the next round may be submitted before the results of `in_flight` are
        sent, because no decision is due in between."""
        if not self._engine.can_run_ahead or in_flight.prefill or self._plans.half is not None:
            return False
        # The planner and the block manager change only sessions that are in no round.
        return not (self._core.policy.changed or self._core.block_manager.pressed)

    def _verdict_inputs(self, in_flight: InFlightRound) -> VerdictInputs | None:
        """Return the verdict inputs of a round, with prefix digests, so that drafts for its outcome
        can be matched; None if no drafter receives a verdict."""
        verdict_inputs = in_flight.verdict_inputs(self._core.touched)
        if verdict_inputs is not None and verdict_inputs.digests is None:
            verdict_builder = self._core.verdict_builder
            verdict_inputs.digests = verdict_builder.prefix_digests(
                verdict_inputs.handles, verdict_inputs.lengths, verdict_inputs.has_drafter
            )
        return verdict_inputs

    def _grow_ahead(self, in_flight: InFlightRound, tokens: int) -> None:
        """Reserve blocks for the round after this one; `tokens` is the maximum number of tokens
        that the round may still commit per session. This only saves time: on failure the next round
        reserves blocks again and can fail the right sessions."""
        try:
            self._core.block_manager.grow_sessions(in_flight.sessions, tokens)
        except Exception as bug:
            logger.exception("blocks were not told of ahead of their round")
            self.failing.check_device(bug)

    def _submit_early_round(
        self, in_flight: InFlightRound, outcome: RunnerOutput
    ) -> _Attempt | None:
        """Submit the round that follows `in_flight` with prefetched proposals, before the outcome
        of `in_flight` is committed. Return None if it must be committed first."""
        found = self._plans.plan_prefetched_round(in_flight, outcome.decoded.counts.tolist())
        if found is None:
            return None
        plan, verify = found
        return self._guarded(plan, lambda: self._launch(plan, [], verify, self._ended_at, 0.0))

    def _record_arrivals(self) -> None:
        if self._core.incoming.arrivals:
            self._core.incoming.record_arrivals()

    def _attempt(self, plan: RoundPlan, began: float, waited_s: float) -> _Attempt:
        """Submit a round. Return the round, or the failure if submitting raised an exception."""
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
        # A round with proposals must be finished by the host first, so no command may come in
        # between.
        return all(
            row.session.phase is ENDED or row.held is None for row in in_flight.verify
        ) and all(
            session.phase is ENDED or self._plans.can_run_ahead(session)
            for session in in_flight.sessions
        )

    def _stays_for_drafts(self, in_flight: InFlightRound) -> bool:
        """Return whether the round should stay in flight to receive drafts for its possible
        outcomes. If so, prepare the round's verdict inputs."""
        if in_flight.plan.is_self_contained or not in_flight.expects_look_ahead:
            return False
        # The blocks are ready when the round ends.
        if not in_flight.has_verdict_inputs and self._engine.can_run_ahead:
            self._grow_ahead(in_flight, 1 + in_flight.max_nodes)
        self._verdict_inputs(in_flight)
        in_flight.set_expected_end(self._engine.verify_round_s)
        return True
