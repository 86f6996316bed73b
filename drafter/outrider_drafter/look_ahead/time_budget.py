"""LookAheadBudget: decides by measured times how much look-ahead fits before the next verdict.

`StepTimes` and `VerdictArrivals` measure draft steps and the times from a draft to its verdict, by
class. `plan_pass_start` and `next_launch_outcomes` weigh the expected value of launches (pure): a
pass is cut into launches, and messages are polled after each; a draft that is wanted meanwhile
waits for the end of one. All times in seconds. S sessions whose verdicts are waited for, K
outcomes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Final, Literal, NamedTuple

import numpy as np

from outrider.spec.plan import DraftMethod
from outrider_drafter.look_ahead.session_state import LookAheadSession, SelectedOutcomes
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES, Floats

SESSION_BUCKETS: Final = (1, 4, 8, 16, 32, 64)
"""Sessions that one launch drafts for, or scores: a device fills up what is less."""
_STEPS: Final = 9
"""Newest times of a step that count: the median of so few forgets a stall and follows a change."""
_VERDICTS: Final = 32
_BLIND: Final = 64
"""Rounds in a row in which verdicts came unseen, after which one is waited for."""
_SHARP: Final = 0.05
"""Bounds that are so near to each other, as a share of the wait, are as good as the time itself."""
_EARLY: Final = 0.25
"""Share of verdicts that come before the time that is reckoned with."""
_SMALLER: Final = 0.8
"""Assumed cost of a launch over that of a larger one, until it was tried."""


StepKind = Literal["draft", "score", "branch"]
_PASS: Final[tuple[StepKind, ...]] = ("score", "branch")


class DraftStep(NamedTuple):
    """Kind of a draft step. Its number of sessions is recorded apart."""

    method: DraftMethod
    kind: StepKind
    nodes: int
    """Most nodes of one of these drafts."""


class StepTimes:
    """Recent durations of steps, by step and size of the launch."""

    def __init__(self) -> None:
        self._seen: dict[DraftStep, dict[int, deque[float]]] = defaultdict(dict)

    def observe_step(self, step: DraftStep, count: int, seconds: float) -> None:
        """A step for `count` sessions or outcomes took so long."""
        sizes = self._seen[step]
        size = _size(step, count)
        if size not in sizes:
            sizes[size] = deque(maxlen=_STEPS)
        sizes[size].append(seconds)

    def reset_pass_times(self, step: DraftStep) -> None:
        """Scores and branches are tried anew; what they took was measured long ago."""
        for kind in _PASS:
            self._seen.pop(step._replace(kind=kind), None)

    def expected_s(self, step: DraftStep, count: int) -> float:
        """How long it will take. A size that was never tried is hoped to be no dearer than the next
        smaller one, or somewhat cheaper than the next larger: then it is tried, and known. Of a
        pass nothing is known at first but what a draft takes; 0.0 where that is not known."""
        sizes = self._seen.get(step)
        if not sizes:
            return 0.0 if step.kind == "draft" else self.expected_s(step._replace(kind="draft"), 1)
        size = _size(step, count)
        if size in sizes:
            return median(sizes[size])
        smaller = [other for other in sizes if other < size]
        if smaller:
            return median(sizes[max(smaller)])
        return _SMALLER * median(sizes[min(sizes)])


def _size(step: DraftStep, count: int) -> int:
    sizes = OUTCOME_BATCH_SIZES if step.kind == "branch" else SESSION_BUCKETS
    return sizes[min(bisect_left(sizes, count), len(sizes) - 1)]


class VerdictWait(NamedTuple):
    """Whose verdict is waited for, and since when."""

    connection: int
    follows_hit: bool
    """Whether since a verdict that was a hit, whose next round had begun; else since a draft
    left."""


@dataclass(slots=True)
class _Waits:
    """What was seen of one kind of wait."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_VERDICTS))
    blind: int = 0
    """Verdicts in a row of whose times only bounds were known."""


class VerdictArrivals:
    """Estimates when the next verdict comes after a draft or a hit: an early quantile.

    A message that came while the thread worked was found afterwards, so that only bounds of its
    time are known: it counts as the time between them that is nearest to the expected one. Counted
    as it was found, a pass that is too long would seem to end in time. The expected time may be
    wrong all the same, and nothing would show it as long as the thread works on: so it must stand
    back once in a while (`is_blind`).
    """

    def __init__(self) -> None:
        self._waits: dict[VerdictWait, _Waits] = {}

    def observe_arrival(self, wait: VerdictWait, least: float, most: float) -> None:
        """A verdict came so long after the wait began."""
        waits = self._waits.setdefault(wait, _Waits())
        if most - least > _SHARP * most:
            waits.blind += 1
        else:
            if waits.blind >= _BLIND:
                waits.seen.clear()
            waits.blind = 0
        expected = _early(waits.seen) if waits.seen else least
        waits.seen.append(min(max(expected, least), most))

    def expected_s(self, wait: VerdictWait) -> float:
        """How long it will be, rather too short; inf: nobody knows."""
        waits = self._waits.get(wait) or self._waits.get(wait._replace(follows_hit=False))
        return _early(waits.seen) if waits is not None else math.inf

    def exchange_latency_s(self, connection: int) -> float:
        """What a draft that is there before its verdict saves beside its making."""
        sent = self._waits.get(VerdictWait(connection, follows_hit=False))
        hit = self._waits.get(VerdictWait(connection, follows_hit=True))
        return max(_early(sent.seen) - _early(hit.seen), 0.0) if sent and hit else 0.0

    def is_blind(self, wait: VerdictWait, sessions: int) -> bool:
        """Whether a verdict of one of so many sessions should be waited for, to see its time."""
        waits = self._waits.get(wait)
        return waits is not None and waits.blind >= _BLIND * sessions

    def forget_connection(self, connection: int) -> None:
        """A connection ended."""
        for after_hit in (False, True):
            self._waits.pop(VerdictWait(connection, after_hit), None)


def _early(seen: deque[float]) -> float:
    return sorted(seen)[int(_EARLY * len(seen))]


DEFAULT_MAX_FAN_OUT: Final = 16
"""Outcomes of a proposal where its plan leaves them to the drafter, at most: more are foreseen more
often, but come too late (decision 20)."""
_MAX_OTHERS: Final = 64
"""Sessions beyond those of a pass whose waits are looked at."""
_ANYWAY: Final = 128
"""So many passes that were not worth it are followed by one that is made: things may change."""
_HOPED: Final = 0.8
"""Probability of a hit of which nothing is known."""
_FAN_OUTS: Final = (1, 2, 4, 8, 16, 32)
_SLOWNESS: Final = 16


class LookAheadBudget:
    """Times of draft steps and verdicts, and the decisions on passes. Use it from one thread.

    Without calls of `record_poll` the arrival times of verdicts are unknown, and no pass is cut
    short.
    """

    def __init__(self, now: Callable[[], float], *, in_time: bool) -> None:
        """in_time: whether passes are cut to the time that there is."""
        self._now, self._in_time = now, in_time
        self.steps = StepTimes()
        self._arrivals = VerdictArrivals()
        self._looked_at: float | None = None
        """When messages were looked for last."""
        self._heard = (0.0, 0.0)
        """Between which times what was heard last has come."""
        self._foreseen: dict[DraftStep, Floats] = {}
        """Mean probability that one of so many outcomes comes, by `_FAN_OUTS`."""
        self._passed_over: dict[DraftStep, int] = defaultdict(int)
        self._is_trial = False
        """Whether the present pass is made although it was not found to be worth it."""

    def record_poll(self, *, waited: bool) -> None:
        """Messages were looked for just now; waited: until one came, or for some time."""
        now = self._now()
        before = self._looked_at
        self._heard = (now if waited or before is None else before, now)
        self._looked_at = now

    def forget_connection(self, connection: int) -> None:
        """A connection ended."""
        self._arrivals.forget_connection(connection)

    def record_verdict(self, one: LookAheadSession) -> None:
        """The verdict on a live proposal came with what was heard last."""
        if self._looked_at is not None:
            least, most = self._heard
            least, most = max(least - one.sent_at, 0.0), max(most - one.sent_at, 0.0)
            self._arrivals.observe_arrival(_wait(one), least, most)

    def record_scores(
        self, step: DraftStep, ones: Sequence[LookAheadSession], found: SelectedOutcomes
    ) -> None:
        """These outcomes were found for proposals."""
        for live in range(len(ones)):
            sums = np.cumsum(found.gains[found.lives == live])
            if len(sums):
                told = sums[np.minimum(_FAN_OUTS, len(sums)) - 1]
                known = self._foreseen.get(step)
                self._foreseen[step] = told if known is None else known + (told - known) / _SLOWNESS

    def plan_look_ahead_pass(
        self,
        step: DraftStep,
        ones: Sequence[LookAheadSession],
        watched: Collection[LookAheadSession],
        *,
        straight: bool,
    ) -> tuple[PassPlan, list[LookAheadSession]]:
        """How a pass over some of these proposals begins, and over which. straight: whether the
        last one's scores came to nothing."""
        whole = PassPlan(len(ones), straight)
        self._is_trial = False
        if not self._is_timed:
            return whole, list(ones)
        if any(self._arrivals.is_blind(_wait(one), len(watched)) for one in ones):
            return NO_PASS, []
        stakes = self._stakes(step, [*ones, *self._others(ones, watched)])
        able = sorted(range(len(ones)), key=lambda index: -stakes.seconds_to_verdict[index])
        fan_out = max(one.session.plan.fan_out or DEFAULT_MAX_FAN_OUT for one in ones)
        found = plan_pass_start(
            stakes,
            able,
            score=partial(self.steps.expected_s, step._replace(kind="score")),
            branch=partial(self.steps.expected_s, step._replace(kind="branch")),
            foreseen=partial(self._foresee, step),
            fan_out=fan_out,
        )
        if found.num_proposals:
            straight = straight or found.skips_poll
            return found._replace(skips_poll=straight), [
                ones[i] for i in able[: found.num_proposals]
            ]
        self._passed_over[step] += 1
        if self._passed_over[step] % _ANYWAY:
            return NO_PASS, []
        self._is_trial = True
        self.steps.reset_pass_times(step)
        return whole, list(ones)

    def order_by_value(
        self, step: DraftStep, ones: Sequence[LookAheadSession], found: SelectedOutcomes
    ) -> SelectedOutcomes:
        """Outcomes, likeliest first, by what a draft for each is expected to save, best first."""
        if not (self._is_timed and len(ones) > 1 and len(found.gains)):
            return found
        ends = self.steps.expected_s(step._replace(kind="branch"), len(found.gains))
        saved = np.array(self._stakes(step, ones).seconds_saved(ends))
        if not saved.any():
            return found
        return found.select(np.argsort(-found.gains * saved[found.lives], kind="stable"))

    def next_launch_size(
        self,
        step: DraftStep,
        ones: Sequence[LookAheadSession],
        watched: Collection[LookAheadSession],
        left: SelectedOutcomes,
    ) -> int:
        """How many of the outcomes that are left, in their order, to draft for next; 0: none."""
        here = left.select(slice(0, OUTCOME_BATCH_SIZES[-1]))
        if not self._is_timed or self._is_trial:
            return len(here.lives)
        return next_launch_outcomes(
            self._stakes(step, [*ones, *self._others(ones, watched)]),
            here.lives.tolist(),
            here.gains.tolist(),
            branch=partial(self.steps.expected_s, step._replace(kind="branch")),
        )

    @property
    def _is_timed(self) -> bool:
        return self._in_time and self._looked_at is not None

    def _others(
        self, ones: Sequence[LookAheadSession], watched: Collection[LookAheadSession]
    ) -> Iterable[LookAheadSession]:
        """Other sessions that wait for a verdict."""
        mine = set(map(id, ones))
        waiting = (one for one in watched if one.tree is not None and id(one) not in mine)
        return islice(waiting, _MAX_OTHERS)

    def _stakes(self, step: DraftStep, ones: Sequence[LookAheadSession]) -> LaunchValue:
        now, arrivals = self._now(), self._arrivals
        connection = ones[0].session.key.connection
        return LaunchValue(
            seconds_to_verdict=[
                one.sent_at + arrivals.expected_s(_wait(one)) - now for one in ones
            ],
            covered_probability=[one.covered_probability for one in ones],
            draft_s=self.steps.expected_s(step._replace(kind="draft"), 1),
            exchange_s=arrivals.exchange_latency_s(connection),
        )

    def _foresee(self, step: DraftStep, outcomes: float) -> float:
        """Probability that one of so many outcomes of a session comes."""
        known = self._foreseen.get(step)
        return _HOPED if known is None else float(np.interp(outcomes, _FAN_OUTS, known))


def _wait(one: LookAheadSession) -> VerdictWait:
    return VerdictWait(one.session.key.connection, one.is_hit)


LaunchCost = Callable[[int], float]
"""Seconds of a launch, by how many it is for."""
_MIN_GAIN: Final = 1e-7
"""What a launch must gain, a session: less is rounding."""


class LaunchValue(NamedTuple):
    """Expected gain and loss of a look-ahead launch."""

    seconds_to_verdict: Sequence[float]
    """[S]: until the verdict comes; it may be overdue."""
    covered_probability: Sequence[float]
    """[S]: probability that the outcome was drafted for already."""
    draft_s: float
    """Time that a draft after a verdict takes, s."""
    exchange_s: float
    """Time of the exchange that a draft made before its verdict saves, s."""

    def expected_value(self, hits: Sequence[float], ends: float) -> float:
        """What is gained by drafts that leave at `ends`, for further outcomes of probability
        `hits` [S]: the time by which they are there sooner, less that by which drafts for all
        other outcomes come later."""
        gained, saved = 0.0, self.seconds_saved(ends)
        for due, covered, hit, saves in zip(
            self.seconds_to_verdict, self.covered_probability, hits, saved, strict=True
        ):
            gained += hit * saves
            if ends > due:
                gained -= max(1.0 - covered - hit, 0.0) * (ends - due)
        return gained

    def seconds_saved(self, ends: float) -> list[float]:
        """[S]: by how much a draft that leaves at `ends` is there sooner than one that is made
        after its verdict."""
        most = self.draft_s + self.exchange_s
        return [min(max(due + self.draft_s - ends, 0.0), most) for due in self.seconds_to_verdict]


class PassPlan(NamedTuple):
    """How a pass begins."""

    num_proposals: int
    """Proposals that are scored, of those that may be, in their order; 0: there is no pass."""
    skips_poll: bool
    """Whether it goes on to the first drafts without a look at messages: one is expected."""


NO_PASS: Final = PassPlan(0, skips_poll=False)


def plan_pass_start(
    stakes: LaunchValue,
    able: Sequence[int],
    *,
    score: LaunchCost,
    branch: LaunchCost,
    foreseen: Callable[[float], float],
    fan_out: int,
) -> PassPlan:
    """Decide whether to start a pass and how many sessions of `able` to include (indices into S,
    best first). `foreseen(n)`: hit probability with n outcomes per session, n at most `fan_out`."""
    first = min(stakes.seconds_to_verdict)
    best, found = _MIN_GAIN * len(able), NO_PASS
    for size in SESSION_BUCKETS:
        count = min(size, len(able))
        scored = score(count)
        for outcomes in OUTCOME_BATCH_SIZES:
            each = min(outcomes / count, fan_out)
            hits = [0.0] * len(stakes.seconds_to_verdict)
            for index in able[:count]:
                hits[index] = max(foreseen(each) - stakes.covered_probability[index], 0.0)
            worth = stakes.expected_value(hits, scored + branch(outcomes))
            if worth > best:
                best, found = worth, PassPlan(count, skips_poll=first < scored)
            if outcomes >= fan_out * count:
                break
        if count == len(able):
            break
    return found


def next_launch_outcomes(
    stakes: LaunchValue, owners: Sequence[int], gains: Sequence[float], *, branch: LaunchCost
) -> int:
    """How many of these outcomes [K], in their order, the next launch is for; 0: none that it can
    be for is worth the time. owners: indices of S."""
    hits = [0.0] * len(stakes.seconds_to_verdict)
    best, found, first = _MIN_GAIN, 0, 0
    for size in OUTCOME_BATCH_SIZES:
        for owner, gain in zip(owners[first:size], gains[first:size], strict=True):
            hits[owner] += gain
        worth = stakes.expected_value(hits, branch(size))
        if worth > best:
            best, found = worth, min(size, len(owners))
        if size >= len(owners):
            break
        first = size
    return found
