"""What rounds were seen to give, and what follows for what is in force (pure).

Every kind of session has a contest at every load (`spec.contest`); those of a round see what it
gave to their sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.spec.decoding_mode import Mode
from outrider.speculation.cost_table import CostTable
from outrider.speculation.measurements import RoundObservation
from outrider.speculation.speculation_controller import SpeculationController
from outrider_verifier.model_runner.results import PlainRows, RowResult
from outrider_verifier.planner import feature_retention
from outrider_verifier.planner.draft_length import DraftLengthChooser
from outrider_verifier.planner.glances import PlainRoundSelector
from outrider_verifier.planner.in_process_planner import InProcessDraftPlanner, in_process_rows
from outrider_verifier.planner.load_stats import LoadStats, RoundSample
from outrider_verifier.planner.observing import mark_round_end, observe_plain_rows, observe_row
from outrider_verifier.planner.workload_registry import WorkloadClasses
from outrider_verifier.planner.workload_stats import RoundMark, RoundTally, WorkloadStats
from outrider_verifier.state.session import any_keeps_features

MAX_PROMPT_ONLY_SHARE: Final = 0.5
"""Share of a row's time that rounds of nothing but prompts may have taken for it to count."""
STARVED_ROUNDS: Final = 16
"""Rounds in a row that did not count after which such ones do: both modes meet prompts."""

SHORT_ROUND_S: Final = 2.5e-3
"""Plain rounds of which not every one is looked at: that takes up to 50 us of 64 sessions (one core
of an H200's host)."""


class RoundObserver:
    """Of all sessions of a verifier."""

    def __init__(
        self,
        loads: LoadStats,
        workload_classes: WorkloadClasses,
        own: InProcessDraftPlanner,
        lengths: DraftLengthChooser,
        costs: CostTable,
        *,
        automatic: bool,
        chunk_tokens: int,
    ) -> None:
        """`automatic`, `chunk_tokens`: as of `SpeculationPolicy`."""
        self._loads, self._workload_classes, self._own = loads, workload_classes, own
        self._lengths, self._costs = lengths, costs
        self._automatic, self._chunk_tokens = automatic, chunk_tokens
        self._plain_sampler = PlainRoundSelector()
        self._calm = False
        """Whether no kind speculates, nothing is tried, and rounds are short."""
        self.turned = False
        """Whether anything else is in force since the last round, or may be,"""
        self.plain = False
        """and whether sessions decoded in that, without drafts."""

    def update_sampling(self) -> None:
        """See whether all sessions decode plainly and are to go on so, in short rounds."""
        served = [known for known in self._workload_classes.values() if known.sessions]
        short = self._automatic and 0.0 < self._loads.round_s < SHORT_ROUND_S
        self._calm = short and all([self._is_calm(known) for known in served])

    def _is_calm(self, known: WorkloadStats) -> bool:
        controller = self._workload_classes.get_controller(known, self._loads)
        return controller.is_plain_in_force and not controller.is_probe_due

    def observe_round(
        self,
        rows: Sequence[RowResult],
        alike: PlainRows,
        seconds: float,
        forward_s: float,
        prompts: Sequence[int],
        now: float,
        round_s: float,
    ) -> None:
        """See `SpeculationPolicy`; `plain_round_s`: a plain round, 0: not known."""
        self.turned = False
        apart = [row for row in rows if row.verify_row is not None]
        count, nodes = len(apart) + len(alike), sum([row.nodes for row in apart])
        own = in_process_rows(apart, alike)
        chunks = sum(-(-tokens // self._chunk_tokens) for tokens in prompts)
        featured = any_keeps_features(alike.sessions) or any_keeps_features(
            [row.session for row in rows]
        )
        ran = RoundSample(count, nodes, chunks, seconds, len(prompts), bool(own), featured)
        self._loads.observe_round(ran)
        # Plain decoding is that without features: whoever asks for no drafts keeps none.
        longer = self._loads.slowdown(featured=featured)
        mark = RoundMark(now, self._loads.prompts_s, self._loads.alone_s)
        touched: list[RoundTally] = []
        stands_for = self._plain_sampler.weight_of_round(calm=self._calm and not (own or nodes))
        if stands_for:
            for session in observe_plain_rows(alike.sessions, mark, touched):
                observe_row(RowResult.of_plain(session), mark, touched, round_s)
            for row in apart:
                observe_row(row, mark, touched, round_s)
        elif self._plain_sampler.marks_end:
            mark_round_end(alike.sessions, mark)
            mark_round_end([row.session for row in apart], mark)
        if own:
            self._own.observe_rows(own, ran, now)
            self.turned = self._own.is_plain(now)
        elif count and not chunks:
            # Of a round with prompts nobody knows well what is left without them.
            self._costs.observe_forward(count, nodes, forward_s)
            if nodes:
                # Plain rounds tell no drafter: the host's share is no matter of nodes.
                self._lengths.observe_host_time(seconds - forward_s)
        self.plain = count > 0 and not (own or nodes)
        for tally in touched:
            if tally.mode is Mode.PLAIN and longer > 1.0:
                tally.seconds /= longer
            if self._automatic:
                self._judge(tally, stands_for)
            tally.clear()

    def _judge(self, tally: RoundTally, stands_for: int) -> None:
        """Let the contests of a kind see what the kind's sessions got."""
        known = tally.workload
        controller = self._workload_classes.get_controller(known, self._loads)
        controller.expected_plain_s = self._loads.plain_round_s
        timed = tally.alone_s <= MAX_PROMPT_ONLY_SHARE * tally.seconds
        known.starved_rounds = 0 if timed else known.starved_rounds + 1
        timed = timed or known.starved_rounds > STARVED_ROUNDS
        seen = tally.to_observation(timed=timed, stands_for=stands_for)
        if not self._judge_ahead(tally, controller, seen):
            before, was = controller.current_mode, controller.active_mode
            controller.observe_round(tally.mode, seen)
            turned = (controller.current_mode, controller.active_mode) != (before, was)
            if known.look_ahead is not None and turned:
                known.look_ahead.follow_speculation(controller, was, self._loads.load)
            self.turned = self.turned or turned
            if turned:
                self._calm = False
                known.collect_features_until = 0
        if controller.is_probe_due:
            self._calm = False
            feature_retention.collect_features(known, self._loads)
        known.rounds_since_review += tally.mode is Mode.SPECULATE
        other = self._lengths.review_length(known, self._loads.load, self._loads.sessions)
        self.turned = self.turned or other

    def _judge_ahead(
        self, tally: RoundTally, controller: SpeculationController, seen: RoundObservation
    ) -> bool:
        """Weigh look-ahead against lock-step, while nothing is being tried against plain decoding;
        whether rounds like these only try the way that is not in force, and so tell nothing of
        what speculation gives."""
        look, load = tally.workload.look_ahead, self._loads.load
        if look is None or tally.mode is Mode.PLAIN or controller.is_probing:
            return False
        before, tried = look.is_active(load), look.is_trial(load)
        if look.observe_round(
            load, seen, ahead=tally.is_looking_ahead, hits=tally.hits, missed=tally.missed_rows
        ):
            controller.reset_draft_statistics()
        self.turned = self.turned or look.is_active(load) is not before
        return tried or look.is_trial(load)
