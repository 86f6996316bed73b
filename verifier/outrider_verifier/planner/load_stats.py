"""LoadStats: current load, and measured times of plain rounds, prompts and starts at each. Pure.

A load is the exponent of a power of two of sessions. Times are seconds. With good drafts sessions
follow one another faster, so that more of them begin in a round. The cost of a start does not
depend on how a session decodes, so it is not counted against drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from outrider.speculation.cost_table import CostTable
from outrider.speculation.measurements import STALL_FACTOR, RoundTimeWindow

PRIOR_OPEN_S: Final = 150e-6
"""What is believed at first: of 129 us of the engine thread and 62 of the event loop some is done
while a device works (`bench host --own 3 --routers 4 --sessions 256 --answers 90`, a Xeon)."""
MAX_OPEN_S: Final = 1e-3
PRIOR_WEIGHT: Final = 64.0
"""How firmly that is believed: openings squared, off their mean."""
HALF_LIFE_ROUNDS: Final = 256.0
"""Rounds after which one counts half."""
_KEEP: Final = 0.5 ** (1.0 / HALF_LIFE_ROUNDS)
STALL_S: Final = 1e-3
"""So much beyond `STALL_FACTOR` times what is expected was no opening."""


@dataclass(slots=True)
class _Regression:
    """Rounds of one kind: a line through them has a start of its own."""

    openings: float = 0.0
    seconds: float = 0.0
    """Means."""
    both: float = 0.0
    square: float = 0.0
    """Sums, off these."""
    count: float = 0.0

    def add_sample(self, openings: int, seconds: float, each_s: float) -> None:
        if self.count:
            expected_s = max(0.0, self.seconds + each_s * (openings - self.openings))
            seconds = min(seconds, STALL_FACTOR * expected_s + STALL_S)
        self.count = _KEEP * self.count + 1.0
        off = openings - self.openings
        self.openings += off / self.count
        self.seconds += (seconds - self.seconds) / self.count
        # One factor off the mean as it was, one off the mean as it is (Welford 1962).
        self.both = _KEEP * self.both + off * (seconds - self.seconds)
        self.square = _KEEP * self.square + off * (openings - self.openings)


@dataclass(slots=True)
class SessionOpenCost:
    """Learnt from rounds in which more and fewer sessions began: the slope of least squares."""

    _in_process: _Regression = field(default_factory=_Regression)
    _plain: _Regression = field(default_factory=_Regression)
    each_s: float = PRIOR_OPEN_S
    """Of each session."""

    def observe_round(self, openings: int, beyond_s: float, *, own: bool) -> None:
        """A round in which so many sessions began took `beyond_s` longer than its device's share;
        `own`: it verified drafts of this process's head."""
        line = self._in_process if own else self._plain
        line.add_sample(openings, beyond_s, self.each_s)
        both = self._in_process.both + self._plain.both + PRIOR_WEIGHT * PRIOR_OPEN_S
        square = self._in_process.square + self._plain.square + PRIOR_WEIGHT
        self.each_s = min(max(0.0, both / square), MAX_OPEN_S)


STEADY_DOUBLINGS: Final = 0.6
"""Doublings by which the sessions may differ from a load before there is another: a session that
ends and the one that follows it change nothing."""
MAX_PREFILL_SHARE: Final = 0.9
"""Share of a round's time that prompts may have added by the device's times."""
MIN_BATCH_SHARE: Final = 0.75
"""Share of the sessions without which a round tells nothing of the load."""
LOWER_LOAD_ROUNDS: Final = 16
"""Rounds that fewer sessions must last for the load to be a lower one: of a wave that ends, many
are about to be followed by others."""
RISE_ROUNDS: Final = 8
"""Rounds from one rise to the next that make them one."""
IMMEDIATE_DOUBLINGS: Final = 1.5
"""Doublings of difference that need not last."""
PLAIN_WINDOW_ROUNDS: Final = 48
"""Plain rounds that tell what one takes: a few that were held up, in a row, tell nothing."""
REFRESH_ROUNDS: Final = 4
"""Rounds for which what a plain one takes is not worked out anew."""
MIN_PLAIN_ROUNDS: Final = 4.0
"""How many of them are needed where anything else tells it."""
FEATURE_COST_S: Final = 50e-6
FEATURE_ROW_COST_S: Final = 1e-6
"""What keeping features takes the host, and of it each session (`bench host --plain`, one core of
an H200's host: 114 us of 475 with 64 sessions)."""
PREFILL_ROUND_WEIGHT: Final = 0.25
"""What one with prompts counts: what these added is known no better than that."""


def prefill_weight(chunks: int) -> float:
    """What a round with so many prefill chunks counts."""
    return PREFILL_ROUND_WEIGHT if chunks else 1.0


class RoundCostModel(Protocol):
    """What the device was measured to take for a round in which so many sessions decode, with or
    without in-process drafts, beside so many prefill chunks; None: not known."""

    def __call__(
        self, rows: int, *, own: bool, chunks: int = 0, featured: bool = False
    ) -> float | None: ...


class RoundSample(NamedTuple):
    """A round that ended."""

    rows: int
    """Sessions that decoded in it."""
    nodes: int
    """Draft nodes from outside that were verified."""
    chunks: int
    """Of prompts."""
    seconds: float
    prompts: int = 0
    """So many that these are of."""
    has_in_process_drafts: bool = False
    """Whether drafts of the in-process drafter were verified."""
    keeps_features: bool = False
    """Whether features of it were kept."""


class LoadStats:
    """The current load, and the observed times of plain rounds at each load."""

    def __init__(self, times: RoundCostModel, costs: CostTable, *, chunk_tokens: int = 1) -> None:
        """`chunk_tokens`: prompt tokens of a piece, as `times` counts them."""
        self.times = times
        self._costs = costs
        self._openings = SessionOpenCost()
        self._chunk_tokens = chunk_tokens
        self._plain: dict[int, RoundTimeWindow] = {}
        """What plain rounds took without features, by load, in what the device was measured to
        take for their rows; in seconds where it was not."""
        self.rounds = 0
        """That were observed."""
        self._asked = (-1, -1)
        self._ratio = math.nan
        """What `_find_ratio` found when it was last asked, and when."""
        self._share_asked = (0, -1)
        self._share = 0.0
        """The same of `feature_cost_share`."""
        self._fewer_since: int | None = None
        """The round since which there have been too few sessions for the load; None: there are
        not."""
        self._changed_at = 0
        """The round since which the load is what it is."""
        self.before = 0
        """The load before this one."""
        self._base = 0
        """The load that this one has risen from."""
        self.peak = 0
        """The highest load since the load was last settled."""
        self.load = 0
        self.sessions = 1
        """Sessions being served, at least 1."""
        self.prompts_s = 0.0
        """What prompts have added to rounds, ever."""
        self.alone_s = 0.0
        """What rounds of nothing but prompts have taken, ever."""

    def begin_round(self, sessions: int) -> bool:
        """So many sessions are being served; whether the load is another one now."""
        self.sessions = max(1, sessions)
        above = math.log2(self.sessions) - self.load
        if above >= -STEADY_DOUBLINGS:
            self._fewer_since = None
        if abs(above) <= STEADY_DOUBLINGS or not (above > 0.0 or self._lasts(above)):
            return False
        before, self.load, self._fewer_since = self.load, round(self.load + above), None
        if self.load == before:
            return False
        self.before = before
        if self.rounds - self._changed_at > RISE_ROUNDS:
            self._base = before
        self._base = min(self._base, self.load)
        self.peak = max(before if self.is_load_steady else self.peak, self.load)
        self._changed_at = self.rounds
        return True

    def reset_after_idle(self, sessions: int) -> None:
        """Nothing ran for a while, and now there are so many sessions: what was before is over."""
        self.sessions = max(1, sessions)
        self.load = self.peak = self.before = self._base = round(math.log2(self.sessions))
        self._changed_at, self._fewer_since = self.rounds - LOWER_LOAD_ROUNDS - self.sessions, None

    @property
    def load_jump(self) -> int:
        """Doublings by which the load has risen at once, or nearly so, when it last did."""
        return self.load - self._base

    @property
    def is_steady(self) -> bool:
        """Whether the load has been what it is for a while."""
        return self.rounds - self._changed_at >= LOWER_LOAD_ROUNDS

    @property
    def is_load_steady(self) -> bool:
        """The same for longer, a round for each session: sessions that come back to drafts cost
        their drafter that much, so there must be something to gain by it."""
        return self.rounds - self._changed_at >= LOWER_LOAD_ROUNDS + self.sessions

    def _lasts(self, above: float) -> bool:
        """Whether there have been fewer sessions for long enough; `above`: negative doublings."""
        if self._fewer_since is None:
            self._fewer_since = self.rounds
        return above <= -IMMEDIATE_DOUBLINGS or self.rounds - self._fewer_since >= LOWER_LOAD_ROUNDS

    @property
    def plain_round_s(self) -> float:
        """A plain round of the present sessions, of which no features are kept: as seen at this
        load, or else by the device's times and what the host added to them at the nearest load;
        nan: nothing tells."""
        device_s = self.times(self.sessions, own=False)
        asked = self.load, self.rounds // REFRESH_ROUNDS
        if asked != self._asked or math.isnan(self._ratio):
            self._asked, self._ratio = asked, self._find_ratio(device_s is not None)
        return self._ratio * (device_s or 1.0)

    def measured_plain_round(self, rows: int) -> tuple[float | None, float]:
        """A plain round of so many sessions, as such rounds were seen at this load, and the
        standard error of that as a share of it; None: they were not, or too few."""
        seen = self._plain.get(self.load)
        if seen is None or seen.rounds < MIN_PLAIN_ROUNDS:
            return None, math.inf
        return seen.mean_s * (self.times(rows, own=False) or 1.0), seen.error

    def _find_ratio(self, timed: bool) -> float:
        """What plain rounds take in the device's times, or in seconds where it has none."""
        seen = self._plain.get(self.load)
        if seen is not None and (seen.rounds >= MIN_PLAIN_ROUNDS or not timed):
            return seen.mean_s
        if not timed:
            return math.nan
        known = [load for load, found in self._plain.items() if found.rounds >= MIN_PLAIN_ROUNDS]
        if not known:
            return 1.0
        near = min(known, key=lambda load: abs(load - self.load))
        return max(1.0, self._plain[near].mean_s)

    @property
    def feature_cost_s(self) -> float:
        """What keeping features adds to a plain round: on the device by its times, on the host as
        it was measured elsewhere; rounds that were seen, of different moments, differ by more. 0
        where the device's times are not known."""
        bare_s = self.times(self.sessions, own=False)
        with_s = self.times(self.sessions, own=False, featured=True)
        if not bare_s or not with_s:
            return 0.0
        return max(0.0, with_s - bare_s) + FEATURE_COST_S + FEATURE_ROW_COST_S * self.sessions

    @property
    def feature_cost_share(self) -> float:
        """The same as a share of a plain round without."""
        asked = self.sessions, self.rounds // REFRESH_ROUNDS
        if asked != self._share_asked:
            # Known only where the device's times are, and so is a plain round.
            features_s = self.feature_cost_s
            self._share_asked = asked
            self._share = features_s / self.plain_round_s if features_s else 0.0
        return self._share

    def slowdown(self, *, featured: bool) -> float:
        """How many times as long plain rounds last whose features are kept, if they are."""
        return 1.0 + self.feature_cost_share if featured else 1.0

    @property
    def round_s(self) -> float:
        """The same where something must be known: by forwards of other shapes; 0: unknown."""
        plain_s = self.plain_round_s
        if math.isnan(plain_s):
            plain_s = self._costs.estimate(self.sessions, 0)
        return 0.0 if math.isnan(plain_s) else plain_s

    def observe_round(self, ran: RoundSample) -> None:
        """A round ended. What prompts added to it is left out, by the device's times or else by
        their share of its tokens."""
        device_s = (
            self.times(ran.rows, own=ran.has_in_process_drafts, chunks=ran.chunks)
            if ran.rows
            else None
        )
        if device_s and not ran.nodes and self.is_representative(ran.rows):
            self._openings.observe_round(
                ran.prompts, ran.seconds - device_s, own=ran.has_in_process_drafts
            )
        added_s = self._added_s(ran)
        self.prompts_s += added_s
        self.rounds += 1
        if not ran.rows:
            self.alone_s += ran.seconds
        elif not ran.nodes and not ran.has_in_process_drafts and self.is_representative(ran.rows):
            self._observe_plain(ran, ran.seconds - added_s)

    def _observe_plain(self, ran: RoundSample, seconds: float) -> None:
        device_s = self.times(ran.rows, own=False)
        seconds /= self.slowdown(featured=ran.keeps_features)
        seen = self._plain.get(self.load)
        if seen is None:
            seen = self._plain[self.load] = RoundTimeWindow(PLAIN_WINDOW_ROUNDS)
        seen.observe_round(seconds / (device_s or 1.0), prefill_weight(ran.chunks))

    def is_representative(self, rows: int) -> bool:
        """Whether a round in which so many sessions decode tells what one takes at this load."""
        return rows >= MIN_BATCH_SHARE * self.sessions

    def session_open_s(self, ran: RoundSample) -> float:
        """What opening sessions added to a round."""
        return min(self._openings.each_s * ran.prompts, MAX_PREFILL_SHARE * ran.seconds)

    def _added_s(self, ran: RoundSample) -> float:
        if not ran.chunks:
            return 0.0
        added_s = self._device_added_s(ran) + self.session_open_s(ran)
        return min(added_s, MAX_PREFILL_SHARE * ran.seconds)

    def _device_added_s(self, ran: RoundSample) -> float:
        # Alone they are charged as they would be beside the sessions: a round of their own, which
        # others may have to wait for, is what speculation costs.
        beside = ran.rows or self.sessions
        with_s = self.times(beside, own=ran.has_in_process_drafts, chunks=ran.chunks)
        # Rounds with prompts make features whether or not they are kept.
        without_s = self.times(beside, own=ran.has_in_process_drafts, featured=ran.keeps_features)
        if with_s and without_s:
            return max(0.0, with_s - without_s)
        prompts = ran.chunks * self._chunk_tokens
        return ran.seconds * prompts / (prompts + beside + ran.nodes)
