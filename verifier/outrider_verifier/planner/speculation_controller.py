"""Speculation controller: chooses the draft shape with the most expected tokens per second. Pure.

One controller serves one workload class. At each load (power of two of running sessions) the
controller compares the available shapes: `OFF` (plain decoding), chains, trees, and chains that are
drafted ahead of their verdicts. The rate of a shape is the mean number of tokens that a row emits
in a round, divided by the time from one round of a session to the session's next round.

The number of *tokens* depends on the text and hardly on the load, so all loads share it. *Times*
are measured in service at each load. They are stored as ratios to the device's times from the
warm-up, if the warm-up measured these. The time of a shape that has not run at a load is estimated.
The estimate uses the device's times of both shapes plus the host's share of the time of the shape
in force; without device times, it uses the ratio of both shapes at the nearest load where both ran.

Another shape replaces the shape in force only after a *probe*: the other shape runs for some
rounds, and stays if it is faster by `MIN_GAIN`. A probe starts at once if the other shape is
estimated to be faster by more than statistical noise, or if nothing is known about the other shape.
All other probes share one budget: they may lose `PROBE_BUDGET` of the time served. In-process
drafts cannot be resumed once a session has decoded plainly. For these drafts `OFF` is never probed:
it is taken when the estimates are clear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.spec.decoding_mode import DecodingModeReason
from outrider_verifier.planner.statistics import RoundMean, TokenCounts

MIN_GAIN: Final = 1.03
"""Minimum speed of another shape, relative to the shape in force, to replace the shape in force."""
MIN_ROUNDS: Final = 4.0
"""Number of rounds of the shape in force before other shapes are considered."""
FIRST_ROUNDS: Final = 8.0
"""Number of rounds of the shape in force before a shape is probed about which nothing is known."""
STD_ERRORS: Final = 2.0
"""Number of standard errors by which a difference is clear. A shape that is faster by a clear
difference is probed at once, and drafts that cannot be resumed are dropped only for a clear
difference."""
PROBE_BUDGET: Final = 0.01
"""Maximum share of the time served that probes may lose."""
EARLY_PROBE_BUDGET: Final = 0.05
"""Maximum share of the time served that probes may lose if the probed shape seems faster or nothing
is known about it. It keeps a probe that failed from being repeated at once."""
TURNOVER_ROUNDS: Final = 100.0
"""Expected number of rounds of a probe of in-process drafts after plain decoding. It is large
because only new sessions have drafts then, and rounds that mix both kinds of sessions are the
slowest."""
PROBE_ROUNDS: Final = 6.0
"""Usual number of rounds of a probe."""
LONG_PROBE_ROUNDS: Final = 24.0
"""Number of rounds after which a probe ends even if no difference is clear."""
MAX_PROBE_LOSS_ROUNDS: Final = 6.0
"""Maximum loss of a probe, in rounds of the shape in force; a probe that loses more is ended."""
MIN_PROBE_COST_ROUNDS: Final = 0.5
"""Minimum cost of a probe that is charged to the budget, in rounds of the shape in force."""
HALF_LIFE_ROWS: Final = 256.0
"""Number of rows after which the weight of older token counts is halved, if that takes longer than
`HALF_LIFE_ROUNDS`."""
HALF_LIFE_ROUNDS: Final = 24.0
"""Number of rounds after which the weight of older token counts is halved, if that takes longer
than `HALF_LIFE_ROWS`."""
TREE_TOKENS_RATIO: Final = 1.3
"""Assumed tokens per row of a tree, relative to a chain, while not both have run. Measured with
trees of 16 nodes and chains of 4 (SmolLM2-135M with its draft head, 40 chat prompts, temperature
0)."""
AHEAD_TOKENS_RATIO: Final = 0.95
"""Assumed tokens per row of drafts that are made ahead of their verdicts, relative to drafts in
lock-step. These drafts use features that are one round older."""
PRIOR_ROWS: Final = 48.0
"""Number of measured rows of a shape that weigh as much as the assumed ratios."""
MODEL_ERROR: Final = 0.1
"""Standard error of an estimated time or ratio, as a share of it."""
TABLE_ERROR: Final = 0.02
"""Standard error of an estimate from the device's times of both shapes, as a share of it."""


class CandidateShape(NamedTuple):
    """The shape of the drafts of a session, or plain decoding."""

    nodes: int
    """Number of draft nodes of a row, without the root; 0 is plain decoding."""
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
        """Assumed tokens per row, relative to a chain in lock-step."""
        tree = TREE_TOKENS_RATIO if self.is_tree else 1.0
        return tree * (AHEAD_TOKENS_RATIO if self.is_ahead else 1.0)


OFF: Final = CandidateShape(0)

DeviceTimes = Mapping[CandidateShape, float]
"""The device's time for a round of each available shape, in seconds; nan if it was not measured.
The shape to start with comes first."""


class RoundObservation(NamedTuple):
    """Sums over the rows of one workload class and one draft shape in one round."""

    rows: int
    tokens: int
    squares: int
    """Sum over the rows of the squared number of tokens."""
    seconds: float
    """Sum over the rows of the time since the session's previous round, without the time that
    prompts added."""
    sessions: int
    """Number of decoding sessions of the class, including those without a row in this round."""
    is_settled: bool = True
    """Whether the times are typical of the shape. False for rounds right after a change of the
    shape, and for rows that share their round with rows of other shapes; these count only as a
    cost."""
    weight: float = 1.0
    """Weight of the measured time; less than 1 if the round contained prompts."""

    @property
    def rounds(self) -> float:
        """Number of rows divided by the number of sessions."""
        return self.rows / max(1, self.sessions)


@dataclass(slots=True)
class _Probe:
    shape: CandidateShape
    rounds: float = 0.0
    missing_rounds: float = 0.0
    """Number of rounds of the shape in force since the probe began."""
    lost_s: float = 0.0
    """Time that the probe has lost, in seconds, including the change of the shape."""
    settled_lost_s: float = 0.0
    """Time that the settled rounds of the probe have lost, in seconds."""


@dataclass(slots=True)
class _LoadState:
    """Measurements and decisions at one load."""

    shape: CandidateShape
    """The shape in force; a running probe does not change it."""
    ratios: dict[CandidateShape, RoundMean] = field(default_factory=dict)
    """Measured times of rounds by shape, divided by `units_s`."""
    units_s: dict[CandidateShape, float] = field(default_factory=dict)
    """The device's time for the newest round of each shape, in seconds; 1 if it is not known."""
    rounds: float = 0.0
    """Number of rounds of the shape in force since it was chosen."""
    served_s: float = 0.0
    """Time served at this load, in seconds."""
    probed_at_s: dict[CandidateShape, float] = field(default_factory=dict)
    """Value of `served_s` when a shape was last probed or replaced."""
    costs_s: dict[CandidateShape, float] = field(default_factory=dict)
    """Time that the last probe of each shape lost, in seconds."""
    probe: _Probe | None = None
    is_compared: bool = False
    """Whether another shape was compared with the shape in force."""

    def served_since_probe_s(self, shape: CandidateShape) -> float:
        """Return the time served since a shape was last probed, in seconds. The shape's probe
        budget grows with this time."""
        return self.served_s - self.probed_at_s.get(shape, 0.0)

    def ratio(self, shape: CandidateShape) -> RoundMean | None:
        """Return the measured times of a shape, or None if there are too few."""
        ratio = self.ratios.get(shape)
        return ratio if ratio is not None and ratio.rounds > 1.0 else None

    def seconds(self, shape: CandidateShape, device_s: DeviceTimes | None = None) -> float:
        """Return the measured time from one round of a session to the session's next round, in
        seconds; nan if too few rounds were measured. `device_s` holds the device's times for these
        sessions; None uses those of the newest round."""
        ratio = self.ratio(shape)
        if ratio is None:
            return math.nan
        unit_s = self.units_s[shape] if device_s is None else _unit_s(shape, device_s)
        return unit_s * ratio.mean


class SpeculationController:
    """Chooses the draft shape of one workload class at each load."""

    def __init__(self, *, can_resume: bool = True) -> None:
        """Create a controller without measurements. `can_resume` is whether sessions can get drafts
        again after they decoded plainly."""
        self._can_resume = can_resume
        self._tokens: dict[CandidateShape, TokenCounts] = {}
        self._loads: dict[int, _LoadState] = {}

    # ---- decisions -----------------------------------------------------------------------------

    def shape(self, load: int, device_s: DeviceTimes) -> CandidateShape:
        """Return the shape that sessions should have now; it is one of `device_s`."""
        state = self._state(load, device_s)
        shape = state.shape if state.probe is None else state.probe.shape
        # The runner may not support the shape for the present number of sessions.
        return shape if shape in device_s else next(iter(device_s))

    def reason(self, load: int) -> DecodingModeReason:
        """Return why the present shape is in use."""
        state = self._loads.get(load)
        if state is not None and state.probe is not None:
            return DecodingModeReason.PROBE
        if state is None or not state.is_compared:
            return DecodingModeReason.MEASURING
        return DecodingModeReason.FASTER

    def gain(self, load: int, device_s: DeviceTimes) -> float:
        """Return the tokens per second of the shape in force, divided by those of plain decoding;
        nan if unknown. If the shape in force is `OFF`, the shape with the most measured rows is
        used instead."""
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
        """Record the rows of a round that had drafts of `shape`. `device_s` holds the device's
        times for these rows."""
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
            # Another cause keeps the sessions from the probed shape. End the probe, so that other
            # shapes need not wait for it.
            state.probe.missing_rounds += seen.rounds
            if state.probe.missing_rounds > LONG_PROBE_ROUNDS:
                state.probed_at_s[state.probe.shape], state.probe = state.served_s, None

    def _consider(
        self, load: int, state: _LoadState, seen: RoundObservation, device_s: DeviceTimes
    ) -> None:
        """Record a round of the shape in force, and start a probe if one is due."""
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
        """Record a round of the probed shape, and end the probe if its result is clear."""
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
        """Put a shape in force. `cost_s`, in seconds, is recorded as the probe cost of the shape
        that it replaces."""
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
        """Return the logarithm of the speed of `shape` relative to `other`, and its standard error;
        (nan, infinity) if the speed of one of them is not known."""
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
        """Return the tokens per row of a shape on the present text, and the relative variance of
        this number."""
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
        """Return the time of a round of `shape` divided by that of the shape in force, and the
        relative variance of this ratio; (nan, infinity) if the ratio is not known."""
        state = self._loads[load]
        current = state.ratio(state.shape)
        if shape == state.shape or current is None or state.shape not in device_s:
            return (1.0, 0.0) if shape == state.shape else (math.nan, math.inf)
        current_s = state.seconds(state.shape, device_s)
        if (ratio := state.ratio(shape)) is not None:
            variance = ratio.relative_variance + current.relative_variance
            return state.seconds(shape, device_s) / current_s, variance
        if device_s[shape] > 0.0 and device_s[state.shape] > 0.0:
            # The host adds the same time to both shapes.
            host_s = max(0.0, current_s - device_s[state.shape])
            return (device_s[shape] + host_s) / (device_s[state.shape] + host_s), TABLE_ERROR**2
        if (near := self._ratio_elsewhere(load, shape, state.shape)) is not None:
            ratio_of_both, distance = near
            return ratio_of_both, (MODEL_ERROR * (1 + distance)) ** 2
        if shape == OFF and device_s[OFF] > 0.0:
            return min(1.0, device_s[OFF] / current_s), MODEL_ERROR**2
        if shape == OFF and self._is_bad(state.shape):
            # Verification never shortens a round, so a plain round is at most as long.
            return 1.0, MODEL_ERROR**2
        return math.nan, math.inf

    def _is_bad(self, shape: CandidateShape) -> bool:
        """Return whether drafts of a shape are hardly ever accepted."""
        tokens, variance = self._tokens_per_row(shape, shape)
        return tokens * (1.0 + STD_ERRORS * math.sqrt(variance)) < MIN_GAIN

    def _ratio_elsewhere(
        self, load: int, shape: CandidateShape, other: CandidateShape
    ) -> tuple[float, int] | None:
        """Return the time of `shape` divided by that of `other` at the nearest load where both ran,
        and the distance to this load in doublings; None if both never ran at one load."""
        near = None
        for there, state in list(self._loads.items()):
            ratio, distance = state.seconds(shape) / state.seconds(other), abs(there - load)
            if ratio > 0.0 and (near is None or distance < near[1]):
                near = ratio, distance
        return near

    def _best_measured(self) -> CandidateShape | None:
        """Return the drafted shape with the most recent rows; None if there is none.
        Thread-safe."""
        return max(list(self._tokens), key=lambda each: self._tokens[each].rows, default=None)

    def _best_by_tables(self, near: CandidateShape, device_s: DeviceTimes) -> CandidateShape | None:
        """Return the best shape according to the device's times alone; None if these are not known.
        `near` is the shape in force at the nearest load. If plain decoding cannot be left again,
        only a clear difference changes between drafts and plain decoding."""
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
        """Return the state of a load. If nothing has run at this load, its shape is the best one by
        the device's times, or else that of the nearest load."""
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
    """Return the unit in which times of a shape are stored, in seconds."""
    seconds = device_s[shape]
    return seconds if seconds > 0.0 else 1.0
