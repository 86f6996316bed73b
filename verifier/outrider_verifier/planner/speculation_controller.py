"""Speculation controller: chooses the draft shape with the most expected tokens per second. Pure.

One controller serves one workload class. At each load (power of two of running sessions) the
controller compares the available shapes: `OFF` (plain decoding), chains, trees, and chains or trees
that are drafted before the verdict (look-ahead). The speed of a shape is the mean number of tokens
that a row emits in a round, divided by the time between two rounds of a session.

The number of *tokens* depends on the text and hardly on the load, so all loads share it. *Times*
are measured in service at each load. They are stored as ratios to the device times that warm-up
measured, if there are any. The time of a shape that has not run at a load is estimated. The
estimate is the device time of the shape plus the host's share of the time of the shape in use.
Without device times, the estimate is the ratio of both shapes at the nearest load where both ran.

Another shape replaces the shape in use only after a *probe*: the other shape runs for some rounds,
and stays if it is faster by `MIN_GAIN`. A probe starts immediately if the other shape is estimated
to be faster by more than statistical noise, or if nothing is known about the other shape. All other
probes share one budget: the time that they lose may be at most the share `PROBE_BUDGET` of the time
served. In-process drafts cannot be resumed once a session has decoded plainly. For these drafts
`OFF` is never probed: it is chosen when the estimates show a clear difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from outrider.spec.decoding_mode import DecodingModeReason
from outrider.spec.speculation_summary import SpeculationChoice
from outrider_verifier.planner.statistics import RoundMean, TokenCounts

MIN_GAIN: Final = 1.03
"""Minimum speed of another shape, relative to the shape in use, to replace it."""
MIN_ROUNDS: Final = 4.0
"""Minimum number of rounds of the shape in use before other shapes are considered."""
FIRST_ROUNDS: Final = 8.0
"""Minimum number of rounds of the shape in use before a shape is probed about which nothing is
known."""
STD_ERRORS: Final = 2.0
"""Number of standard errors from which a difference counts as clear. A shape that is clearly faster
is probed immediately. Drafts that cannot be resumed are dropped only if plain decoding is clearly
faster."""
PROBE_BUDGET: Final = 0.01
"""Maximum share of the time served that probes may lose."""
EARLY_PROBE_BUDGET: Final = 0.05
"""Maximum share of the time served that probes may lose if the probed shape seems faster or nothing
is known about it. The limit keeps a failed probe from being repeated immediately."""
TURNOVER_ROUNDS: Final = 100.0
"""Expected number of rounds of a probe that tries in-process drafts after plain decoding. It is
large because only new sessions can have drafts then, and rounds that contain both kinds of sessions
are the slowest."""
PROBE_ROUNDS: Final = 6.0
"""Expected number of rounds of a probe."""
LONG_PROBE_ROUNDS: Final = 24.0
"""Number of rounds after which a probe ends even if no difference is clear."""
MAX_PROBE_LOSS_ROUNDS: Final = 6.0
"""Maximum loss of a probe, as a number of rounds of the shape in use. A probe that loses more
ends."""
MIN_PROBE_COST_ROUNDS: Final = 0.5
"""Minimum cost that is charged to the budget for a probe, as a number of rounds of the shape in
use."""
HALF_LIFE_ROWS: Final = 256.0
"""Number of rows after which the weight of older token counts is halved. It applies if it takes
longer than `HALF_LIFE_ROUNDS`."""
HALF_LIFE_ROUNDS: Final = 24.0
"""Number of rounds after which the weight of older token counts is halved. It applies if it takes
longer than `HALF_LIFE_ROWS`."""
TREE_TOKENS_RATIO: Final = 1.3
"""Assumed tokens per row of a tree, relative to a chain, until both were measured. The value was
measured with trees of 16 nodes and chains of 4 (SmolLM2-135M with its draft head, 40 chat prompts,
temperature 0)."""
AHEAD_TOKENS_RATIO: Final = 0.95
"""Assumed tokens per row of drafts made by look-ahead, relative to drafts in lock-step. Look-ahead
drafts are worse because their features are one round older."""
PRIOR_ROWS: Final = 48.0
"""Number of measured rows of a shape at which the measured tokens per row have the same weight as
the assumed ones."""
MODEL_ERROR: Final = 0.1
"""Relative standard error of an estimated time or ratio."""
TABLE_ERROR: Final = 0.02
"""Relative standard error of a time that was estimated from the device times of both shapes."""


class CandidateShape(NamedTuple):
    """A shape that a session's drafts may have, including plain decoding."""

    nodes: int
    """Number of draft nodes of a row, without the root; 0 stands for plain decoding."""
    is_tree: bool = False
    is_ahead: bool = False
    """Whether look-ahead makes the drafts, before the verdict is known."""

    def as_choice(
        self, sessions: str, reason: DecodingModeReason, gain: float
    ) -> SpeculationChoice:
        """Return the report that `sessions` have this shape for a reason, with its gain."""
        return SpeculationChoice(
            sessions=sessions,
            draft_tokens=self.nodes,
            is_tree=self.is_tree,
            is_look_ahead=self.is_ahead,
            reason=reason,
            gain=gain,
        )

    @property
    def tokens_ratio(self) -> float:
        """Assumed tokens per row, relative to those of a chain in lock-step."""
        tree = TREE_TOKENS_RATIO if self.is_tree else 1.0
        return tree * (AHEAD_TOKENS_RATIO if self.is_ahead else 1.0)


OFF: Final = CandidateShape(0)

DeviceTimes = Mapping[CandidateShape, float]
"""Device time, in seconds, of a round with each available shape; nan if it was not measured. The
first key is the shape to start with."""


class RoundObservation(NamedTuple):
    """Sums over the rows of one round that have the same workload class and draft shape."""

    rows: int
    tokens: int
    squares: int
    """Sum of the squared token counts of the rows."""
    seconds: float
    """Sum of the times between each row's round and the previous round of its session, in seconds.
    The time that prompts added is excluded."""
    sessions: int
    """Number of decoding sessions of the class. Sessions without a row in this round are
    included."""
    is_settled: bool = True
    """Whether the times are typical of the shape. They are not right after a change of the shape,
    or if the round also contains rows of other shapes. Such rounds count only as a cost."""
    weight: float = 1.0
    """Weight of the measured times; less than 1 if the round contained prompts, because their share
    of the time is estimated."""

    @property
    def rounds(self) -> float:
        """Number of rows divided by the number of sessions: the share of a full round."""
        return self.rows / max(1, self.sessions)


@dataclass(slots=True)
class _Probe:
    shape: CandidateShape
    rounds: float = 0.0
    missing_rounds: float = 0.0
    """Number of rounds since the probe began that ran the shape in use instead of the probed
    shape."""
    lost_s: float = 0.0
    """Time that the probe has lost, in seconds; rounds during the change of the shape are
    included."""
    settled_lost_s: float = 0.0
    """Time that the probe has lost in rounds with `is_settled`, in seconds."""


@dataclass(slots=True)
class _LoadState:
    """Measurements and decisions at one load."""

    shape: CandidateShape
    """Shape in use. During a probe it is the shape before the probe."""
    ratios: dict[CandidateShape, RoundMean] = field(default_factory=dict)
    """Measured times of each shape, divided by its entry of `units_s`."""
    units_s: dict[CandidateShape, float] = field(default_factory=dict)
    """Device time of the newest round of each shape, in seconds; 1 if it is unknown."""
    rounds: float = 0.0
    """Number of rounds of the shape in use since it was chosen."""
    served_s: float = 0.0
    """Time served at this load, in seconds."""
    probed_at_s: dict[CandidateShape, float] = field(default_factory=dict)
    """Value of `served_s` when each shape was last probed or replaced."""
    costs_s: dict[CandidateShape, float] = field(default_factory=dict)
    """Time that the last probe of each shape lost, in seconds."""
    probe: _Probe | None = None
    is_compared: bool = False
    """Whether the shape in use was compared with another shape."""

    def served_since_probe_s(self, shape: CandidateShape) -> float:
        """Return the time served since the last probe of a shape, in seconds. The budget for the
        next probe of the shape grows with this time."""
        return self.served_s - self.probed_at_s.get(shape, 0.0)

    def ratio(self, shape: CandidateShape) -> RoundMean | None:
        """Return the measured time ratios of a shape; None if there are too few measurements."""
        ratio = self.ratios.get(shape)
        return ratio if ratio is not None and ratio.rounds > 1.0 else None

    def seconds(self, shape: CandidateShape, device_s: DeviceTimes | None = None) -> float:
        """Return the measured time between two rounds of a session, in seconds; nan if too few
        rounds were measured. `device_s` holds the device times for the present number of sessions;
        None uses the device time of the newest round."""
        ratio = self.ratio(shape)
        if ratio is None:
            return math.nan
        unit_s = self.units_s[shape] if device_s is None else _unit_s(shape, device_s)
        return unit_s * ratio.mean


class SpeculationController:
    """Chooses the draft shape of one workload class for each load."""

    def __init__(self, *, can_resume: bool = True) -> None:
        """Create a controller without measurements. `can_resume` is whether a session can have
        drafts again after it has decoded plainly."""
        self._can_resume = can_resume
        self._tokens: dict[CandidateShape, TokenCounts] = {}
        self._loads: dict[int, _LoadState] = {}

    # ---- decisions -----------------------------------------------------------------------------

    def shape(self, load: int, device_s: DeviceTimes) -> CandidateShape:
        """Return the shape that sessions should use now; it is one of the keys of `device_s`."""
        state = self._state(load, device_s)
        shape = state.shape if state.probe is None else state.probe.shape
        # The runner may not support the shape for the present number of sessions.
        return shape if shape in device_s else next(iter(device_s))

    def reason(self, load: int) -> DecodingModeReason:
        """Return the reason for the shape that `shape` returns."""
        state = self._loads.get(load)
        if state is not None and state.probe is not None:
            return DecodingModeReason.PROBE
        if state is None or not state.is_compared:
            return DecodingModeReason.MEASURING
        return DecodingModeReason.FASTER

    def gain(self, load: int, device_s: DeviceTimes) -> float:
        """Return the tokens per second of the shape in use, divided by those of plain decoding; nan
        if unknown. If the shape in use is plain decoding, the gain of the most measured drafted
        shape is returned instead."""
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
        """Record the rows of a round that had drafts of `shape`. `device_s` holds the device times
        for the number of sessions in this round."""
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
        """Record a round of the shape in use, and start a probe if one is due."""
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
        """Record a round of the probed shape. If the result is clear or the probe lasts too long,
        end it."""
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
        """Replace the shape in use by `shape`. `cost_s`, in seconds, is recorded as the probe cost
        of the old shape."""
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
        """Return the logarithm of the speed of `shape` relative to `other`, and the standard error
        of this logarithm; (nan, infinity) if either speed is unknown."""
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
        """Return the expected tokens per row of a shape on the present text, and the relative
        variance of this number."""
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
        """Return the time of a round of `shape` divided by that of the shape in use, and the
        relative variance of this ratio; (nan, infinity) if the ratio is unknown."""
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
        and the distance to that load as a difference of base-2 logarithms; None if no load has
        both."""
        near = None
        for there, state in list(self._loads.items()):
            ratio, distance = state.seconds(shape) / state.seconds(other), abs(there - load)
            if ratio > 0.0 and (near is None or distance < near[1]):
                near = ratio, distance
        return near

    def _best_measured(self) -> CandidateShape | None:
        """Return the drafted shape whose rows have the largest weight (older rows weigh less); None
        if no drafts were measured. Thread-safe."""
        return max(list(self._tokens), key=lambda each: self._tokens[each].rows, default=None)

    def _best_by_tables(self, near: CandidateShape, device_s: DeviceTimes) -> CandidateShape | None:
        """Return the fastest shape according to the device times and the token counts; None if any
        of them is unknown. `near` is the shape in use at the nearest load. If sessions cannot
        resume drafts, drafts and plain decoding replace each other only if the difference is
        clear."""
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
        """Return the state of a load. If nothing has run at this load, it starts with the fastest
        shape according to the device times, or else with the shape in use at the nearest load."""
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
    """Return the unit, in seconds, in which the times of a shape are stored."""
    seconds = device_s[shape]
    return seconds if seconds > 0.0 else 1.0
