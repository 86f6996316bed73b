"""What rounds were seen to give, and what follows for what is in force (pure).

Every kind of session has a contest at every load (`spec.contest`); those of a round see what it
gave to their sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.spec.decoding_mode import Mode
from outrider.speculation.cost_table import CostTable
from outrider.speculation.measurements import Seen
from outrider.speculation.speculation_controller import Contest
from outrider_verifier.model_runner.results import Alike, Settled
from outrider_verifier.planner import feature_retention
from outrider_verifier.planner.draft_length import Lengths
from outrider_verifier.planner.glances import Glances
from outrider_verifier.planner.in_process_planner import OwnVerdicts, own_rows
from outrider_verifier.planner.load_stats import Loads, Ran
from outrider_verifier.planner.observing import note_end, observe_plain, observe_row
from outrider_verifier.planner.workload_registry import Kinds
from outrider_verifier.planner.workload_stats import Known, Mark, Tally
from outrider_verifier.state.session import keep_features

MOST_ALONE: Final = 0.5
"""Share of a row's time that rounds of nothing but prompts may have taken for it to count."""
STARVED_ROUNDS: Final = 16
"""Rounds in a row that did not count after which such ones do: both modes meet prompts."""

SHORT_S: Final = 2.5e-3
"""Plain rounds of which not every one is looked at: that takes up to 50 us of 64 sessions (one core
of an H200's host)."""


class Judging:
    """Of all sessions of a verifier."""

    def __init__(
        self,
        loads: Loads,
        kinds: Kinds,
        own: OwnVerdicts,
        lengths: Lengths,
        costs: CostTable,
        *,
        automatic: bool,
        piece_tokens: int,
    ) -> None:
        """`automatic`, `piece_tokens`: as of `Policy`."""
        self._loads, self._kinds, self._own = loads, kinds, own
        self._lengths, self._costs = lengths, costs
        self._automatic, self._piece_tokens = automatic, piece_tokens
        self._glances = Glances()
        self._calm = False
        """Whether no kind speculates, nothing is tried, and rounds are short."""
        self.turned = False
        """Whether anything else is in force since the last round, or may be,"""
        self.plain = False
        """and whether sessions decoded in that, without drafts."""

    def look_around(self) -> None:
        """See whether all sessions decode plainly and are to go on so, in short rounds."""
        served = [known for known in self._kinds.values() if known.sessions]
        short = self._automatic and 0.0 < self._loads.round_s < SHORT_S
        self._calm = short and all([self._is_calm(known) for known in served])

    def _is_calm(self, known: Known) -> bool:
        contest = self._kinds.contest(known, self._loads)
        return contest.holds_plain and not contest.due

    def observe_round(
        self,
        rows: Sequence[Settled],
        alike: Alike,
        seconds: float,
        forward_s: float,
        prompts: Sequence[int],
        now: float,
        round_s: float,
    ) -> None:
        """See `Policy`; `round_s`: a plain round, 0: not known."""
        self.turned = False
        apart = [row for row in rows if row.verified is not None]
        count, nodes = len(apart) + len(alike), sum([row.nodes for row in apart])
        own = own_rows(apart, alike)
        pieces = sum(-(-tokens // self._piece_tokens) for tokens in prompts)
        featured = keep_features(alike.sessions) or keep_features([row.session for row in rows])
        ran = Ran(count, nodes, pieces, seconds, len(prompts), bool(own), featured)
        self._loads.observe(ran)
        # Plain decoding is that without features: whoever asks for no drafts keeps none.
        longer = self._loads.stretch(featured=featured)
        mark = Mark(now, self._loads.prompts_s, self._loads.alone_s)
        touched: list[Tally] = []
        stands_for = self._glances.stands_for(calm=self._calm and not (own or nodes))
        if stands_for:
            for session in observe_plain(alike.sessions, mark, touched):
                observe_row(Settled.plain(session), mark, touched, round_s)
            for row in apart:
                observe_row(row, mark, touched, round_s)
        elif self._glances.notes:
            note_end(alike.sessions, mark)
            note_end([row.session for row in apart], mark)
        if own:
            self._own.observe(own, ran, now)
            self.turned = self._own.plain(now)
        elif count and not pieces:
            # Of a round with prompts nobody knows well what is left without them.
            self._costs.observe(count, nodes, forward_s)
            if nodes:
                # Plain rounds tell no drafter: the host's share is no matter of nodes.
                self._lengths.observe(seconds - forward_s)
        self.plain = count > 0 and not (own or nodes)
        for tally in touched:
            if tally.mode is Mode.PLAIN and longer > 1.0:
                tally.seconds /= longer
            if self._automatic:
                self._judge(tally, stands_for)
            tally.clear()

    def _judge(self, tally: Tally, stands_for: int) -> None:
        """Let the contests of a kind see what the kind's sessions got."""
        known = tally.known
        contest = self._kinds.contest(known, self._loads)
        contest.expected_s = self._loads.plain_s
        timed = tally.alone_s <= MOST_ALONE * tally.seconds
        known.starved = 0 if timed else known.starved + 1
        timed = timed or known.starved > STARVED_ROUNDS
        seen = tally.seen(timed=timed, stands_for=stands_for)
        if not self._judge_ahead(tally, contest, seen):
            before, was = contest.mode, contest.in_force
            contest.observe(tally.mode, seen)
            turned = (contest.mode, contest.in_force) != (before, was)
            if known.look is not None and turned:
                known.look.follow(contest, was, self._loads.load)
            self.turned = self.turned or turned
            if turned:
                self._calm = False
                known.gathers_until = 0
        if contest.due:
            self._calm = False
            feature_retention.gather(known, self._loads)
        known.review += tally.mode is Mode.SPECULATE
        other = self._lengths.review(known, self._loads.load, self._loads.sessions)
        self.turned = self.turned or other

    def _judge_ahead(self, tally: Tally, contest: Contest, seen: Seen) -> bool:
        """Weigh look-ahead against lock-step, while nothing is being tried against plain decoding;
        whether rounds like these only try the way that is not in force, and so tell nothing of
        what speculation gives."""
        look, load = tally.known.look, self._loads.load
        if look is None or tally.mode is Mode.PLAIN or contest.trying:
            return False
        before, tried = look.ahead(load), look.trying(load)
        if look.observe(load, seen, ahead=tally.ahead, hits=tally.hits, missed=tally.missed):
            contest.renew()
        self.turned = self.turned or look.ahead(load) is not before
        return tried or look.trying(load)
