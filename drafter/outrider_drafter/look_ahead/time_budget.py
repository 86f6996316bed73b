"""LookAheadBudget: decides from measured times how much look-ahead fits before the next verdict.

`StepTimes` measures draft steps, and `VerdictArrivals` the times from a draft to its verdict, both
by class. `plan_pass_start` and `next_launch_outcomes` weigh the expected value of launches.
A look-ahead pass consists of several launches, and messages are polled after each; a draft that is
requested meanwhile waits for the end of the current launch. All times are in seconds. Letters in
shapes: S sessions that await a verdict; K outcomes.
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
"""Numbers of sessions for which one launch can draft or score. A launch for fewer sessions is
padded to the next size."""
_STEPS: Final = 9
"""Number of most recent durations of a step that are kept. The median of so few ignores a single
stall and follows changes."""
_VERDICTS: Final = 32
_BLIND: Final = 64
"""Number of consecutive verdicts with unknown exact arrival times after which the thread waits for
a verdict to measure its time."""
_SHARP: Final = 0.05
"""Maximum width of the bounds of an arrival time, as a share of the time, for which the time counts
as measured."""
_EARLY: Final = 0.25
"""Quantile of the arrival times that is used as the expected time: this share of verdicts comes
earlier."""
_SMALLER: Final = 0.8
"""Assumed cost of a launch relative to the next larger launch, until its cost is measured."""


StepKind = Literal["draft", "score", "branch"]
_PASS: Final[tuple[StepKind, ...]] = ("score", "branch")


class DraftStep(NamedTuple):
    """Class of draft steps whose durations are measured together. The number of sessions in a step
    is not part of it."""

    method: DraftMethod
    kind: StepKind
    nodes: int
    """Maximum number of nodes of a draft in the step."""


class StepTimes:
    """Recent durations of draft steps, by step and launch size."""

    def __init__(self) -> None:
        self._seen: dict[DraftStep, dict[int, deque[float]]] = defaultdict(dict)

    def observe_step(self, step: DraftStep, count: int, seconds: float) -> None:
        """Record the duration in seconds of a step for `count` sessions or outcomes."""
        sizes = self._seen[step]
        size = _size(step, count)
        if size not in sizes:
            sizes[size] = deque(maxlen=_STEPS)
        sizes[size].append(seconds)

    def reset_pass_times(self, step: DraftStep) -> None:
        """Discard the measured durations of scoring and of outcome drafting with the method and the
        number of nodes of `step`, because conditions may have changed."""
        for kind in _PASS:
            self._seen.pop(step._replace(kind=kind), None)

    def expected_s(self, step: DraftStep, count: int) -> float:
        """Return the expected duration in seconds of a step for `count` sessions or outcomes.

        If no step of the launch size was measured, the duration of the next smaller measured size
        is used. If there is none, it is a little less than that of the next larger measured size.
        If no size of a scoring or outcome step was measured, the duration of a draft is returned,
        or 0.0 if that is also unknown.
        """
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
    """Category of waits for verdicts. Durations are measured separately for each connection and for
    each kind of event that starts a wait."""

    connection: int
    follows_hit: bool
    """Whether the wait started at the arrival of a verdict that was a hit, when the next round had
    already begun. Otherwise the wait started when a draft was sent."""


@dataclass(slots=True)
class _Waits:
    """Measurements of one class of waits."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_VERDICTS))
    blind: int = 0
    """Number of consecutive verdicts for whose arrival times only bounds were known."""


class VerdictArrivals:
    """Estimates the time from a draft or a hit to the next verdict. The estimate is a low quantile
    of the measured times.

    If a message arrived while the thread was working, only bounds of its arrival time are known.
    The time within the bounds that is nearest to the expected time is then recorded. (With the time
    of detection, every pass would seem to end in time.) As long as the thread never waits for a
    verdict, the estimate can drift, so the thread must wait occasionally (`is_blind`).
    """

    def __init__(self) -> None:
        self._waits: dict[VerdictWait, _Waits] = {}

    def observe_arrival(self, wait: VerdictWait, least: float, most: float) -> None:
        """Record that a verdict arrived between `least` and `most` seconds after the start of its
        wait."""
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
        """Return an early estimate of the time in seconds from the start of the wait to the
        verdict: a quarter of the measured verdicts came sooner. Return infinity if no such wait was
        measured."""
        waits = self._waits.get(wait) or self._waits.get(wait._replace(follows_hit=False))
        return _early(waits.seen) if waits is not None else math.inf

    def exchange_latency_s(self, connection: int) -> float:
        """Return the time in seconds that the exchange of messages with the verifier takes, or 0.0
        if it is unknown. A draft that is made before its verdict saves this time in addition to the
        drafting time."""
        sent = self._waits.get(VerdictWait(connection, follows_hit=False))
        hit = self._waits.get(VerdictWait(connection, follows_hit=True))
        return max(_early(sent.seen) - _early(hit.seen), 0.0) if sent and hit else 0.0

    def is_blind(self, wait: VerdictWait, sessions: int) -> bool:
        """Return whether only bounds were known for the arrival times of so many verdicts in
        succession that the thread should wait for the next verdict, to measure its time.
        `sessions`: number of sessions with look-ahead."""
        waits = self._waits.get(wait)
        return waits is not None and waits.blind >= _BLIND * sessions

    def forget_connection(self, connection: int) -> None:
        """Discard the measurements of a connection that has ended."""
        for after_hit in (False, True):
            self._waits.pop(VerdictWait(connection, after_hit), None)


def _early(seen: deque[float]) -> float:
    return sorted(seen)[int(_EARLY * len(seen))]


DEFAULT_MAX_FAN_OUT: Final = 16
"""Maximum number of outcomes of a proposal for which drafts are made if the session's plan sets no
fan-out. Drafts for more outcomes would raise the hit rate, but they would come too late (decision
20)."""
_MAX_OTHERS: Final = 64
"""Maximum number of sessions outside a pass whose waits are taken into account."""
_ANYWAY: Final = 128
"""Number of skipped passes after which one pass is run as a trial, because conditions may have
changed."""
_HOPED: Final = 0.8
"""Assumed probability of a hit before any was measured."""
_FAN_OUTS: Final = (1, 2, 4, 8, 16, 32)
_SLOWNESS: Final = 16


class LookAheadBudget:
    """Measures durations of draft steps and arrival times of verdicts, and decides which look-ahead
    passes are run and how long they may take. Use it from one thread.

    Without calls of `record_poll` the arrival times of verdicts are unknown, and no pass is
    shortened.
    """

    def __init__(self, now: Callable[[], float], *, in_time: bool) -> None:
        """Create a budget without measurements. `now`: returns the time in seconds. `in_time`:
        whether passes are limited to the time until the next verdict."""
        self._now, self._in_time = now, in_time
        self.steps = StepTimes()
        self._arrivals = VerdictArrivals()
        self._looked_at: float | None = None
        """Time of the last poll for messages; None before the first."""
        self._heard = (0.0, 0.0)
        """Bounds of the arrival time of the messages that the last poll found."""
        self._foreseen: dict[DraftStep, Floats] = {}
        """Mean probability that the verdict is among the best n outcomes of a proposal, for each n
        in `_FAN_OUTS`."""
        self._passed_over: dict[DraftStep, int] = defaultdict(int)
        self._is_trial = False
        """Whether the current pass is run as a trial, although its expected value was too low."""

    def record_poll(self, *, waited: bool) -> None:
        """Record that messages were polled for just now. `waited`: whether the poll waited for a
        message."""
        now = self._now()
        before = self._looked_at
        self._heard = (now if waited or before is None else before, now)
        self._looked_at = now

    def forget_connection(self, connection: int) -> None:
        """Discard the measurements of a connection that has ended."""
        self._arrivals.forget_connection(connection)

    def record_verdict(self, one: LookAheadSession) -> None:
        """Record that the verdict on a session's live proposal came with the last poll."""
        if self._looked_at is not None:
            least, most = self._heard
            least, most = max(least - one.sent_at, 0.0), max(most - one.sent_at, 0.0)
            self._arrivals.observe_arrival(_wait(one), least, most)

    def record_scores(
        self, step: DraftStep, ones: Sequence[LookAheadSession], found: SelectedOutcomes
    ) -> None:
        """Record the probabilities of `found`, the outcomes selected for the proposals of the
        sessions `ones`. They predict the hit probability of later passes of the same step."""
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
        """Decide whether a look-ahead pass is run, how it starts, and which of the sessions `ones`
        it includes.

        step: scoring step of the pass. watched: all sessions with look-ahead. straight: whether the
        last pass scored proposals and then drafted nothing; this pass then does not poll for
        messages before its first drafts. Returns the plan, and the sessions of the pass in the
        order in which their proposals are scored.
        """
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
        """Sort outcomes by the time that a draft for each is expected to save, best first.

        `found` lists the outcomes by probability, the likeliest first.
        """
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
        """Return how many outcomes the next launch drafts for, starting with the first of `left`,
        the remaining outcomes of the pass. 0 ends the pass. step, watched: as in
        `plan_look_ahead_pass`. ones: the sessions of the pass."""
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
        """Return sessions outside `ones` that await a verdict, at most `_MAX_OTHERS`."""
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
        """Return the probability that the verdict is among the best `outcomes` outcomes of a
        session."""
        known = self._foreseen.get(step)
        return _HOPED if known is None else float(np.interp(outcomes, _FAN_OUTS, known))


def _wait(one: LookAheadSession) -> VerdictWait:
    return VerdictWait(one.session.key.connection, one.is_hit)


LaunchCost = Callable[[int], float]
"""Function that returns the duration of a launch in seconds for a number of sessions or
outcomes."""
_MIN_GAIN: Final = 1e-7
"""Minimum expected gain of a launch in seconds for each session; smaller gains are rounding
errors."""


class LaunchValue(NamedTuple):
    """Computes how many seconds a look-ahead launch is expected to save, from these fields. Arrays
    have one element for each of S sessions that await a verdict."""

    seconds_to_verdict: Sequence[float]
    """[S]: expected seconds until the verdict; negative if the verdict is overdue."""
    covered_probability: Sequence[float]
    """[S]: probability that the next verdict is an outcome for which a draft was already made."""
    draft_s: float
    """Duration in seconds of a draft that is made after a verdict."""
    exchange_s: float
    """Time in seconds that a draft made before its verdict saves in the exchange of messages."""

    def expected_value(self, hits: Sequence[float], ends: float) -> float:
        """Return the expected time in seconds that a launch saves. `hits` [S]: probability that the
        verdict is one of the launch's outcomes. `ends`: time in seconds until the launch ends. The
        value is the time by which drafts for these outcomes arrive sooner, minus the time by which
        the launch delays the drafts that verdicts without a prepared draft need."""
        gained, saved = 0.0, self.seconds_saved(ends)
        for due, covered, hit, saves in zip(
            self.seconds_to_verdict, self.covered_probability, hits, saved, strict=True
        ):
            gained += hit * saves
            if ends > due:
                gained -= max(1.0 - covered - hit, 0.0) * (ends - due)
        return gained

    def seconds_saved(self, ends: float) -> list[float]:
        """Return for each session [S] how many seconds a look-ahead draft that is ready in `ends`
        seconds arrives before a draft that is made after the verdict would arrive."""
        most = self.draft_s + self.exchange_s
        return [min(max(due + self.draft_s - ends, 0.0), most) for due in self.seconds_to_verdict]


class PassPlan(NamedTuple):
    """Decision whether and how a look-ahead pass starts."""

    num_proposals: int
    """Number of proposals to score, beginning with the first; 0 if no pass is run."""
    skips_poll: bool
    """Whether the first drafts are made without a poll for messages, because a verdict is expected
    before the scores are ready."""


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
    """Decide whether to start a look-ahead pass and how many sessions it includes.

    `able`: indices, in the arrays of `stakes`, of the sessions that can be included, best first.
    `score`, `branch`: durations of launches that score proposals and of launches that draft for
    outcomes. `foreseen(n)`: probability of a hit if each session has drafts for n outcomes, where n
    is at most `fan_out`.
    """
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
    """Return how many of K outcomes the next launch should draft for, starting with the first; 0 if
    no launch is worth its time. `owners` [K]: index of each outcome's session in the arrays of
    `stakes`; `gains` [K]: probability of each outcome; `branch`: duration of the launch."""
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
