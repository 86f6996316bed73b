"""Kernels that are compiled before the first graph is captured: nothing runs meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from outrider_verifier.config import VerifierConfig
from outrider_verifier.server.service_builder import build_service
from torch import Tensor
from triton import knobs

from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.kernel_compilation import compile_kernels
from outrider.engine.device.trial_capture import outside_capture
from outrider.engine.kernels.linear.fused import fused_linear

pytestmark = pytest.mark.gpu


@pytest.fixture
def empty_cache(tmp_path: Path) -> Iterator[None]:
    """A cache of compiled kernels with nothing in it."""
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield


def _failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "not compiled ahead" in record.message]


@pytest.mark.usefixtures("empty_cache")
def test_a_trial_runs_nothing_and_a_graph_works_afterwards(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    # Sizes that no other test has, so that the kernel is not compiled yet.
    x = torch.randn((3, 208), device=device)
    weight = torch.randn((336, 208), device=device)
    written = torch.zeros(3, device=device)
    made = list[Tensor]()

    def run() -> Tensor:
        if not made:
            with outside_capture(device):
                made.append(torch.full((3,), 2.0, device=device))
        written.add_(made[0])
        return fused_linear(x, weight) @ weight

    graphs = GraphCache(device)
    compile_kernels(graphs, device, lambda _: graphs.run_graph("product", run))
    assert not _failures(caplog)
    assert len(graphs) == 0
    assert written.tolist() == [0.0] * 3
    assert made[0].tolist() == [2.0] * 3
    expected = x.double() @ weight.double().T @ weight.double()
    for times in (1, 2):
        found = graphs.run_graph("product", run)
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-1)
        assert written.tolist() == [2.0 * times] * 3


@pytest.mark.usefixtures("empty_cache")
def test_a_verifier_starts_with_kernels_compiled_ahead(
    tiny_target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        build_service(
            VerifierConfig(model=str(tiny_target), device="cuda:0", max_sessions=4, kv_tokens=4096)
        )
    assert not _failures(caplog)
    events = {record.message: record.__dict__ for record in caplog.records}
    assert events["kernels compiled"]["kernels"] > 5
    stages = events["start-up finished"]["seconds"]
    assert list(stages) == ["imports", "weights", "kernels", "weights_wait", "capture", "total"]
