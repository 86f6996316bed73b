"""Measurement of a cell in consecutive waves, from the first (cold) to the last (steady).

A cell is one combination of settings, see `BenchCell`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from outrider.client.commands.status import simulation_note
from outrider.errors import InternalError
from outrider_bench.prompts import BenchPrompt
from outrider_bench.serve.cells import PLAIN, BenchCell, lock_step_key, plain_key
from outrider_bench.serve.clients import ClientProcesses
from outrider_bench.serve.fleet import RunningFleet, mean_of
from outrider_bench.serve.round_baseline import FORWARD, BaselineRound, RoundBaseline, efficiency
from outrider_bench.serve.wave_metrics import RequestWave, rounded
from outrider_bench.serve.workload import WaveSize, make_load

IN_TURN: Final = ("steady_tokens_per_s", "round_ms", "ttft_ms", "itl_ms", "per_token_ms")
"""Names of those figures of the last plain wave that are also stored with each cell that is
compared with it."""
START_S = 30.0
"""Seconds that starting the services is assumed to take at least. If less time is left in the
budget, no services are started."""


@dataclass(slots=True)
class TimeBudget:
    """Time limit of a run in seconds, with the longest time that a part of each kind has taken so
    far."""

    seconds: float | None = None
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)
    _longest: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def allows(self, kind: object) -> bool:
        """Return whether a part of this kind may begin: it must end before the time limit if it
        takes as long as the longest one so far."""
        if self.seconds is None:
            return True
        return self.clock() - self._began + self._longest.get(kind, 0.0) < self.seconds

    def expect(self, kind: object, seconds: float) -> None:
        """Record that a part of this kind has taken, or will take, this number of seconds."""
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))


@dataclass(slots=True, kw_only=True)
class CellMeter:
    """Measures cells, and compares them with the plain and the lock-step cells of the same run."""

    clients: ClientProcesses
    prompts: Sequence[BenchPrompt]
    size: WaveSize
    waves: int
    in_turn: bool = False
    """Whether each wave with drafts follows a wave of the same requests without drafts."""
    about: dict[str, Any]
    """Fields about the machine that are added to the result of every cell."""
    lab: RoundBaseline = field(default_factory=RoundBaseline)
    start_s: float = 0.0
    """Seconds that the start of the services took."""
    plain: dict[tuple[object, ...], dict[str, Any]] = field(default_factory=dict)
    """Results of the plain cells of this run, by `plain_key`."""
    lock_step: dict[tuple[object, ...], dict[str, Any]] = field(default_factory=dict)
    """Results of the cells of this run that draft in lock-step, by `lock_step_key`."""

    def cell(self, fleet: RunningFleet, cell: BenchCell) -> dict[str, Any]:
        """Measure a cell and return its result for service.json. Raises InternalError if no request
        of a wave got an answer."""
        waves, beside = list[RequestWave](), list[RequestWave]()
        for _ in range(self.waves):
            if self.in_turn and cell.placement != PLAIN:
                beside.append(self._wave(fleet, cell.plain))
            waves.append(self._wave(fleet, cell))
        verifiers = fleet.verifiers()
        forward_ms = mean_of(info.forward_ms_p50 for info in verifiers)
        facts = describe_cell(cell, waves, self.lab.round_of(cell), forward_ms)
        if facts["hit_rate"]:
            idle_us = mean_of(info.hit_idle_us_p50 for info in verifiers)
            facts["hit_idle_us"] = rounded(idle_us, 1)
        facts |= compare_in_turn(waves, beside)
        facts |= {**self.about, "start_s": rounded(self.start_s, 1)}
        if note := simulation_note(fleet.info):
            facts["SIMULATED_ACCEPTANCE"] = note
        if cell.placement == PLAIN:
            self.plain[plain_key(facts)] = facts
        facts["over_plain"] = throughput_ratio(facts, self.plain.get(plain_key(facts)))
        if cell.drafts.look_ahead == 0:
            self.lock_step[lock_step_key(facts)] = facts
        else:
            facts["over_lockstep"] = throughput_ratio(
                facts, self.lock_step.get(lock_step_key(facts))
            )
        return facts

    def _wave(self, fleet: RunningFleet, cell: BenchCell) -> RequestWave:
        load = make_load(cell, self.prompts, self.size)
        wave = self.clients.wave(fleet.address, load, cell.sessions)
        if not wave.heard:
            codes = sorted({answer.code for answer in wave.answers})
            raise InternalError(f"no answer at all: {', '.join(codes)}", reason="NO_ANSWER")
        return wave


def compare_in_turn(waves: Sequence[RequestWave], beside: Sequence[RequestWave]) -> dict[str, Any]:
    """Return the ratios of the throughput of `waves` to that of plain decoding. Before each wave
    one of the plain waves `beside` was measured.

    There is a median ratio of whole waves and one of their steady states. Of several pairs the
    first one is left out, because it includes warm-up. The result is empty if `beside` is.
    """
    if not beside:
        return {}
    last = beside[-1].figures()
    pairs = list(zip(waves, beside, strict=True))
    pairs = pairs[1:] or pairs
    steady = [
        ours / theirs
        for one, other in pairs
        if (ours := one.steady_tokens_per_s) and (theirs := other.steady_tokens_per_s)
    ]
    return {
        "over_plain_in_turn": rounded(
            median(one.tokens_per_s / other.tokens_per_s for one, other in pairs), 4
        ),
        "steady_over_plain_in_turn": rounded(median(steady) if steady else None, 4),
        "plain_waves_tokens_per_s": [rounded(wave.tokens_per_s, 2) for wave in beside],
        "plain_in_turn": {name: last[name] for name in IN_TURN},
    }


def describe_cell(
    cell: BenchCell,
    waves: Sequence[RequestWave],
    lab: BaselineRound | None,
    forward_ms: float | None,
) -> dict[str, Any]:
    """Return the result of a cell: its settings, the figures of its last wave, and a summary of all
    waves.

    The efficiency compares the throughput with that of the baseline round `lab`. Without a
    baseline, at one session, the `forward_ms` that the verifier reports is used instead. At more
    sessions `forward_ms` is not comparable: it is measured in rounds without prefill, most of which
    have fewer sessions.
    """
    first, last = waves[0], waves[-1]
    if lab is None and forward_ms is not None and cell.sessions == 1:
        lab = BaselineRound(forward_ms, FORWARD)
    reached = efficiency(
        last.steady_tokens_per_s,
        cell.sessions,
        last.emitted_per_round,
        None if lab is None else lab.ms,
    )
    settling = first.tokens_per_s / last.tokens_per_s if len(waves) > 1 else None
    return {
        **cell.described(),
        **last.figures(),
        "over_plain": None,
        "over_lockstep": None,
        "efficiency": rounded(reached, 4),
        "lab_round_ms": None if lab is None else rounded(lab.ms, 4),
        "lab_source": None if lab is None else lab.source,
        "forward_ms": rounded(forward_ms, 4),
        "first_wave_ratio": rounded(settling, 4),
        "first_wave_ttft_ms": first.figures()["ttft_ms"],
        "waves_tokens_per_s": [rounded(wave.tokens_per_s, 2) for wave in waves],
    }


def throughput_ratio(cell: dict[str, Any], base: dict[str, Any] | None) -> float | None:
    """Return the tokens/s of a cell divided by those of the cell `base`; None without `base`. The
    steady states are compared, or whole waves if one of the two has no steady state."""
    if base is None:
        return None
    for name in ("steady_tokens_per_s", "tokens_per_s"):
        if cell.get(name) and base.get(name):
            return round(float(cell[name]) / float(base[name]), 4)
    return None
