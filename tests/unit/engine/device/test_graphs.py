"""What is captured is replayed; what is not, once nothing is captured any more, is told of."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.kernel_compilation import compile_kernels


def test_a_shape_that_was_not_captured_runs_as_it_is_and_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs = GraphCache(torch.device("cpu"))
    graphs.enabled = graphs.sealed = True
    with caplog.at_level(logging.WARNING):
        assert graphs.run_graph("shape", lambda: 1) == 1
        assert graphs.run_graph("shape", lambda: 2) == 2
    assert [record.__dict__["key"] for record in caplog.records] == ["shape"]
    assert "shape" not in graphs


class _Trial:
    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def record(self, function: Any) -> Any:
        self.recorded.append(function())
        return self.recorded[-1]


def test_what_a_trial_records_is_not_captured() -> None:
    graphs, trial = GraphCache(torch.device("cpu")), _Trial()
    graphs.enabled = True
    with graphs.capture_by(trial):  # type: ignore[arg-type]
        assert graphs.run_graph("shape", lambda: 1) == 1
        assert list(graphs.capture_steps("other", lambda: 2)) == []
    assert trial.recorded == [1, 2]
    assert len(graphs) == 0
    graphs.sealed = True
    assert graphs.run_graph("shape", lambda: 3) == 3
    assert trial.recorded == [1, 2]


def test_without_graphs_nothing_is_compiled_ahead() -> None:
    graphs = GraphCache(torch.device("cpu"))
    compile_kernels(graphs, torch.device("cpu"), lambda _: pytest.fail("it ran"))
