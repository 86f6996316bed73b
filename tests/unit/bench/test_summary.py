"""The summary: figures of several results under the names that stay."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outrider_bench.environment import describe
from outrider_bench.gpu import cli
from outrider_bench.gpu.lossless import common_prefix
from outrider_bench.gpu.summary import FIGURES, merge, read_results, write_summary
from outrider_bench.gpu.support.tree_scores import ProductGrowth, torn_tree
from outrider_drafter.proposers.tree_growth import BeamGrowth, CandidateRows

from outrider.errors import InternalError, InvalidRequestError


def _result(date: str, commit: str = "abc", **figures: Any) -> dict[str, Any]:
    about = {"commit": commit, "date": date, "device": "H200", "versions": {"torch": "2.11"}}
    return {"benchmark": "gpu x", **about, "figures": figures}


def test_figures_are_merged_key_by_key_and_the_newest_wins() -> None:
    old = _result("2026-01-01", verify_ms={"1x1": 9.0, "1x8": 5.0})
    new = _result("2026-01-02", verify_ms={"1x1": 4.0}, round_overhead_us={"grpc": 400.0})
    other = _result("2026-01-03", round_overhead_us={"inproc": 90.0}, floor_ms=3.49)
    summary = merge([new, other, old])
    assert summary["verify_ms"] == {"1x1": 4.0, "1x8": 5.0}
    assert summary["round_overhead_us"] == {"grpc": 400.0, "inproc": 90.0}
    assert summary["floor_ms"] == 3.49 and summary["plain_ms"] is None
    assert summary["date"] == "2026-01-03" and summary["commit"] == "abc"
    assert set(summary) == {*FIGURES, "commit", "date", "device", "versions"}


def test_results_of_several_commits_say_so() -> None:
    summary = merge([_result("1"), _result("2", commit="def")])
    assert summary["commit"] == "def"
    assert summary["all_commit"] == ["abc", "def"]


def test_unknown_figures_and_no_results_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no such figure: speed"):
        merge([_result("1", speed=1.0)])
    with pytest.raises(InvalidRequestError):
        merge([])


def test_only_results_of_device_benchmarks_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(_result("1", floor_ms=1.0)))
    (tmp_path / "b.json").write_text(json.dumps({"benchmark": "local"}))
    (tmp_path / "c.trace.json").write_text("{}")
    write_summary(tmp_path)
    assert [r["figures"] for r in read_results(tmp_path)] == [{"floor_ms": 1.0}]
    assert json.loads((tmp_path / "summary.json").read_text())["floor_ms"] == 1.0


def test_parts_run_in_order_and_unknown_ones_are_refused() -> None:
    assert cli.chosen("plain,verify") == ["verify", "plain"]
    assert cli.chosen(None) == list(cli.NAMES)
    with pytest.raises(InvalidRequestError, match="nonsense"):
        cli.chosen("verify,nonsense")


def test_a_part_that_fails_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, bench: object) -> dict[str, Any]:
            if self.name == "verify":
                raise RuntimeError("no such luck")
            return _result("1", plain_ms={"1": 4.2})

    monkeypatch.setattr(cli, "import_part", Part)
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    args = parser.parse_args(["all", "--only", "verify,plain", "--out", str(tmp_path)])
    with pytest.raises(InternalError, match="verify"):
        cli.run(args)
    assert "verify FAILED: RuntimeError: no such luck" in capsys.readouterr().err
    assert json.loads((tmp_path / "summary.json").read_text())["plain_ms"] == {"1": 4.2}


def test_products_in_bfloat16_tear_a_tree_that_sums_keep() -> None:
    products, sums = torn_tree(sums=False), torn_tree(sums=True)
    assert products["distinct"] == 1 and products["torn"] > 0
    assert sums["distinct"] == 12 and sums["torn"] == 0


def test_growth_by_products_cannot_tell_certain_nodes_apart() -> None:
    """A chain of certain nodes with an unlikely sibling at each."""
    sums = BeamGrowth(num_nodes=3, top_k=2, depth=3)
    products = ProductGrowth(num_nodes=3, top_k=2, depth=3)
    for growth in (sums, products):
        rows = 1
        while rows:
            logprobs = np.array([[-0.0015, -7.0]] * rows, dtype=np.float32)
            tokens = np.arange(2 * rows).reshape(rows, 2)
            rows = len(growth.add_level(CandidateRows(tokens=tokens, logprobs=logprobs)).tokens)
    assert len(set(sums.finish_draft().tree.logprobs.tolist())) == 3
    assert products.finish_draft().tree.parents.tolist() == [-1, 0, 1]
    assert [p for p in products.products if p > 0.5] == [1.0, 1.0, 1.0]


def test_the_commit_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_COMMIT", "f00d")
    assert describe()["commit"] == "f00d"


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
