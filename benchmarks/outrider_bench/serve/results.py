"""Results file service.json: cells of several runs and machines, and derived figures.

    {commit, date, device, versions, cells: [...], exchange_us, host_ms_at_64, round_cost,
     events_per_s, plain_floor_ratio_min}

A new cell replaces an older one with the same key. The content of a file that was measured at
another commit is discarded, never merged.
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
"""Names of figures that are not computed from the cells of one run: other benchmarks measure them,
or `round_cost` computes them."""
FLOOR: Final = "plain_floor_ratio_min"
LEFT_OUT: Final = "left_out"
"""Name of the field that lists the cells that were requested but not measured, each with the
reason."""
ROUND_COST_SESSIONS: Final = 32
"""Largest number of sessions that `round_cost` considers."""


def about() -> dict[str, Any]:
    """Return the commit, date, device and versions of this run."""
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
    """Return the content of two results files merged into one. A figure or cell of `new` replaces
    that of `old`.

    A file without a commit, which another benchmark has written, may be merged with any other file.
    Raises InvalidRequestError if the files have different commits, and if `new` has no field of
    service.json.
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
    """Merge the files `parts` into the file `out` and return its content. Raises
    InvalidRequestError if a part is missing, and in the cases in which `merge` does."""
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
    """Return the content of a results file. It is empty if the file is missing, or if `commit` is
    given and the file has another commit."""
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
    """Return the round time with a sampling parameter divided by the round time of greedy decoding,
    by parameter.

    Rounds are compared at equal placement, drafts and number of sessions, up to ROUND_COST_SESSIONS
    sessions. The result is the largest of these ratios.
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
    """Return the tokens/s of a cell divided by those of plain decoding; None if they are unknown.

    The ratio to plain waves that alternated with the waves of the cell is preferred, because a
    separate plain cell was measured at another time.
    """
    found = cell.get("over_plain_in_turn") or cell.get("over_plain")
    return None if found is None else float(found)


def floor_ratio(cells: Sequence[dict[str, Any]]) -> float | None:
    """Return the smallest `over_plain` of all closed-loop cells with drafts; None if there are
    none.

    Open loops are left out, because their throughput is the rate of arriving requests, with and
    without drafts. The fixed planner is left out, because it drafts whenever requests ask for it,
    even if plain decoding is faster.
    """
    closed = [
        cell
        for cell in cells
        if cell["sessions"] and cell["drafts"] != NONE and cell.get("planner") != "fixed"
    ]
    ratios = [ratio for ratio in map(over_plain, closed) if ratio]
    return min(ratios) if ratios else None


def _kind(cell: dict[str, Any]) -> str | None:
    """Return the one sampling parameter with which a cell is measured for `round_cost`, or "greedy"
    without any. Return None if there are several, or another one."""
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
    """Return two dicts merged key by key. If one of the two is not a dict, return `new`, or `old`
    if `new` is None."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **new}
    return old if new is None else new
