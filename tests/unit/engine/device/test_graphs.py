"""What is captured is replayed; what is not, once nothing is captured any more, is told of."""

from __future__ import annotations

import logging

import pytest
import torch

from outrider.engine.device.graphs.graph_cache import GraphCache


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
