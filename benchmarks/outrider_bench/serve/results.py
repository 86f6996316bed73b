"""Results file service.json: cells of several runs and machines, and derived figures.

    {commit, date, device, versions, cells: [...], exchange_us, host_ms_at_64, round_cost,
     events_per_s, plain_floor_ratio_min}

A newer cell replaces one with the same key. A file of another commit is replaced, never merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.build_info import COMPILED
from outrider.errors import InvalidRequestError
from outrider_bench.environment import describe
from outrider_bench.report import print_progress
from outrider_bench.serve.cells import NONE, cell_key, greedy_key

ABOUT: Final = ("commit", "date", "device", "versions")
OTHERS: Final = ("exchange_us", "host_ms_at_64", "round_cost", "events_per_s")
"""Figures that other benchmarks measure, or that `round_cost` computes."""
FLOOR: Final = "plain_floor_ratio_min"
LEFT_OUT: Final = "left_out"
"""Cells that were requested and are not in the file, each with the reason."""
ROUND_COST_SESSIONS: Final = 32
"""Largest number of sessions for which the cost of a sampling parameter is stated."""


def about() -> dict[str, Any]:
    """Return commit, date, device and versions of this run."""
    facts = describe()
    versions = dict(facts["versions"])
    versions |= {name: facts[name] for name in ("python", "driver", "cuda") if name in facts}
    versions["host"] = "compiled" if COMPILED else "source"
    device = facts.get("gpu", facts["cpu"])
    return {**{name: facts[name] for name in ("commit", "date")}, "device": device} | {
        "versions": versions
    }


def machine_words() -> str:
    """Return the description of this machine that is stored with each cell."""
    facts = describe()
    gpus = f"{facts['gpus']}x {facts['gpu']}, " if "gpu" in facts else ""
    return f"{gpus}{facts['cores']} cores of {facts['cpu']}"


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return both files merged into one; where both have a figure, that of `new` is kept.

    A file without a commit (a part that another benchmark measured) fits every other file. Raises
    InvalidRequestError for files of two commits, and if `new` has nothing of service.json.
    """
    if not {"cells", FLOOR, *OTHERS} & set(new):
        raise InvalidRequestError("there is nothing of service.json in it", reason="NO_RESULTS")
    commits = [str(part["commit"]) for part in (old, new) if part.get("commit")]
    if len(set(commits)) > 1:
        raise InvalidRequestError(
            f"results of two commits do not mix: {' and '.join(commits)}", reason="COMMITS"
        )
    cells = {cell_key(cell): cell for cell in (*old.get("cells", ()), *new.get("cells", ()))}
    merged: dict[str, Any] = {name: new.get(name) or old.get(name) for name in ABOUT}
    merged["cells"] = list(cells.values())
    for name in OTHERS:
        merged[name] = _joined(old.get(name), new.get(name))
    computed = round_cost(merged["cells"])
    merged["round_cost"] = _joined(merged["round_cost"], computed or None)
    merged[FLOOR] = floor_ratio(merged["cells"])
    left_out = {cell_key(cell): cell for cell in (*old.get(LEFT_OUT, ()), *new.get(LEFT_OUT, ()))}
    missing = [cell for found, cell in left_out.items() if found not in cells]
    return merged | ({LEFT_OUT: missing} if missing else {})


def merge_files(out: Path, parts: Iterable[Path]) -> dict[str, Any]:
    """Merge `parts` into the file `out` and return its content. Raises InvalidRequestError for a
    missing part, and as `merge` does."""
    merged = read(out)
    for part in parts:
        if not part.is_file():
            raise InvalidRequestError(f"{part}: no such file", reason="NO_RESULTS")
        try:
            merged = merge(merged, json.loads(part.read_text(encoding="utf-8")))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{part}: {error.message}", reason=error.reason) from None
    write(out, merged)
    return merged


def read(path: Path | None, commit: str | None = None) -> dict[str, Any]:
    """Return the content of a results file; empty if the file is missing or of another commit."""
    if path is None or not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if commit is not None and content.get("commit") != commit:
        print_progress(f"{path} is of commit {content.get('commit')}: begun anew at {commit}")
        return {}
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def round_cost(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the round time with a sampling parameter divided by that of greedy decoding, by
    parameter.

    It is the largest ratio of all placements and drafts, at equal numbers of sessions up to
    ROUND_COST_SESSIONS.
    """
    greedy = {greedy_key(cell): cell for cell in cells if _kind(cell) == "greedy"}
    worst: dict[str, float] = {}
    for cell in cells:
        kind, base = _kind(cell), greedy.get(greedy_key(cell))
        sessions = cell.get("sessions")
        if kind in (None, "greedy") or base is None or not sessions:
            continue
        if sessions > ROUND_COST_SESSIONS or not cell["round_ms"] or not base["round_ms"]:
            continue
        ratio = round(cell["round_ms"] / base["round_ms"], 4)
        worst[str(kind)] = max(ratio, worst.get(str(kind), 0.0))
    return worst


def over_plain(cell: dict[str, Any]) -> float | None:
    """Return the tokens/s of a cell divided by those of plain decoding; None if unknown.

    The ratio to plain waves between its own is preferred, because a separate plain cell was
    measured at another time.
    """
    found = cell.get("over_plain_in_turn") or cell.get("over_plain")
    return None if found is None else float(found)


def floor_ratio(cells: Sequence[dict[str, Any]]) -> float | None:
    """Return the smallest ratio to plain decoding of all closed-loop cells with drafts; None
    without any.

    Open loops do not count, because with and without drafts they serve what arrives. Neither does
    the fixed planner, which drafts where requests say so, not where it pays.
    """
    closed = [
        cell
        for cell in cells
        if cell["sessions"] and cell["drafts"] != NONE and cell.get("planner") != "fixed"
    ]
    ratios = [ratio for ratio in map(over_plain, closed) if ratio]
    return min(ratios) if ratios else None


def _kind(cell: dict[str, Any]) -> str | None:
    """Return "greedy" or the one parameter that a cell's sampling adds to it; None if it adds
    several or another one."""
    kinds = []
    if cell["repetition_penalty"] != 1.0:
        kinds.append("penalties")
    if cell["logit_bias"]:
        kinds.append("bias")
    if cell["top_p"] != 1.0:
        kinds.append("top_p")
    if cell["rule"] == "rejection":
        kinds.append("rejection")
    if not kinds:
        return "greedy" if cell["temperature"] == 0.0 and cell["min_p"] == 0.0 else None
    return kinds[0] if len(kinds) == 1 else None


def _joined(old: Any, new: Any) -> Any:
    """Return two tables merged key by key. Of other values return `new`, or `old` if `new` is
    None."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **new}
    return old if new is None else new
