"""Summary file `summary.json`: the results of a folder's benchmarks under stable names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider_bench.gpu.support.benchmark_context import Bench, show

FILE: Final = "summary.json"
ABOUT: Final = ("commit", "date", "device", "versions")
FIGURES: Final = (
    "floor_ms",
    "verify_ms",
    "plain_ms",
    "round_ms",
    "draft_step_ms",
    "chain5_ms",
    "round_overhead_us",
    "catchup_speedup",
    "fused_over_plain",
    "acceptance",
    "placement_tokens_per_s",
)
"""Names of the figures, in the order of the file. A figure that was not measured is null."""


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of several results. A figure of a later result replaces that of an earlier
    one.

    `commit`, `date`, `device` and `versions` are those of the newest result. Where results differ
    in commit or device, `all_commit` and `all_device` list them. Raises InvalidRequestError without
    results, and for a figure that is not in FIGURES.
    """
    if not results:
        raise InvalidRequestError("there is no result to summarise", reason="NO_RESULTS")
    results = sorted(results, key=lambda result: str(result.get("date", "")))
    summary: dict[str, Any] = {name: results[-1].get(name) for name in ABOUT}
    for name in ("commit", "device"):
        seen = list(dict.fromkeys(str(result.get(name)) for result in results))
        if len(seen) > 1:
            summary[f"all_{name}"] = seen
    summary |= dict.fromkeys(FIGURES)
    for result in results:
        for name, value in result.get("figures", {}).items():
            if name not in FIGURES:
                raise InvalidRequestError(f"{result.get('benchmark')}: no such figure: {name}")
            summary[name] = _merged(summary[name], value)
    return summary


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of device benchmarks that are stored in a folder."""
    found = []
    for path in sorted(folder.glob("*.json")):
        if path.name == FILE or path.name.endswith(".trace.json"):
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and str(content.get("benchmark", "")).startswith("gpu "):
            found.append(content)
    return found


def write_summary(folder: Path) -> dict[str, Any]:
    """Merge a folder's results into its summary file; return the summary."""
    summary = merge(read_results(folder))
    text = json.dumps(summary, indent=2) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")
    return summary


def run(bench: Bench) -> dict[str, object]:
    """Write the summary of the folder given by --out, and print it."""
    if bench.args.out is None:
        raise InvalidRequestError("summary needs --out, the folder with the results")
    summary = write_summary(bench.args.out)
    rows = [(name, json.dumps(summary[name])) for name in FIGURES]
    show(f"{bench.args.out / FILE}", ("figure", "value"), rows)
    return summary


def _merged(old: Any, new: Any) -> Any:
    """Return both tables merged key by key, and tables inside them likewise. If one of the two is
    no table, return `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new
