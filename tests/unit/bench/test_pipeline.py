"""pipeline.json: ratios of the right cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from outrider_bench.serve.pipeline import summarize

from outrider.errors import InvalidRequestError


def cell(placement: str, drafts: str, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    facts = {"temperature": 0.0, "rule": "greedy", "sessions": 1, "look_ahead": None}
    facts |= {"model": "m", "machine": "two cards", "exchange_delay_ms": 0.0}
    return {**facts, "placement": placement, "drafts": drafts, "tokens_per_s": tokens_per_s, **more}


def written(path: Path, cells: list[dict[str, Any]]) -> Path:
    file = path / "cells.json"
    file.write_text(json.dumps({"commit": "c", "cells": cells}))
    return file


def test_ratios_are_of_the_best_shapes_at_one_load_and_delay(tmp_path: Path) -> None:
    ahead = {"look_ahead": 1, "hit_over_fresh": 0.94}
    file = written(
        tmp_path,
        [
            cell("plain", "none", 100.0),
            cell("fused", "chain-4", 250.0),
            cell("colocated", "chain-4", 200.0),
            cell("fused", "chain-4", 900.0, sessions=8),
            cell("separate", "chain-5+lockstep", 220.0, look_ahead=0),
            cell("separate", "chain-5+ahead16", 260.0, hit_rate=0.8, hit_idle_us=200.0, **ahead),
            cell("separate", "tree-32+ahead16", 300.0, hit_rate=0.6, hit_idle_us=180.0, **ahead),
            cell("separate", "tree-32+ahead32", 290.0, hit_rate=0.65, **ahead),
            cell("separate", "tree-32+ahead16", 990.0, sessions=8, **ahead),
            cell("separate", "tree-32+ahead16", 270.0, exchange_delay_ms=1.0, **ahead),
            cell("separate", "tree-32+ahead16", 240.0, exchange_delay_ms=5.0, **ahead),
            cell("separate", "chain-5+lockstep", 80.0, look_ahead=0, exchange_delay_ms=5.0),
        ],
    )
    found: Any = summarize([file])
    assert found["hit_rate"] == {
        "chain5-T0": 0.8,
        "tree32-T0": 0.65,
        "chain5-T1-coupled": None,
    }
    assert found["over_colocated"] == {"1": 1.2, "8": 1.1, "32": None, "1-T1": None}
    assert found["over_lockstep_1"] == round(300 / 220, 4)
    assert found["delay"] == {
        "1ms": 0.9,
        "1ms-lockstep": None,
        "5ms": 3.0,
        "5ms-over-plain": 2.4,
    }
    assert (found["stale_over_fresh"], found["hit_idle_us"]) == (0.94, 180.0)
    assert found["commit"] == "c"


def test_slow_drafters_and_larger_fleets_have_figures_of_their_own(tmp_path: Path) -> None:
    pool = {"verifiers": 3, "drafters": 1, "sessions": 24}
    file = written(
        tmp_path,
        [
            cell("separate", "chain-5+ahead16", 260.0, look_ahead=1, hit_rate=0.5),
            cell("separate", "chain-5+lockstep", 200.0, look_ahead=0),
            cell("separate", "tree-16+ahead16", 300.0, look_ahead=1),
            cell(
                "separate",
                "chain-5+ahead16",
                208.0,
                look_ahead=1,
                exchange_delay_ms=1.0,
                hit_rate=0.9,
            ),
            cell(
                "separate",
                "chain-5+ahead16",
                120.0,
                look_ahead=1,
                drafter_slowdown=3.0,
                hit_rate=0.9,
            ),
            cell("separate", "chain-5+lockstep", 150.0, look_ahead=0, drafter_slowdown=3.0),
            cell("separate", "tree-16+ahead", 900.0, look_ahead=1, over_plain=1.7, **pool),
            cell("separate", "chain-5+ahead", 700.0, look_ahead=1, **pool),
        ],
    )
    found: Any = summarize([file])
    assert found["slow_drafter_over_lockstep"] == {"3x": 0.8}
    assert found["delay"]["1ms"] == 0.8, "of the same drafts"
    assert found["hit_rate"]["chain5-T0"] == 0.5
    assert found["over_lockstep_1"] == 1.5
    (fleet,) = found["equal_gpus"]
    assert (fleet["drafts"], fleet["verifiers"], fleet["tokens_per_s"]) == (
        "tree-16+ahead",
        3,
        900.0,
    )


def test_what_a_file_lacks_is_taken_from_the_next_that_has_it(tmp_path: Path) -> None:
    plain, slow = cell("plain", "none", 100.0), {"look_ahead": 1, "drafter_slowdown": 2.5}
    (tmp_path / "new").mkdir()
    new = written(
        tmp_path / "new",
        [plain, cell("separate", "chain-5+ahead16", 260.0, look_ahead=1, hit_rate=0.5)],
    )
    old = written(
        tmp_path,
        [
            cell("separate", "chain-5+ahead16", 300.0, look_ahead=1, hit_rate=0.9),
            cell("separate", "chain-5+lockstep", 200.0, look_ahead=0),
            cell("separate", "chain-5+ahead16", 150.0, **slow),
            cell("separate", "chain-5+lockstep", 100.0, **{**slow, "look_ahead": 0}),
        ],
    )
    found: Any = summarize([new, old])
    assert found["hit_rate"]["chain5-T0"] == 0.5
    assert found["over_lockstep_1"] == 1.5, "of one file"
    assert found["slow_drafter_over_lockstep"] == {"2.5x": 1.5}
    assert found["delay"]["1ms"] is None
    assert [source["figures"] for source in found["sources"]] == [
        ["hit_rate.chain5-T0"],
        ["over_lockstep_1", "slow_drafter_over_lockstep.2.5x"],
    ]


def test_a_file_without_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no cells"):
        summarize([written(tmp_path, [])])
