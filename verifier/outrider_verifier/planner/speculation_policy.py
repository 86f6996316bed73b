"""Decides for each session whether and how it speculates, from its measured rounds. Pure.

Sessions of one workload class (drafter, draft method and shape, rule, temperature) share what is
measured: whether drafts beat plain decoding at this load
(`outrider.speculation.speculation_controller`), whether look-ahead beats lock-step, when proposals
arrive, and how deep drafts are accepted. Where plain decoding wins, *speculation is off* for the
sessions of the class: they wait for nothing, and their drafter receives nothing and catches up when
speculation is tried again. All sessions of an in-process drafter share one decision
(`in_process_planner`), because rounds of both modes together read the weights twice; a session
whose speculation is off stays so. The time that prompts add to rounds is left out, since it meets
both modes alike on average. Times are seconds of one clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from outrider.ids import DrafterId
from outrider.spec.decoding_mode import DecodingMode, DecodingModeReason
from outrider.speculation.cost_table import CostTable
from outrider.speculation.estimates import MIN_WAIT_ROUNDS, proposal_timeout_s
from outrider.wire.messages import PAUSED
from outrider.wire.spec_stats_accumulator import REASON_FLAGS
from outrider_verifier.model_runner.results import NO_ROWS, PlainRows, RowResult
from outrider_verifier.planner import feature_retention
from outrider_verifier.planner.draft_length import DraftLengthChooser
from outrider_verifier.planner.in_process_planner import DraftShapes, InProcessDraftPlanner
from outrider_verifier.planner.load_burst_hold import stays_off, update_hold
from outrider_verifier.planner.load_stats import LoadStats, RoundCostModel
from outrider_verifier.planner.round_observer import RoundObserver
from outrider_verifier.planner.workload_registry import WorkloadRegistry
from outrider_verifier.planner.workload_stats import (
    SpeculationState,
    WorkloadClass,
    WorkloadStats,
    format_gain,
)
from outrider_verifier.state.session import NO_LIMIT, Session

PLAIN_CHECK_ROUNDS: Final = 4
"""Rounds for which what is in force for sessions that decode plainly is not looked up anew, if
nothing has changed: a small model's rounds are short, and in each of them they would ask."""
IDLE_S: Final = 0.25
IDLE_ROUNDS: Final = 16
"""Time, and plain rounds, without any round after which what the load was before is over: whoever
comes then is not one of those who were left."""


class SpeculationPolicy:
    """Decides the decoding mode of all sessions of a verifier.

    Engine thread only; `describe` is read by any thread.
    """

    def __init__(
        self,
        *,
        automatic: bool,
        ceiling_s: float,
        times: RoundCostModel = lambda rows, *, own, chunks=0, featured=False: None,
        draft_shapes: DraftShapes = lambda _: (),
        verify_s: Callable[[int, int], float | None] = lambda rows, nodes: None,
        chunk_tokens: int = 1,
        shares_cores: bool = False,
    ) -> None:
        """`automatic`: False carries plans out as they are. `draft_shapes`: the shapes that
        in-process drafts may have in a round of so many sessions. `ceiling_s`: see
        `proposal_timeout_s`. `verify_s`: seconds of a forward over so many rows, of so many
        nodes each; None where that was not measured. `chunk_tokens`: prompt tokens of a piece, as
        `times` counts them. `shares_cores`: whether the target computes where a drafter of this
        host does, so that what is drafted ahead is likely to cost more than it hides."""
        self._automatic = automatic
        self._ceiling_s = ceiling_s
        costs = CostTable()
        self._workload_classes = WorkloadRegistry(
            automatic=automatic, begins_ahead=not shares_cores
        )
        self._loads = LoadStats(times, costs, chunk_tokens=chunk_tokens)
        self._own = InProcessDraftPlanner(self._loads, draft_shapes)
        self._judging = RoundObserver(
            self._loads,
            self._workload_classes,
            self._own,
            DraftLengthChooser(costs, verify_s),
            costs,
            automatic=automatic,
            chunk_tokens=chunk_tokens,
        )
        self._round = 0
        self._looked_at = 0
        """The round in which it was last looked around; see `PLAIN_CHECK_ROUNDS`."""
        self._settled = False
        """Whether the load had lasted when the last round was planned."""
        self._round_s = 0.0
        """A plain round at this load; 0: not known."""
        self._now = 0.0
        self._ended_at = math.inf
        """Clock time of the end of the last round; infinite before there was one."""
        self.changed = False
        """Whether `should_pause`, `draft_limit` or `should_look_ahead` may answer differently than
        before; for the caller to reset."""

    # ---- sessions ------------------------------------------------------------------------------

    def add_session(self, session: Session) -> None:
        """A session begins. No round has it yet, so what is in force for its kind holds for it at
        once."""
        self._now = max(self._now, session.root_known_at)
        self._rest(1)
        speculation_state = self._join(session)
        if speculation_state is None:
            return
        if speculation_state.workload.sessions == 1 and not speculation_state.is_in_process:
            # The only one of its kind may have changed what is in force.
            self.changed = self._automatic
            return
        session.draft_limit = self.draft_limit(session)
        held = (
            self._automatic
            and not speculation_state.is_in_process
            and self._fresh(speculation_state.workload).begins_plainly
        )
        if not session.is_speculation_off and (held or self.should_pause(session)):
            self.record_pause(session, paused=True)
        if self.should_drop_features(session):
            self.record_features_dropped(session)

    def update_session(self, session: Session) -> None:
        """The plan of a session, or its drafter, has changed."""
        if self._join(session) is not None:
            self.changed = self._automatic

    def _join(self, session: Session) -> SpeculationState | None:
        """Count a session to its kind; None: its plan has no choice."""
        self.remove_session(session)
        session.draft_limit, session.is_look_ahead_on = NO_LIMIT, False
        if not session.plan.is_speculative:
            return None
        known = self._workload_classes.get_stats(WorkloadClass.of_session(session))
        known.sessions += 1
        own = session.in_process_draft_length > 0
        session.speculation_state = speculation_state = SpeculationState(
            known, own, not own and feature_retention.can_never_draft(session)
        )
        known.num_featureless += speculation_state.lacks_features
        if known.look_ahead is not None:
            known.look_ahead.begin_session(known.sessions)
        session.is_look_ahead_on = self.should_look_ahead(session)
        if own:
            self._own.add_session(known.workload_class)
            if self.should_pause(session):
                self.record_pause(session, paused=True)
        elif known.sessions == 1 and known.controllers:
            self._workload_classes.get_controller(known, self._loads).begin_session()
        return speculation_state

    def remove_session(self, session: Session) -> None:
        """A session ends, or its plan is about to change; idempotent."""
        if session.speculation_state is not None:
            known = session.speculation_state.workload
            known.sessions -= 1
            known.num_featureless -= session.speculation_state.lacks_features
            if session.speculation_state.is_in_process:
                self._own.remove_session(known.workload_class)
            session.speculation_state = None

    def begin_round(self, sessions: int, now: float) -> None:
        """A round is about to be planned while so many sessions are being served."""
        self._round += 1
        self._now = now
        self._rest(sessions)
        if self._loads.begin_round(sessions):
            self.changed = self._automatic
            self._round_s = self._loads.round_s
        if self._automatic:
            self._own.choose_shape()
        if self._settled is not self._loads.is_load_steady:
            self._settled = self._loads.is_load_steady
            self.changed = self._automatic
        if self.changed or self._round - self._looked_at >= PLAIN_CHECK_ROUNDS:
            self._looked_at = self._round
            self._judging.update_sampling()

    def _rest(self, sessions: int) -> None:
        """Begin anew with so many sessions if nothing has run for a while."""
        if self._now - self._ended_at > max(IDLE_S, IDLE_ROUNDS * self._round_s):
            self._ended_at = self._now
            self._loads.reset_after_idle(sessions)
            self._round_s = self._loads.round_s
            self.changed = self._automatic

    @property
    def num_draft_nodes(self) -> int:
        """Nodes of a row with in-process drafts in the next round, the root included: the draft
        shape; 0: whatever it is."""
        return self._own.num_nodes

    def should_pause(self, session: Session) -> bool:
        """Whether the session should decode plainly now, whatever its plan wishes for."""
        speculation_state = session.speculation_state
        if not self._automatic or speculation_state is None:
            return False
        if speculation_state.is_in_process:
            return session.is_speculation_off or self._own.is_plain(self._now)
        known = self._fresh(speculation_state.workload)
        return speculation_state.lacks_features or known.is_plain or stays_off(known, session)

    def should_drop_features(self, session: Session) -> bool:
        """Whether a paused session should keep no features any more: see `feature_retention`."""
        speculation_state = session.speculation_state
        if speculation_state is None or not (
            session.is_speculation_off and session.keeps_features and self._automatic
        ):
            return False
        return self._fresh(speculation_state.workload).drops_features

    def record_features_dropped(self, session: Session) -> None:
        """The session's features are kept no more: nothing drafts for it by messages again."""
        session.has_dropped_features, session.keeps_features = True, False
        if session.speculation_state is not None:
            session.speculation_state.lacks_features = True
            session.speculation_state.workload.num_featureless += 1

    def should_look_ahead(self, session: Session) -> bool:
        """Whether the session is to be drafted for ahead of its verdicts, if its plan allows it."""
        speculation_state = session.speculation_state
        if (
            speculation_state is None
            or speculation_state.is_in_process
            or not session.plan.look_ahead
        ):
            return False
        look = speculation_state.workload.look_ahead
        return not self._automatic or (look is not None and look.is_active(self._loads.load))

    def draft_limit(self, session: Session) -> int:
        """Draft levels of the session that are worth verifying.

        What is drafted ahead is for outcomes of whole drafts: of one that was cut, those that end
        at the cut are none of them, so every cut would be a miss.
        """
        speculation_state = session.speculation_state
        if speculation_state is None or self.should_look_ahead(session):
            return NO_LIMIT
        return speculation_state.workload.draft_limit(self._loads.load)

    def record_pause(self, session: Session, *, paused: bool) -> None:
        """The session pauses or resumes speculation with its next round."""
        session.is_speculation_off = paused
        if session.speculation_state is not None:
            session.speculation_state.record_mode_change(self._now, paused=paused)
            if paused and session.speculation_state.is_in_process:
                # The head's K/V ends here: its drafts cannot be had again.
                session.in_process_draft_length = 0

    def record_look_ahead(self, session: Session, *, ahead: bool) -> None:
        """The session's drafter is about to be told to look ahead, or not to."""
        session.is_look_ahead_on = ahead
        if session.speculation_state is not None:
            session.speculation_state.record_look_ahead_change()

    def reset_drafter(self, drafter_id: DrafterId) -> None:
        """A drafter has connected: what was found of its predecessor's speed is void."""
        self.changed = self._automatic
        self._workload_classes.reset_drafter(drafter_id)

    def slowest_response_s(self) -> float:
        """See `WorkloadRegistry.slowest_response_s`."""
        return self._workload_classes.slowest_response_s()

    def drafter_response_s(self, drafter_id: DrafterId) -> float:
        """See `WorkloadRegistry.drafter_response_s`; any thread may ask."""
        return self._workload_classes.drafter_response_s(drafter_id)

    # ---- waiting -------------------------------------------------------------------------------

    def proposal_timeout_s(self, session: Session) -> float:
        """How long the session's next round waits for a proposal; the plan's bound holds."""
        bound_s = session.plan.proposal_timeout_ms / 1000.0
        speculation_state = session.speculation_state
        if not self._automatic or speculation_state is None:
            return bound_s
        if speculation_state.is_holding:
            # A drafter that has to catch up first takes longer than it usually does.
            return min(bound_s, max(self._ceiling_s, MIN_WAIT_ROUNDS * self._round_s))
        return min(bound_s, self._fresh(speculation_state.workload).proposal_timeout_s)

    def record_arrival(
        self, session: Session, *, prefix_len: int, usable: bool, now: float
    ) -> None:
        """A proposal arrived; `usable`: it is for the session's present prefix."""
        session.has_stalled_drafter = False
        if session.speculation_state is not None and not session.is_speculation_off:
            session.speculation_state.record_arrival(
                session, prefix_len=prefix_len, usable=usable, now=now
            )

    def record_timeout(self, session: Session) -> None:
        """A proposal timeout ran out: the session's rounds do not wait until its drafter is heard
        of, or for a number of rounds."""
        session.has_stalled_drafter = True
        if session.speculation_state is not None:
            session.speculation_state.record_timeout(session)

    # ---- what rounds were seen to give ---------------------------------------------------------

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
        """A round ended that took `seconds` without waiting, `forward_s` of them for the target's
        forward: `rows` and those that were `alike`. `prompts`: the tokens of each one in it."""
        self._ended_at = now
        judging = self._judging
        judging.observe_round(rows, alike, seconds, forward_s, prompts, now, self._round_s)
        self.changed = self.changed or (self._automatic and judging.turned)
        if judging.plain:
            self._round_s = self._loads.round_s

    # ---- reports -------------------------------------------------------------------------------

    def decision_flags(self, session: Session) -> int:
        """Flags of the mode in force for the session and why; 0 without a choice."""
        speculation_state = session.speculation_state
        if speculation_state is None or not self._automatic:
            return 0
        why = (
            REASON_FLAGS[DecodingModeReason.FASTER]
            if speculation_state.is_in_process
            else self._fresh(speculation_state.workload).reason_flags
        )
        return why | PAUSED if session.is_speculation_off else why

    def describe(self) -> str:
        """For each kind of session being served: its mode, why, and what drafts gain; ASCII."""
        return "; ".join(self._summaries())

    def _summaries(self) -> Iterator[str]:
        if self._own.num_nodes:
            yield f"in-process drafts: {self._own.num_nodes - 1} tokens a session and round"
        for name, mode, gain in self._own.summaries(self._now):
            yield f"{name}: {mode}{format_gain(gain)}"
        for known in list(self._workload_classes.values()):
            yield from known.summaries(self._loads.load)

    @property
    def is_automatic(self) -> bool:
        """Whether anything is decided here."""
        return self._automatic

    def _fresh(self, known: WorkloadStats) -> WorkloadStats:
        """`known` with what rows ask of it looked up for this round."""
        if known.refresh_round < (self._looked_at if known.is_plain else self._round):
            known.refresh_round = self._round
            known.is_looking_ahead = known.look_ahead is not None and known.look_ahead.is_active(
                self._loads.load
            )
            known.proposal_timeout_s = proposal_timeout_s(
                known.arrival, self._round_s, bound_s=math.inf, ceiling_s=self._ceiling_s
            )
            controller = self._workload_classes.get_controller(known, self._loads)
            known.is_plain = controller.current_mode is DecodingMode.PLAIN
            if controller.active_mode is DecodingMode.PLAIN:
                controller.preparation_s = feature_retention.preparation_s(known, self._loads)
            update_hold(known, controller, self._loads)
            lets_go = feature_retention.should_drop_features(known, controller, self._loads)
            if lets_go and not known.drops_features:
                # Whoever is paused already was not asked about it.
                self.changed = self._automatic
            known.drops_features = lets_go
            known.reason_flags = REASON_FLAGS[controller.decision_reason]
        return known
