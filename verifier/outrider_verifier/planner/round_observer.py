"""Observes the tokens of each round and decides which decoding mode is in force. Pure.

Every workload class has a speculation controller at every load
(`outrider.speculation.speculation_controller`). While all sessions decode plainly, only one round
in `SAMPLE_INTERVAL_ROUNDS` is observed, since observing all of them took the host a thirtieth of a
small model's rounds; it counts for those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.cost_table import CostTable
from outrider.speculation.measurements import RoundObservation
from outrider.speculation.speculation_controller import SpeculationController
from outrider_verifier.model_runner.results import PlainRows, RowResult
from outrider_verifier.planner import feature_retention
from outrider_verifier.planner.draft_length import DraftLengthChooser
from outrider_verifier.planner.in_process_planner import InProcessDraftPlanner, in_process_rows
from outrider_verifier.planner.load_stats import LoadStats, RoundSample
from outrider_verifier.planner.workload_registry import WorkloadRegistry
from outrider_verifier.planner.workload_stats import RoundMark, RoundTally, WorkloadStats
from outrider_verifier.state.session import Session, any_keeps_features

SAMPLE_INTERVAL_ROUNDS: Final = 8
"""Rounds of which one is looked at."""


@dataclass(slots=True)
class PlainRoundSelector:
    """Asked once a round, in turn."""

    _passed: int = 0
    """Rounds since the last one that was looked at."""
    marks_end: bool = True
    """Whether the end of the last round is noted, where the next one begins."""

    def weight_of_round(self, *, calm: bool) -> int:
        """A round ended: for how many it stands, itself included. 0: it is not looked at;
        `marks_end` says whether its end is to be noted. `calm`: whether not every round is."""
        if calm and self._passed < SAMPLE_INTERVAL_ROUNDS - 2:
            self._passed, self.marks_end = self._passed + 1, False
            return 0
        if not self.marks_end:
            # When it began nobody knows.
            self._passed, self.marks_end = self._passed + 1, True
            return 0
        stands_for, self._passed = self._passed + 1, 0
        return stands_for


MISS_ROUNDS: Final = 4.0
"""Plain rounds that a miss counts as at most when drafts are judged."""


def mark_round_end(sessions: Iterable[Session], mark: RoundMark) -> None:
    """A round of these ended at `mark`, and nothing more is to be seen of it."""
    for session in sessions:
        if session.speculation_state is not None:
            session.speculation_state.last_round = mark


def observe_plain_rows(
    sessions: Sequence[Session], mark: RoundMark, touched: list[RoundTally]
) -> list[Session]:
    """Add what sessions got that have paused for a while, and emitted one token each in a round
    that ended at `mark`: all that had the same last round at once. Returns those of which more is
    to be seen; `touched` gets what is to be judged."""
    others: list[Session] = []
    known: WorkloadStats | None = None
    last: RoundMark | None = None
    count = 0
    for session in sessions:
        speculation_state = session.speculation_state
        if speculation_state is None or speculation_state.is_in_process:
            continue
        if session.link_id is None and not session.is_speculation_off:
            # See `observe_row`.
            speculation_state.last_round = mark
            continue
        before = speculation_state.last_round
        if speculation_state.unsettled_rounds > 0 or session.has_stalled_drafter or before is None:
            others.append(session)
            continue
        if before is not last or speculation_state.workload is not known:
            # Rows that are alike follow each other, nearly always.
            _add(known, last, count, mark, touched)
            known, last, count = speculation_state.workload, before, 0
        count += 1
        speculation_state.last_round = mark
    _add(known, last, count, mark, touched)
    return others


def _add(
    known: WorkloadStats | None,
    last: RoundMark | None,
    count: int,
    mark: RoundMark,
    touched: list[RoundTally],
) -> None:
    """Add so many rows of one kind whose last round was the same; no-op before there are any."""
    if known is None or last is None:
        return
    tally = known.get_tally(True, False, settled=True)
    if not tally.rows:
        touched.append(tally)
    spent_s, alone_s = mark.elapsed_since(last)
    # Each emitted the one token of a plain round.
    tally.add_rows(count, count, count, count * max(0.0, spent_s), count * alone_s)


def observe_row(row: RowResult, mark: RoundMark, touched: list[RoundTally], round_s: float) -> None:
    """Add what a session got to what its kind did; `plain_round_s`: a plain round, 0: not known."""
    session, speculation_state = row.session, row.session.speculation_state
    if speculation_state is None or speculation_state.is_in_process:
        return
    last, speculation_state.last_round = speculation_state.last_round, mark
    if session.link_id is None and not session.is_speculation_off:
        # Without a drafter there was no choice, so nothing is learnt about it.
        return
    known, nodes, hit = speculation_state.workload, row.nodes, row.is_hit
    spent_s, alone_s = (0.0, 0.0) if last is None else mark.elapsed_since(last)
    if hit:
        # Nothing arrived after the root, and yet the drafter follows.
        session.has_stalled_drafter = False
        speculation_state.record_healthy()
    if nodes:
        key = nodes, row.accepted
        known.accepted_levels[key] = known.accepted_levels.get(key, 0) + 1
    elif session.has_stalled_drafter or row.missed_proposal:
        absent = row.missed_proposal and speculation_state.rounds_without_proposal > 0
        if round_s:
            # One drafter that stops is no reason to leave speculation; misses for ever are.
            spent_s = min(spent_s, MISS_ROUNDS * round_s)
        speculation_state.record_skipped_round(session)
        if absent:
            if mark.ended_at >= speculation_state.proposals_late_since:
                speculation_state.record_round(drafted=False)
            return
    drafted = nodes > 0
    if last is None:
        # Its first round: the drafter had the prompt to read, as it will not again.
        speculation_state.record_round(drafted=drafted, missed=row.missed_proposal)
        return
    tally = known.get_tally(
        session.is_speculation_off,
        session.is_look_ahead_on,
        settled=speculation_state.unsettled_rounds <= 0,
    )
    if not tally.rows:
        touched.append(tally)
    count = len(row.tokens)
    tally.add_rows(1, count, count * count, max(0.0, spent_s), alone_s)
    tally.hits += hit
    tally.missed_rows += not nodes
    speculation_state.record_round(drafted=drafted, missed=row.missed_proposal)


MAX_PROMPT_ONLY_SHARE: Final = 0.5
"""Share of a row's time that rounds of nothing but prompts may have taken for it to count."""
STARVED_ROUNDS: Final = 16
"""Rounds in a row that did not count after which such ones do: both modes meet prompts."""

SHORT_ROUND_S: Final = 2.5e-3
"""Plain rounds of which not every one is looked at: that takes up to 50 us of 64 sessions (one core
of an H200's host)."""


class RoundObserver:
    """Observer of the rounds of all sessions of a verifier."""

    def __init__(
        self,
        loads: LoadStats,
        workload_classes: WorkloadRegistry,
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
            if tally.mode is DecodingMode.PLAIN and longer > 1.0:
                tally.seconds /= longer
            if self._automatic:
                self._judge(tally, stands_for)
            tally.clear()

    def _judge(self, tally: RoundTally, stands_for: int) -> None:
        """Let the speculation controllers of a kind see what the kind's sessions got."""
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
        known.rounds_since_review += tally.mode is DecodingMode.SPECULATE
        other = self._lengths.review_length(known, self._loads.load, self._loads.sessions)
        self.turned = self.turned or other

    def _judge_ahead(
        self, tally: RoundTally, controller: SpeculationController, seen: RoundObservation
    ) -> bool:
        """Weigh look-ahead against lock-step, while nothing is being tried against plain decoding;
        whether rounds like these only try the way that is not in force, and so tell nothing of
        what speculation gives."""
        look, load = tally.workload.look_ahead, self._loads.load
        if look is None or tally.mode is DecodingMode.PLAIN or controller.is_probing:
            return False
        before, tried = look.is_active(load), look.is_trial(load)
        if look.observe_round(
            load, seen, ahead=tally.is_looking_ahead, hits=tally.hits, missed=tally.missed_rows
        ):
            controller.reset_draft_statistics()
        self.turned = self.turned or look.is_active(load) is not before
        return tried or look.is_trial(load)
