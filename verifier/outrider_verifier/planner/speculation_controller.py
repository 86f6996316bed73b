"""Speculation controller: the draft shape with the most expected tokens per second. Pure.

One controller serves one workload class. At each load (power of two of running sessions) it
compares the shapes that are available: `OFF` (plain decoding), chains, trees, and chains that are
drafted ahead of their verdicts. The rate of a shape is the mean number of tokens that a row emits
in a round, over the time from one round of a session to its next.

*Tokens* depend on the text and hardly on the load, so all loads share them. *Times* are measured in
service at each load, as ratios to the device's times from the warm-up where there are any. A shape
that has not run at a load is estimated: the device's times of both shapes and what the host adds to
the shape in force, or else the ratio of both at the nearest load where both ran.

Another shape is taken only after a *probe*: it runs for some rounds, and stays if it is faster by
`MIN_GAIN`. A probe starts at once when the estimates say that the other shape is faster and
statistical noise does not explain it, or when nothing is known about it. All other probes have one
budget: they may lose `PROBE_BUDGET` of the time served. In-process drafts cannot be resumed once a
session has decoded plainly. There, `OFF` is never probed: it is taken when the estimates are clear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.spec.decoding_mode import DecodingModeReason
from outrider_verifier.planner.statistics import RoundMean, TokenCounts

MIN_GAIN: Final = 1.03
"""Speed that another shape must reach, relative to the shape in force, to replace it."""
MIN_ROUNDS: Final = 4.0
"""Rounds of the shape in force before another one is considered."""
FIRST_ROUNDS: Final = 8.0
"""The same if nothing is known about the other shape."""
STD_ERRORS: Final = 2.0
"""Standard errors that make a difference clear: another shape is probed at once if it seems faster
by as much, and drafts that cannot be resumed are dropped."""
PROBE_BUDGET: Final = 0.01
"""Share of the time served that probes may lose."""
EARLY_PROBE_BUDGET: Final = 0.05
"""The same for probes of shapes that seem faster: a probe that failed is not repeated at once."""
TURNOVER_ROUNDS: Final = 100.0
"""Rounds of a probe of in-process drafts after plain decoding: only sessions that begin have some,
and rounds of both kinds are the slowest."""
PROBE_ROUNDS: Final = 6.0
LONG_PROBE_ROUNDS: Final = 24.0
"""Rounds of a probe, and those of one that has neither decided nor lost anything by then."""
MAX_PROBE_LOSS_ROUNDS: Final = 6.0
"""Rounds of the shape in force whose time a probe may lose before it is broken off."""
MIN_PROBE_COST_ROUNDS: Final = 0.5
"""Rounds that a probe costs the budget at least."""
HALF_LIFE_ROWS: Final = 256.0
HALF_LIFE_ROUNDS: Final = 24.0
"""Rows, and rounds, after which emitted tokens count half; whichever is more."""
TREE_TOKENS_RATIO: Final = 1.3
"""Tokens per row of a tree of 16 nodes over those of a chain of 4, where not both ran:
SmolLM2-135M with its head, 40 chat prompts, temperature 0."""
AHEAD_TOKENS_RATIO: Final = 0.95
"""The same of drafts made ahead of their verdicts, from features of a round before."""
PRIOR_ROWS: Final = 48.0
"""Rows of a shape that weigh as much as these ratios."""
MODEL_ERROR: Final = 0.1
TABLE_ERROR: Final = 0.02
"""Standard error of an estimated time or ratio, as a share of it, and of one that the device's
times of both shapes tell."""


class CandidateShape(NamedTuple):
    """How the sessions of a class draft."""

    nodes: int
    """Draft nodes of a row, without the root; 0: plain decoding."""
    is_tree: bool = False
    is_ahead: bool = False
    """Whether drafts are made ahead of their verdicts."""

    def __str__(self) -> str:
        if not self.nodes:
            return "plain"
        kind = "tree" if self.is_tree else "chain"
        return f"{kind} of {self.nodes}{', look-ahead' if self.is_ahead else ''}"

    @property
    def tokens_ratio(self) -> float:
        """Usual tokens per row over those of a chain in lock-step."""
        tree = TREE_TOKENS_RATIO if self.is_tree else 1.0
        return tree * (AHEAD_TOKENS_RATIO if self.is_ahead else 1.0)


OFF: Final = CandidateShape(0)

DeviceTimes = Mapping[CandidateShape, float]
"""Seconds that the device takes for a round of each available shape, nan where that was not
measured; the shape to begin with comes first."""


class RoundObservation(NamedTuple):
    """Rows of one class and shape in one round."""

    rows: int
    tokens: int
    squares: int
    """Sum of the squares of each row's tokens."""
    seconds: float
    """Sum over the rows of the time since the session's round before, without what prompts added
    to it."""
    sessions: int
    """Sessions of the class that decode, in this round or not."""
    is_settled: bool = True
    """False for rounds that follow a change of the shape, or that share rows with other shapes:
    they count as costs and tell nothing about the shape."""
    weight: float = 1.0
    """What the seconds count; below 1 where prompts took part."""

    @property
    def rounds(self) -> float:
        """Rounds of all sessions that these rows make."""
        return self.rows / max(1, self.sessions)


@dataclass(slots=True)
class _Probe:
    shape: CandidateShape
    rounds: float = 0.0
    missing_rounds: float = 0.0
    """Rounds of the shape in force since the probe began."""
    lost_s: float = 0.0
    """All that it has lost, the change of the shape included."""
    settled_lost_s: float = 0.0


@dataclass(slots=True)
class _LoadState:
    """What is known at one load."""

    shape: CandidateShape
    """In force, a probe aside."""
    ratios: dict[CandidateShape, RoundMean] = field(default_factory=dict)
    """Times of rounds over the device's times, or seconds where these are not known."""
    units_s: dict[CandidateShape, float] = field(default_factory=dict)
    """The device's time for the newest of these rounds; 1 where it is not known."""
    rounds: float = 0.0
    """Of the shape in force, since it is in force."""
    served_s: float = 0.0
    """Time served at this load."""
    probed_at_s: dict[CandidateShape, float] = field(default_factory=dict)
    """`served_s` when a shape was last probed, or replaced."""
    costs_s: dict[CandidateShape, float] = field(default_factory=dict)
    """What the last probe of each shape lost."""
    probe: _Probe | None = None
    is_compared: bool = False
    """Whether any other shape was compared with the one in force."""

    def served_since_probe_s(self, shape: CandidateShape) -> float:
        """Time served since a shape was last probed: its budget grows with it."""
        return self.served_s - self.probed_at_s.get(shape, 0.0)

    def ratio(self, shape: CandidateShape) -> RoundMean | None:
        """Measured times of a shape, if there are enough of them."""
        ratio = self.ratios.get(shape)
        return ratio if ratio is not None and ratio.rounds > 1.0 else None

    def seconds(self, shape: CandidateShape, device_s: DeviceTimes | None = None) -> float:
        """Seconds from one of a session's rounds to its next, as measured; nan without enough
        rounds. `device_s`: for these sessions; None: for those of the newest round."""
        ratio = self.ratio(shape)
        if ratio is None:
            return math.nan
        unit_s = self.units_s[shape] if device_s is None else _unit_s(shape, device_s)
        return unit_s * ratio.mean


class SpeculationController:
    """Chooses the draft shape of one workload class at each load."""

    def __init__(self, *, can_resume: bool = True) -> None:
        """`can_resume`: whether sessions that decoded plainly can get drafts again."""
        self._can_resume = can_resume
        self._tokens: dict[CandidateShape, TokenCounts] = {}
        self._loads: dict[int, _LoadState] = {}

    # ---- decisions -----------------------------------------------------------------------------

    def shape(self, load: int, device_s: DeviceTimes) -> CandidateShape:
        """The shape that sessions should have now; one of `device_s`."""
        state = self._state(load, device_s)
        shape = state.shape if state.probe is None else state.probe.shape
        # The runner may not have it for so many sessions.
        return shape if shape in device_s else next(iter(device_s))

    def reason(self, load: int) -> DecodingModeReason:
        """Why."""
        state = self._loads.get(load)
        if state is not None and state.probe is not None:
            return DecodingModeReason.PROBE
        if state is None or not state.is_compared:
            return DecodingModeReason.MEASURING
        return DecodingModeReason.FASTER

    def gain(self, load: int, device_s: DeviceTimes) -> float:
        """Tokens per second of the shape in force, or of the usual one where that is `OFF`, over
        those of plain decoding; nan while not known."""
        state = self._loads.get(load)
        if state is None:
            return math.nan
        shape = state.shape if state.shape.nodes else self._best_measured()
        return (
            math.nan if shape is None else math.exp(self._log_gain(load, shape, OFF, device_s)[0])
        )

    def observe_round(
        self, load: int, shape: CandidateShape, seen: RoundObservation, device_s: DeviceTimes
    ) -> None:
        """Rows of a round had drafts of `shape`. `device_s`: as of `shape`, for these rows."""
        if not (seen.rows > 0 and seen.seconds > 0.0 and shape in device_s):
            return
        state = self._state(load, device_s)
        if seen.is_settled:
            self._add(state, shape, seen, device_s)
        if state.probe is not None and shape == state.probe.shape:
            self._continue_probe(load, state, state.probe, seen, device_s)
        elif state.probe is None and shape == state.shape:
            self._consider(load, state, seen, device_s)
        elif state.probe is not None and shape == state.shape and shape.nodes:
            # Something else keeps sessions from the shape: other shapes are not to wait for it.
            state.probe.missing_rounds += seen.rounds
            if state.probe.missing_rounds > LONG_PROBE_ROUNDS:
                state.probed_at_s[state.probe.shape], state.probe = state.served_s, None

    def _consider(
        self, load: int, state: _LoadState, seen: RoundObservation, device_s: DeviceTimes
    ) -> None:
        """A round of the shape in force ended: start a probe, if one is due."""
        usual_s = state.seconds(state.shape, device_s)
        if math.isnan(usual_s):
            return
        state.served_s += seen.rounds * usual_s
        if not seen.is_settled:
            return
        state.rounds += seen.weight * seen.rounds
        if state.rounds < MIN_ROUNDS:
            return
        for shape in device_s:
            if shape == state.shape:
                continue
            log_gain, error = self._log_gain(load, shape, state.shape, device_s)
            known = not math.isnan(log_gain)
            state.is_compared = state.is_compared or known
            if shape == OFF and not self._can_resume:
                if log_gain - math.log(MIN_GAIN) > STD_ERRORS * error:
                    lost_s = state.rounds * usual_s * (1.0 - math.exp(-log_gain))
                    self._take(state, shape, max(lost_s, MIN_PROBE_COST_ROUNDS * usual_s))
                    return
                continue
            is_faster = log_gain - math.log(MIN_GAIN) > STD_ERRORS * error
            cost_s = state.costs_s.get(shape, 0.0)
            early = is_faster or (not known and state.rounds >= FIRST_ROUNDS)
            # The shapes that are probed share the budget.
            num_probed = len(device_s) - (1 if self._can_resume else 2)
            served_s = state.served_since_probe_s(shape) / max(1, num_probed)
            if early and cost_s <= EARLY_PROBE_BUDGET * served_s:
                state.probe = _Probe(shape)
                return
            slower = 0.0 if not known else max(0.0, 1.0 - math.exp(log_gain))
            after_dropped_drafts = state.shape == OFF and not self._can_resume
            rounds = TURNOVER_ROUNDS if after_dropped_drafts else PROBE_ROUNDS
            expected_s = max(MIN_PROBE_COST_ROUNDS, rounds * slower) * usual_s
            if max(cost_s, expected_s) <= PROBE_BUDGET * served_s:
                state.probe = _Probe(shape)
                return

    def _continue_probe(
        self,
        load: int,
        state: _LoadState,
        probe: _Probe,
        seen: RoundObservation,
        device_s: DeviceTimes,
    ) -> None:
        """A round of the probed shape ended: end the probe, if it has told enough."""
        if state.shape not in device_s:
            return
        usual_s = state.seconds(state.shape, device_s)
        usual_tokens, _ = self._tokens_per_row(state.shape, state.shape)
        if not (usual_s > 0.0 and usual_tokens > 0.0):
            state.probe = None
            return
        worth_s = seen.tokens / usual_tokens * usual_s
        lost_s = (min(seen.seconds, 4.0 * seen.rows * usual_s) - worth_s) / max(1, seen.sessions)
        probe.lost_s += lost_s
        if seen.is_settled:
            probe.settled_lost_s += lost_s
            if not probe.rounds:
                state.ratios[probe.shape] = RoundMean()
                self._add_time(state, probe.shape, seen, device_s)
            probe.rounds += seen.rounds
        lost_rounds = probe.settled_lost_s / usual_s
        has_lost_much = not self._can_resume and probe.lost_s > LONG_PROBE_ROUNDS * usual_s
        log_gain, error = self._log_gain(load, probe.shape, state.shape, device_s)
        is_known = probe.rounds > 1.0 and not math.isnan(log_gain)
        is_clear = is_known and abs(log_gain) > STD_ERRORS * error
        is_over = (
            lost_rounds > MAX_PROBE_LOSS_ROUNDS
            or has_lost_much
            or (is_clear and (log_gain < 0.0 or probe.rounds >= PROBE_ROUNDS))
            or (probe.rounds >= PROBE_ROUNDS and lost_rounds > 1.0)
            or probe.rounds >= LONG_PROBE_ROUNDS
        )
        if not is_over:
            return
        state.is_compared = True
        cost_s = max(probe.lost_s, MIN_PROBE_COST_ROUNDS * usual_s)
        if is_known and log_gain > math.log(MIN_GAIN):
            self._take(state, probe.shape, cost_s)
        else:
            state.probe = None
            state.costs_s[probe.shape] = cost_s
            state.probed_at_s[probe.shape] = state.served_s

    @staticmethod
    def _take(state: _LoadState, shape: CandidateShape, cost_s: float) -> None:
        """Let a shape be in force; `cost_s`: booked as the cost of the shape that it replaces."""
        state.costs_s[state.shape] = cost_s
        state.probed_at_s[state.shape] = state.served_s
        state.shape, state.probe, state.rounds = shape, None, 0.0
        state.is_compared = True

    # ---- estimates -----------------------------------------------------------------------------

    def _add(
        self,
        state: _LoadState,
        shape: CandidateShape,
        seen: RoundObservation,
        device_s: DeviceTimes,
    ) -> None:
        if shape.nodes:
            counts = self._tokens.setdefault(shape, TokenCounts())
            counts.decay(min(seen.rows / HALF_LIFE_ROWS, seen.rounds / HALF_LIFE_ROUNDS))
            counts.add(seen.rows, seen.tokens, seen.squares)
        if state.probe is None or shape != state.probe.shape or state.probe.rounds:
            self._add_time(state, shape, seen, device_s)

    @staticmethod
    def _add_time(
        state: _LoadState, shape: CandidateShape, seen: RoundObservation, device_s: DeviceTimes
    ) -> None:
        state.units_s[shape] = unit_s = _unit_s(shape, device_s)
        ratio = state.ratios.setdefault(shape, RoundMean())
        ratio.add(seen.seconds / seen.rows / unit_s, seen.weight * seen.rounds)

    def _log_gain(
        self, load: int, shape: CandidateShape, other: CandidateShape, device_s: DeviceTimes
    ) -> tuple[float, float]:
        """Logarithm of the speed of `shape` relative to `other`, and its standard error; nan while
        one of them is not known."""
        if shape not in device_s or other not in device_s:
            return math.nan, math.inf
        in_force = self._loads[load].shape
        time, time_variance = self._relative_time(load, shape, device_s)
        other_time, other_time_variance = self._relative_time(load, other, device_s)
        tokens, variance = self._tokens_per_row(shape, in_force)
        other_tokens, other_variance = self._tokens_per_row(other, in_force)
        if not min(time, other_time, tokens, other_tokens) > 0.0:
            return math.nan, math.inf
        variance += other_variance + time_variance + other_time_variance
        return math.log(tokens * other_time / (other_tokens * time)), math.sqrt(variance)

    def _tokens_per_row(
        self, shape: CandidateShape, in_force: CandidateShape
    ) -> tuple[float, float]:
        """Tokens per row of a shape on the present text, and the relative variance of that."""
        if not shape.nodes:
            return 1.0, 0.0
        counts = self._tokens.get(shape)
        base = in_force
        if not base.nodes or base not in self._tokens:
            base = self._best_measured() or shape
        if base == shape or base not in self._tokens:
            if counts is None or not counts.rows > 0.0:
                return math.nan, math.inf
            return counts.mean, counts.relative_variance
        now = self._tokens[base]
        usual = now.mean * shape.tokens_ratio / base.tokens_ratio
        usual_variance = now.relative_variance + MODEL_ERROR**2
        if counts is None or not counts.rows > 0.0:
            return usual, usual_variance
        weight = counts.rows / (counts.rows + PRIOR_ROWS)
        mean = weight * counts.mean + (1.0 - weight) * usual
        return mean, weight * counts.relative_variance + (1.0 - weight) * usual_variance

    def _relative_time(
        self, load: int, shape: CandidateShape, device_s: DeviceTimes
    ) -> tuple[float, float]:
        """Time of a round of a shape over that of the shape in force, and the relative variance of
        that; nan while it is not known."""
        state = self._loads[load]
        current = state.ratio(state.shape)
        if shape == state.shape or current is None or state.shape not in device_s:
            return (1.0, 0.0) if shape == state.shape else (math.nan, math.inf)
        current_s = state.seconds(state.shape, device_s)
        if (ratio := state.ratio(shape)) is not None:
            variance = ratio.relative_variance + current.relative_variance
            return state.seconds(shape, device_s) / current_s, variance
        if device_s[shape] > 0.0 and device_s[state.shape] > 0.0:
            # What the host adds is the same for both.
            host_s = max(0.0, current_s - device_s[state.shape])
            return (device_s[shape] + host_s) / (device_s[state.shape] + host_s), TABLE_ERROR**2
        if (near := self._ratio_elsewhere(load, shape, state.shape)) is not None:
            ratio_of_both, distance = near
            return ratio_of_both, (MODEL_ERROR * (1 + distance)) ** 2
        if shape == OFF and device_s[OFF] > 0.0:
            return min(1.0, device_s[OFF] / current_s), MODEL_ERROR**2
        if shape == OFF and self._is_bad(state.shape):
            # Verification makes no round shorter.
            return 1.0, MODEL_ERROR**2
        return math.nan, math.inf

    def _is_bad(self, shape: CandidateShape) -> bool:
        """Whether drafts of a shape are hardly ever accepted."""
        tokens, variance = self._tokens_per_row(shape, shape)
        return tokens * (1.0 + STD_ERRORS * math.sqrt(variance)) < MIN_GAIN

    def _ratio_elsewhere(
        self, load: int, shape: CandidateShape, other: CandidateShape
    ) -> tuple[float, int] | None:
        """Time of `shape` over that of `other` at the nearest load where both ran, and how many
        doublings that is away."""
        near = None
        for there, state in list(self._loads.items()):
            ratio, distance = state.seconds(shape) / state.seconds(other), abs(there - load)
            if ratio > 0.0 and (near is None or distance < near[1]):
                near = ratio, distance
        return near

    def _best_measured(self) -> CandidateShape | None:
        """The drafted shape with the most rows of late; None before any. Any thread may ask."""
        return max(list(self._tokens), key=lambda each: self._tokens[each].rows, default=None)

    def _best_by_tables(self, near: CandidateShape, device_s: DeviceTimes) -> CandidateShape | None:
        """The best shape by the device's times alone; None where they are not known. `near`: the
        shape at the nearest load. Where the change between drafts and plain decoding is final, it
        takes a clear difference."""
        base = self._best_measured()
        if base is None or not all([seconds > 0.0 for seconds in device_s.values()]):
            return None
        rates = {
            shape: self._tokens_per_row(shape, base)[0] / seconds
            for shape, seconds in device_s.items()
        }
        drafted = max([shape for shape in rates if shape.nodes], key=lambda shape: rates[shape])
        log_gain = math.log(rates[drafted] / rates[OFF])
        if self._can_resume:
            return drafted if log_gain > 0.0 else OFF
        error = math.sqrt(self._tokens_per_row(drafted, base)[1] + TABLE_ERROR**2)
        is_clear = abs(log_gain) - math.log(MIN_GAIN) > STD_ERRORS * error
        return drafted if (log_gain > 0.0 if is_clear else near.nodes) else OFF

    def _state(self, load: int, device_s: DeviceTimes) -> _LoadState:
        """The state of a load. While nothing has run there, the shape is the best one by the
        device's times, or that of the nearest load."""
        state = self._loads.get(load)
        if state is None or not (state.ratios or state.probe):
            measured = [other for other, known in self._loads.items() if known.ratios]
            near = min(measured, key=lambda other: abs(other - load), default=None)
            if near is None:
                state = _LoadState(next(iter(device_s)))
            else:
                known = self._loads[near]
                shape = self._best_by_tables(known.shape, device_s) or known.shape
                state = _LoadState(shape, is_compared=known.is_compared)
                state.costs_s.update(known.costs_s)
            self._loads[load] = state
        return state


def _unit_s(shape: CandidateShape, device_s: DeviceTimes) -> float:
    """The unit in which times of a shape are kept."""
    seconds = device_s[shape]
    return seconds if seconds > 0.0 else 1.0
