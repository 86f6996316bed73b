"""Decides for each session whether and how it speculates, from its measured rounds. Pure.

Sessions of one workload class share a `SpeculationController`. If plain decoding is faster,
*speculation is off* for the sessions of the class: they wait for no proposals, and their drafter
receives nothing until speculation is on again. All sessions with in-process drafts share one
decision (`in_process_planner`). The time that prompts add to rounds is subtracted from
measurements, because on average it is the same for all shapes. All times are seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from outrider.ids import DrafterId
from outrider.spec.plan import FEATURE_METHODS
from outrider.spec.speculation_summary import SEPARATOR
from outrider.wire.messages import PAUSED
from outrider.wire.spec_stats_accumulator import REASON_FLAGS
from outrider_verifier.model_runner.results import NO_ROWS, PlainRows, RowResult
from outrider_verifier.planner.draft_length import AcceptanceByDepth
from outrider_verifier.planner.in_process_planner import (
    DraftShapes,
    InProcessPlanner,
    in_process_rows,
)
from outrider_verifier.planner.proposal_wait import MIN_WAIT_ROUNDS, proposal_timeout_s
from outrider_verifier.planner.speculation_controller import (
    OFF,
    CandidateShape,
    DeviceTimes,
    SpeculationController,
)
from outrider_verifier.planner.statistics import LoadStats, RoundCostModel, RoundSample
from outrider_verifier.planner.workload import (
    MAX_WORKLOAD_CLASSES,
    RowTally,
    SpeculationState,
    WorkloadClass,
    WorkloadStats,
)
from outrider_verifier.state.session import NO_LIMIT, Session

IDLE_S: Final = 0.25
"""Minimum time without rounds, in seconds, after which the load is set without hysteresis. The
larger of this and `IDLE_ROUNDS` applies."""
IDLE_ROUNDS: Final = 16
"""Minimum time without rounds, as a number of plain rounds, after which the load is set without
hysteresis. The larger of this and `IDLE_S` applies."""
PREFILL_ROUND_WEIGHT: Final = 0.25
"""Weight of the measured time of a round with prompts. It is less than 1 because the time that the
prompts add is only estimated."""
MAX_MISS_ROUNDS: Final = 4.0
"""Maximum time that is counted for a round with a proposal timeout, as a number of plain rounds.
Because of this limit, speculation is turned off only after repeated timeouts."""
MIN_TOKENS_LEFT: Final = 32
"""Minimum number of remaining output tokens for turning a session's speculation on again. Its
drafter first has to process the tokens that it missed."""


class SpeculationPolicy:
    """Decides for all sessions of a verifier whether they speculate, and with which draft shape.

    Only the engine thread may call the methods, except `describe` and `drafter_response_s`, which
    any thread may call.
    """

    def __init__(
        self,
        *,
        automatic: bool,
        ceiling_s: float,
        times: RoundCostModel = lambda rows, *, own, chunks=0: None,
        draft_shapes: DraftShapes = lambda _: (),
        chunk_tokens: int = 1,
        shares_cores: bool = False,
    ) -> None:
        """Create a policy without sessions. If `automatic` is False, the policy decides nothing and
        the sessions' plans are used unchanged. `ceiling_s` limits `proposal_timeout_s`. `times`
        returns the device times of rounds. `draft_shapes` returns the available shapes of
        in-process drafts for a number of sessions. `chunk_tokens` is the number of prompt tokens of
        a prefill chunk, as `times` counts chunks. `shares_cores` is whether target and drafter
        compute on the same CPU cores; look-ahead then probably costs more time than it saves."""
        self._automatic, self._ceiling_s = automatic, ceiling_s
        self._times, self._chunk_tokens = times, chunk_tokens
        self._begins_ahead = not shares_cores
        self._loads = LoadStats(times)
        self._in_process = InProcessPlanner(self._loads, times, draft_shapes)
        self._workloads: dict[WorkloadClass, WorkloadStats] = {}
        self._touched: list[WorkloadStats] = []
        """Statistics of those workload classes that have rows in the round that is being
        recorded."""
        self._now = 0.0
        self._ended_at = math.inf
        """Time at which the last round ended; infinity before the first round."""
        self.changed = False
        """Whether results of `should_pause`, `draft_limit` or `should_look_ahead` may have changed.
        The policy sets it, and the caller resets it."""

    @property
    def workloads(self) -> Sequence[WorkloadStats]:
        """Statistics of the workload classes whose drafts come by messages."""
        return list(self._workloads.values())

    # ---- sessions ------------------------------------------------------------------------------

    def add_session(self, session: Session) -> None:
        """Add a new session. The present shape of its workload class applies to it immediately."""
        self._now = max(self._now, session.root_known_at)
        self._reset_after_idle(1)
        self._join(session)
        if session.speculation_state is None:
            return
        session.draft_limit = self.draft_limit(session)
        if not session.is_speculation_off and self.should_pause(session):
            self.record_pause(session, paused=True)

    def update_session(self, session: Session) -> None:
        """Update the workload class of a session whose plan or drafter has changed."""
        self._join(session)
        if session.speculation_state is not None:
            self.changed = self._automatic

    def _join(self, session: Session) -> None:
        """Assign a session to its workload class and set its speculation state. The state is None
        if the session's plan does not speculate."""
        self.remove_session(session)
        session.draft_limit, session.is_look_ahead_on = NO_LIMIT, False
        if not session.plan.is_speculative:
            return
        workload_class = WorkloadClass.of_session(session)
        if session.in_process_draft_length:
            session.speculation_state = SpeculationState(None, workload_class)
            self._in_process.add_session(workload_class)
            if self._automatic:
                self._in_process.choose_shape()
            if self.should_pause(session):
                self.record_pause(session, paused=True)
            return
        workload = None if can_never_draft(session) else self._workload(workload_class)
        session.speculation_state = SpeculationState(workload)
        if workload is not None:
            workload.sessions += 1
            self._look_up(workload)
            session.is_look_ahead_on = self.should_look_ahead(session)

    def remove_session(self, session: Session) -> None:
        """Remove a session that ends or whose plan or drafter changes. Does nothing if it was
        removed before."""
        state, session.speculation_state = session.speculation_state, None
        if state is None:
            return
        if state.workload is not None:
            state.record_resume()
            state.workload.sessions -= 1
        if state.in_process_class is not None:
            self._in_process.remove_session(
                state.in_process_class, is_plain=session.drafter_record.has_dropped_drafts
            )

    def _workload(self, workload_class: WorkloadClass) -> WorkloadStats:
        """Return the statistics of a workload class, creating them if needed. If there are too many
        classes, the oldest one without sessions is deleted."""
        workload = self._workloads.get(workload_class)
        if workload is not None:
            return workload
        idle = [each for each, known in self._workloads.items() if not known.sessions]
        if len(self._workloads) >= MAX_WORKLOAD_CLASSES and idle:
            del self._workloads[idle[0]]
        shape, ahead = workload_class.shape, workload_class.shape_ahead
        shapes: tuple[CandidateShape, ...] = (shape, OFF)
        if workload_class.look_ahead:
            # Without automatic decisions, the plan says how drafts are made.
            is_ahead_first = self._begins_ahead or not self._automatic
            shapes = (ahead, shape, OFF) if is_ahead_first else (shape, ahead, OFF)
        workload = self._workloads[workload_class] = WorkloadStats(
            workload_class,
            SpeculationController(),
            shapes,
            AcceptanceByDepth(workload_class.draft_tokens),
        )
        return workload

    # ---- decisions -----------------------------------------------------------------------------

    def begin_round(self, sessions: int, now: float) -> None:
        """Update the load and the choices before a round. `sessions` is the number of running
        sessions."""
        self._now = now
        self._reset_after_idle(sessions)
        if not self._automatic:
            self._loads.begin_round(sessions)
            return
        if self._loads.begin_round(sessions):
            self.changed = True
            for workload in self._workloads.values():
                self._look_up(workload)
        if self._in_process.choose_shape():
            self.changed = True

    def _reset_after_idle(self, sessions: int) -> None:
        """Set the load from the number of sessions, without hysteresis, if no round has run for a
        while."""
        if self._now - self._ended_at > max(IDLE_S, IDLE_ROUNDS * self._loads.round_s):
            self._ended_at = self._now
            self._loads.reset_after_idle(sessions)
            self.changed = self._automatic
            for workload in self._workloads.values():
                self._look_up(workload)

    def _look_up(self, workload: WorkloadStats) -> None:
        """Set the shape of a workload class to the choice of its controller, or to its first shape
        if the policy is not automatic."""
        before = workload.shape
        if self._automatic:
            device_s = self._device_s(workload)
            workload.shape = workload.controller.shape(self._loads.load, device_s)
        else:
            workload.shape = workload.shapes[0]
        if workload.shape != before:
            self.changed = self._automatic

    def _device_s(self, workload: WorkloadStats) -> DeviceTimes:
        """Return the device times of the class's shapes. The times of drafted shapes are nan,
        because an exchange by messages takes an unknown time until it is measured."""
        plain_s = self._times(self._loads.sessions, own=False)
        return {
            shape: plain_s if plain_s is not None and not shape.nodes else math.nan
            for shape in workload.shapes
        }

    @property
    def num_draft_nodes(self) -> int:
        """Number of nodes of each row with in-process drafts in the next round, including the root;
        0 if the model runner chooses."""
        return self._in_process.num_nodes

    def should_pause(self, session: Session) -> bool:
        """Return whether the session should decode plainly now although its plan speculates."""
        state = session.speculation_state
        if not self._automatic or state is None:
            return False
        if state.is_in_process:
            return session.is_speculation_off or self._in_process.is_plain
        if state.workload is None:
            return True
        if session.is_speculation_off and session.remaining < MIN_TOKENS_LEFT:
            return True
        return state.workload.is_plain

    def should_look_ahead(self, session: Session) -> bool:
        """Return whether the session's drafter should use look-ahead, that is, draft before the
        verdict."""
        state = session.speculation_state
        return state is not None and state.workload is not None and state.workload.shape.is_ahead

    def draft_limit(self, session: Session) -> int:
        """Return the maximum number of draft levels of the session that a round should verify.

        Drafts made by look-ahead are not limited. The drafter prepares drafts for outcomes of the
        whole draft, so an outcome that ends at a limit would have no proposal.
        """
        state = session.speculation_state
        if state is None or state.workload is None or state.workload.shape.is_ahead:
            return NO_LIMIT
        return state.workload.draft_limit(self._loads.load)

    def record_pause(self, session: Session, *, paused: bool) -> None:
        """Turn the session's speculation off (`paused` True) or on (False) from its next round."""
        session.is_speculation_off = paused
        state = session.speculation_state
        if state is None:
            return
        state.record_mode_change(paused=paused)
        if paused and state.is_in_process and not session.drafter_record.has_dropped_drafts:
            # The draft head's KV is not extended any more, so the drafts cannot be resumed.
            session.drafter_record.record_dropped_drafts()
            session.set_in_process_drafts(0)
            self._in_process.record_dropped_drafts()

    def record_look_ahead(self, session: Session, *, ahead: bool) -> None:
        """Record that the session's drafter is told to start (`ahead` True) or stop (False)
        look-ahead."""
        session.is_look_ahead_on = ahead
        if session.speculation_state is not None:
            session.speculation_state.record_look_ahead_change()

    def reset_drafter(self, drafter_id: DrafterId) -> None:
        """Discard the measurements of a drafter that has connected again, because they describe the
        process that was connected before."""
        for workload_class, workload in self._workloads.items():
            if workload_class.drafter_id == drafter_id:
                workload.reset_drafter()
                self._look_up(workload)
        self.changed = self._automatic

    # ---- waiting -------------------------------------------------------------------------------

    def proposal_timeout_s(self, session: Session) -> float:
        """Return the maximum time, in seconds, that the session's next round waits for a proposal.
        It is at most the plan's proposal timeout."""
        bound_s, state = session.plan.proposal_timeout_ms / 1000.0, session.speculation_state
        if not self._automatic or state is None or state.workload is None:
            return bound_s
        round_s = self._loads.round_s
        if state.wait.is_catching_up:
            return min(bound_s, max(self._ceiling_s, MIN_WAIT_ROUNDS * round_s))
        return proposal_timeout_s(
            state.workload.arrival, round_s, bound_s=bound_s, ceiling_s=self._ceiling_s
        )

    def record_arrival(
        self, session: Session, *, prefix_len: int, usable: bool, now: float
    ) -> None:
        """Record the arrival of a proposal. `usable` is whether it continues the session's present
        prefix of `prefix_len` tokens."""
        session.has_stalled_drafter = False
        state = session.speculation_state
        if state is None or state.workload is None or session.is_speculation_off:
            return
        arrival = state.workload.arrivals[session.is_look_ahead_on]
        state.wait.record_arrival(session, arrival, prefix_len=prefix_len, usable=usable, now=now)

    def record_timeout(self, session: Session) -> None:
        """Record that the session's proposal timeout has passed. The session's rounds then do not
        wait until a proposal arrives or a number of rounds has passed."""
        session.has_stalled_drafter = True
        if session.speculation_state is not None:
            session.speculation_state.wait.record_timeout(session)

    def slowest_response_s(self) -> float:
        """Return the mean time, in seconds, from the end of a round to the arrival of its
        proposals, for the slowest workload class with sessions; 0 if unknown. Proposals that arrive
        earlier count as 0."""
        used = (each.arrival.mean_s for each in self._workloads.values() if each.sessions)
        return max(used, default=0.0)

    def drafter_response_s(self, drafter_id: DrafterId) -> float:
        """Return the mean time, in seconds, from the end of a round to the arrival of its
        proposals, for one drafter; 0 if unknown. For a drafter without sessions it is the last
        known value."""
        workloads = list(self._workloads.values())
        mine = [each for each in workloads if each.workload_class.drafter_id == drafter_id]
        used = [each for each in mine if each.sessions]
        return max((each.arrival.mean_s for each in used or mine), default=0.0)

    # ---- observation ---------------------------------------------------------------------------

    def observe_round(
        self,
        rows: Sequence[RowResult],
        alike: PlainRows = NO_ROWS,
        *,
        seconds: float,
        forward_s: float,
        prompts: Sequence[int],
        now: float,
    ) -> None:
        """Record a finished round.

        `rows` are the results of the round, except those in `alike`, which are stored as
        `PlainRows`. The round took `seconds` seconds without idle time before it, and `forward_s`
        of them were the target's forward pass. `prompts` holds the number of prompt tokens of each
        session that prefilled in the round; `now` is the time at which the round ended.
        """
        self._ended_at = now
        decoded = [row for row in rows if row.verify_row is not None]
        count = len(decoded) + len(alike)
        nodes = sum([row.nodes for row in decoded])
        counts, in_process_nodes = in_process_rows(decoded, alike)
        chunks = sum([-(-tokens // self._chunk_tokens) for tokens in prompts])
        sample = RoundSample(
            count, nodes + in_process_nodes, sum(prompts), chunks, seconds, bool(counts)
        )
        round_s = self._loads.observe_round(sample)
        weight = PREFILL_ROUND_WEIGHT if chunks else 1.0
        if self._automatic:
            self._in_process.observe_rows(
                counts, in_process_nodes, rows=count, seconds=round_s, weight=weight
            )
        served = [workload for workload in self._workloads.values() if workload.sessions]
        if not served:
            return
        clock = now - self._loads.prompts_s
        for session in alike.sessions:
            self._observe_session(session, clock)
        for row in decoded:
            self._observe_row(row, clock)
        self._evaluate(weight)
        if len(served) == 1 and count and not (chunks or counts):
            # With sessions of several classes, the time of a draft length cannot be told apart.
            served[0].observe_forward(self._loads.load, round(nodes / count), forward_s)

    def _observe_session(self, session: Session, clock: float) -> None:
        """Record a round of a session that emitted one token and was not meant to have a draft.
        `clock` is the time at which the round ended, without the time that prompts added so far."""
        state = session.speculation_state
        if state is None or state.workload is None:
            return
        spent_s = state.record_round_end(clock)
        if not session.is_speculation_off or math.isnan(spent_s):
            # The session has no drafter, so there was no choice.
            return
        is_settled = state.unsettled_rounds <= 0.0
        state.unsettled_rounds -= 1.0
        self._tally(state.workload, OFF, is_settled).add_row(1, spent_s)

    def _observe_row(self, row: RowResult, clock: float) -> None:
        session, state = row.session, row.session.speculation_state
        if state is None or state.workload is None:
            return
        workload, nodes = state.workload, row.nodes
        spent_s = state.record_round_end(clock)
        if session.link_id is None and not session.is_speculation_off:
            # The session has no drafter, so there was no choice.
            return
        if row.is_hit:
            # The proposal was there before the root was known, which shows that the drafter
            # follows.
            session.has_stalled_drafter = False
            state.wait.record_healthy()
        if nodes:
            workload.acceptance.observe_row(nodes, row.accepted)
        elif session.has_stalled_drafter or row.missed_proposal:
            has_waited = not state.wait.rounds_without_proposal
            if self._loads.round_s:
                spent_s = min(spent_s, MAX_MISS_ROUNDS * self._loads.round_s)
            state.wait.record_skipped_round(session)
            if row.missed_proposal and not has_waited:
                # The round did not wait for the proposal, so it tells nothing about drafts.
                return
        is_settled = state.unsettled_rounds <= 0.0
        state.record_round(
            is_drafted=nodes > 0, is_off=session.is_speculation_off, missed=row.missed_proposal
        )
        if not math.isnan(spent_s):
            shape = workload.shape_of(session)
            self._tally(workload, shape, is_settled).add_row(len(row.tokens), spent_s)

    def _tally(self, workload: WorkloadStats, shape: CandidateShape, is_settled: bool) -> RowTally:
        # A session that has not followed a change of the shape yet shares its rounds with sessions
        # that have.
        tally = workload.tally(shape, is_settled and shape == workload.shape)
        if not tally.rows and workload not in self._touched:
            self._touched.append(workload)
        return tally

    def _evaluate(self, weight: float) -> None:
        """Pass the sums of the round to the controllers of the workload classes. `weight` is the
        weight of the measured times."""
        load, touched = self._loads.load, self._touched
        self._touched = []
        for workload in touched:
            device_s = self._device_s(workload)
            step_s, step_rows = 0.0, 0
            for (shape, is_settled), tally in workload.tallies.items():
                if not tally.rows:
                    continue
                if shape.nodes:
                    step_s, step_rows = step_s + tally.seconds, step_rows + tally.rows
                seen = tally.take(workload.decoding, is_settled=is_settled, weight=weight)
                if self._automatic:
                    workload.controller.observe_round(load, shape, seen, device_s)
            if not self._automatic:
                continue
            self._look_up(workload)
            if step_rows and workload.review_draft_length(load, step_s / step_rows):
                self.changed = True

    # ---- reports -------------------------------------------------------------------------------

    def decision_flags(self, session: Session) -> int:
        """Return the event flags for the session's present decoding mode and the reason for it; 0
        if the policy has no choice for this session."""
        state = session.speculation_state
        if state is None or not self._automatic or state.lacks_features:
            return 0
        if state.workload is None:
            reason = self._in_process.reason()
        else:
            reason = state.workload.controller.reason(self._loads.load)
        flags = REASON_FLAGS[reason]
        return flags | PAUSED if session.is_speculation_off else flags

    def describe(self) -> str:
        """Return a summary in ASCII: for each workload class with sessions, the draft shape, the
        reason for it, and its gain."""
        return SEPARATOR.join(chain(self._in_process.summaries(), self._summaries()))

    def _summaries(self) -> Iterator[str]:
        load = self._loads.load
        for workload in list(self._workloads.values()):
            if workload.sessions:
                controller = workload.controller
                gain = controller.gain(load, self._device_s(workload))
                reason = controller.reason(load)
                yield str(workload.shape.as_choice(str(workload.workload_class), reason, gain))

    @property
    def is_automatic(self) -> bool:
        """Whether the policy decides. If not, the sessions' plans are used unchanged."""
        return self._automatic


def can_never_draft(session: Session) -> bool:
    """Return whether no drafter can ever draft for the session, because its draft method needs
    features that are no longer kept."""
    return session.has_dropped_features and session.plan.method in FEATURE_METHODS
