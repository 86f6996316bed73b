"""Round times without serving overhead, the baseline of serving efficiency.

They come from results of `outrider bench gpu plain` and `outrider bench gpu rounds` that were
measured on the same kind of device with a model of about the same cost. If there is no such result,
the forward time that the verifier reports is used instead, at one session only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from outrider.client.local.config import COLOCATED, SEPARATE
from outrider_bench.serve.cells import NONE, PLAIN, BenchCell
from outrider_bench.serve.fleet import is_chain

RESULTS: Final = Path(__file__).resolve().parents[2] / "results" / "gpu"
MAX_WEIGHT_DIFFERENCE: Final = 0.1
"""Largest relative difference of weight bytes at which the baseline of another model is used."""
FORWARD: Final = "forward_ms_p50 of the verifier"


@dataclass(frozen=True, slots=True)
class BaselineRound:
    """Round time in milliseconds, and where it comes from."""

    ms: float
    source: str


@dataclass(frozen=True, slots=True)
class RoundBaseline:
    """Round times in milliseconds by (placement, draft length) and then by number of sessions."""

    rounds: Mapping[tuple[str, int], Mapping[int, float]] = field(default_factory=dict)

    def round_of(self, cell: BenchCell) -> BaselineRound | None:
        """Return the baseline round of a cell. It is interpolated linearly between the numbers of
        sessions and the draft lengths that were measured. Return None outside their range, and for
        cells without comparable rounds."""
        if cell.sessions is None:
            return None
        if cell.drafts.name == NONE:
            ms = _between(self.rounds.get((PLAIN, 0), {}), cell.sessions)
            return None if ms is None else BaselineRound(ms, "plain.json")
        if not is_chain(cell.drafts):
            return None
        # A separate drafter's round has the same work as a colocated one's, and an exchange.
        placement = COLOCATED if cell.placement == SEPARATE else cell.placement
        by_length = {
            length: ms
            for (where, length), by_sessions in self.rounds.items()
            if where == placement and (ms := _between(by_sessions, cell.sessions)) is not None
        }
        assert cell.drafts.tokens is not None
        ms = _between(by_length, cell.drafts.tokens)
        return None if ms is None else BaselineRound(ms, f"rounds.json, {placement}")


def read_baseline(device: str, weight_bytes: int, folder: Path = RESULTS) -> RoundBaseline:
    """Return the baseline rounds in a folder of results. Only results are used that were measured
    on `device` (such as "NVIDIA H200") with a model that reads about `weight_bytes` bytes per
    forward pass."""
    rounds: dict[tuple[str, int], dict[int, float]] = {}
    plain = _read(folder / "plain.json", device, weight_bytes)
    drafted = _read(folder / "rounds.json", device, weight_bytes)
    for sessions, facts in plain.get("by_batch", {}).items():
        rounds.setdefault((PLAIN, 0), {})[int(sessions)] = float(facts["round_ms"])
    for shape, by_placement in drafted.get("by_shape", {}).items():
        length, sessions = shape.removeprefix("K").split("x")
        for placement, facts in by_placement.items():
            table = rounds.setdefault((placement, int(length)), {})
            table[int(sessions)] = float(facts["round_ms"])
    return RoundBaseline(rounds)


def efficiency(
    steady_tokens_per_s: float | None,
    sessions: int | None,
    emitted_per_round: float | None,
    round_ms: float | None,
) -> float | None:
    """Return steady tokens/s divided by the tokens/s of rounds without overhead, which are sessions
    x tokens per round / baseline round time. Return None if one of these is missing."""
    if not steady_tokens_per_s or not sessions or not emitted_per_round or not round_ms:
        return None
    return steady_tokens_per_s * round_ms / (sessions * emitted_per_round * 1000.0)


def _read(path: Path, device: str, weight_bytes: int) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    alike = abs(content.get("weight_bytes", 0) / weight_bytes - 1.0) <= MAX_WEIGHT_DIFFERENCE
    return content if alike and content.get("gpu") == device else {}


def _between(table: Mapping[int, float], at: int) -> float | None:
    """Return the linearly interpolated value at `at`; None outside the range of the table's
    keys."""
    known = sorted(table)
    if not known or not known[0] <= at <= known[-1]:
        return None
    return float(np.interp(at, known, [table[key] for key in known]))
