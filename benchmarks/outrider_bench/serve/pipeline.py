"""`outrider bench pipeline`: gain of look-ahead, from cells of `outrider bench serve`.

Every figure is a ratio or share that is computed from the cells of one results file, so all its
cells have the same commit. If the first file does not have the cells for a figure, the figure is
computed from the next file that has them; `sources` states which. A figure that no file has is
null. Each figure uses the best fan-out, shape and planner that were measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from outrider.client.local.config import COLOCATED, FUSED, SEPARATE
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider_bench.serve.cells import PLAIN

Cell = dict[str, Any]
Test = Callable[[Cell], bool]
_ABOUT: Final = ("commit", "date", "device", "versions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add(
        "--cells",
        type=Path,
        required=True,
        nargs="+",
        metavar="FILE",
        help="what bench serve --out wrote; later ones for what earlier ones lack",
    )
    add("--out", type=Path, metavar="FILE", help="default: shown only")


def run(args: argparse.Namespace) -> None:
    """Print the summary, and write it to --out if that is given."""
    text = json.dumps(summarize(args.cells), indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


def summarize(files: Sequence[Path]) -> dict[str, object]:
    """Return the content of pipeline.json, computed from these results files. Raises
    InvalidRequestError for a file without cells."""
    contents = [_content(file) for file in files]
    flat = [_flat(_figures(content["cells"])) for content in contents]
    merged: dict[str, Any] = {}
    taken: list[list[str]] = [[] for _ in files]
    for name in dict.fromkeys(name for figures in flat for name in figures):
        having = (at for at, figures in enumerate(flat) if figures.get(name))
        source = next(having, None)
        if source is not None:
            taken[source].append(name)
        group, _, key = name.partition(".")
        value = None if source is None else flat[source][name]
        if key:
            merged.setdefault(group, {})[key] = value
        else:
            merged[group] = value
    cells = [cell for content in contents for cell in content["cells"]]
    return {
        "benchmark": "gpu pipeline",
        **{name: contents[0].get(name) for name in _ABOUT},
        "models": sorted({cell["model"] for cell in cells}),
        "machines": sorted({cell["machine"] for cell in cells}),
        **merged,
        "sources": [
            {"file": file.name, "commit": content.get("commit"), "figures": names}
            for file, content, names in zip(files, contents, taken, strict=True)
        ],
    }


def _content(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not content.get("cells"):
        raise InvalidRequestError(f"{file} holds no cells of bench serve", reason="NO_CELLS")
    return content


def _flat(figures: dict[str, Any]) -> dict[str, Any]:
    """Return all figures in one dict. A figure in a group is named group.name."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def _figures(cells: Sequence[Cell]) -> dict[str, Any]:
    pairs = [cell for cell in cells if cell.get("verifiers", 1) == 1]
    every = [cell for cell in pairs if cell["temperature"] == 0.0 and _slowdown(cell) == 1.0]
    greedy = _by_delay(every, 0.0)
    coupled = _by_delay([cell for cell in pairs if _is_coupled(cell)], 0.0)
    return {
        "hit_rate": {
            "chain5-T0": _figure(greedy, "hit_rate", _alone, _ahead, _named("chain-5")),
            "tree32-T0": _figure(greedy, "hit_rate", _alone, _ahead, _named("tree-32")),
            "chain5-T1-coupled": _figure(coupled, "hit_rate", _alone, _ahead, _named("chain-5")),
        },
        "stale_over_fresh": _figure(greedy, "hit_over_fresh", _alone, _ahead),
        "over_colocated": {
            **{str(count): _over_colocated(greedy, count) for count in (1, 8, 32)},
            "1-T1": _over_colocated(coupled, 1),
        },
        "over_lockstep_1": _ratio(_best(greedy, _alone, _ahead), _best(greedy, _alone, _lockstep)),
        "model_drafter_over_lockstep": _ratio(
            _best(greedy, _alone, _ahead, _by_model), _best(greedy, _alone, _lockstep, _by_model)
        ),
        "slow_drafter_over_lockstep": _slow_drafters(pairs),
        "delay": _delays(every),
        "equal_gpus": _fleets(cells),
        "hit_idle_us": _figure(greedy, "hit_idle_us", _alone, _ahead, lowest=True),
    }


def _slow_drafters(cells: Sequence[Cell]) -> dict[str, float | None]:
    """Return the ratio of tokens/s with look-ahead to tokens/s in lock-step at one session, by the
    slowdown factor of the drafter."""
    found: dict[str, float | None] = {}
    for factor in sorted({_slowdown(cell) for cell in cells} - {1.0}):
        slowed = [c for c in cells if c["temperature"] == 0.0 and _slowdown(c) == factor]
        best = (_best(slowed, _alone, test) for test in (_ahead, _lockstep))
        found[f"{factor:g}x"] = _ratio(*best)
    return found


def _fleets(cells: Sequence[Cell]) -> list[Cell]:
    """Return the figures of the best cell for each placement, number of processes and number of
    sessions. Only fleets with several verifiers are included."""
    best: dict[tuple[object, ...], Cell] = {}
    for cell in sorted(cells, key=lambda cell: float(cell["tokens_per_s"])):
        if cell.get("verifiers", 1) > 1:
            best[cell["placement"], cell["verifiers"], cell["drafters"], cell["sessions"]] = cell
    names = ("placement", "verifiers", "drafters", "sessions", "drafts", "planner")
    figures = ("tokens_per_s", "steady_tokens_per_s", "over_plain")
    return [{name: cell.get(name) for name in (*names, *figures)} for cell in best.values()]


def _delays(cells: Sequence[Cell]) -> dict[str, float | None]:
    """Return the throughput ratios of drafting over a slow link, at one session."""
    near, slow, far = (_by_delay(cells, delay_ms) for delay_ms in (0.0, 1.0, 5.0))
    there = _best(far, _alone, _ahead)
    return {
        "1ms": _retained_share(near, slow, _ahead),
        "1ms-lockstep": _retained_share(near, slow, _lockstep),
        "5ms": _ratio(there, _best(far, _alone, _lockstep)),
        "5ms-over-plain": _ratio(there, _best(near, _alone, _is_plain)),
    }


def _retained_share(near: Sequence[Cell], slow: Sequence[Cell], test: Test) -> float | None:
    """Return the tokens/s of the best drafts over a slow link, relative to the same drafts without
    the delay."""
    ranked = sorted(_chosen(slow, (_alone, test)), key=lambda cell: float(cell["tokens_per_s"]))
    if not ranked:
        return None
    drafts = ranked[-1]["drafts"]
    base = _best(near, _alone, test, lambda cell: bool(cell["drafts"] == drafts))
    return _ratio(ranked[-1]["tokens_per_s"], base)


def _over_colocated(cells: Sequence[Cell], sessions: int) -> float | None:
    here = [cell for cell in cells if cell["sessions"] == sessions]
    return _ratio(_best(here, _ahead), _best(here, _in_process))


def _best(cells: Sequence[Cell], *tests: Test) -> float | None:
    """Return the highest tokens/s of the cells that pass all tests; None if there are none."""
    return max((cell["tokens_per_s"] for cell in _chosen(cells, tests)), default=None)


def _figure(cells: Sequence[Cell], name: str, *tests: Test, lowest: bool = False) -> float | None:
    found = [cell[name] for cell in _chosen(cells, tests) if cell.get(name)]
    return (min if lowest else max)(found, default=None)


def _chosen(cells: Sequence[Cell], tests: Sequence[Test]) -> list[Cell]:
    return [cell for cell in cells if all(test(cell) for test in tests)]


def _by_delay(cells: Sequence[Cell], delay_ms: float) -> list[Cell]:
    """Return the cells whose exchange was delayed by `delay_ms` in each direction."""
    return [cell for cell in cells if cell.get("exchange_delay_ms", 0.0) == delay_ms]


def _slowdown(cell: Cell) -> float:
    return float(cell.get("drafter_slowdown", 1.0))


def _named(shape: str) -> Test:
    return lambda cell: bool(cell["drafts"].split("+")[0] == shape)


def _alone(cell: Cell) -> bool:
    return bool(cell["sessions"] == 1)


def _ahead(cell: Cell) -> bool:
    return cell["placement"] == SEPARATE and cell.get("look_ahead") == 1


def _lockstep(cell: Cell) -> bool:
    return cell["placement"] == SEPARATE and cell.get("look_ahead") == 0


def _in_process(cell: Cell) -> bool:
    return cell["placement"] in (COLOCATED, FUSED)


def _is_plain(cell: Cell) -> bool:
    return bool(cell["placement"] == PLAIN)


def _by_model(cell: Cell) -> bool:
    return str(cell["drafts"]).startswith(DraftMethod.MODEL.value)


def _is_coupled(cell: Cell) -> bool:
    return bool(cell["temperature"] == 1.0 and cell["rule"] == Rule.COUPLED.value)


def _ratio(value: float | None, base: float | None) -> float | None:
    return round(value / base, 4) if value and base else None
