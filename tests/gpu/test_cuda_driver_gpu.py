"""Launches, copies and marks by the driver are what torch's are, on any thread that has entered."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.engine.device.current_device import init_launching_thread
from outrider.engine.device.transfer.cuda_driver import DriverCalls, driver_for

pytestmark = pytest.mark.gpu
BUSY_CYCLES = 200_000_000
"""Of the device's clock: a tenth of a second about."""


def on_a_fresh_thread(device: torch.device, job: Callable[[], None]) -> None:
    """Run `job` as the first thing that a launching thread does."""

    def entered() -> None:
        init_launching_thread(device)
        job()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(entered).result()


def test_a_threads_first_call_may_be_a_launch(device: torch.device) -> None:
    calls, count = driver_for(device), torch.zeros(1, device=device)
    assert isinstance(calls, DriverCalls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count.add_(1.0)
    prepared = calls.prepare(graph)
    for _ in range(3):
        on_a_fresh_thread(device, lambda: calls.launch(prepared))
    torch.cuda.synchronize()
    assert float(count) == 3.0


def test_copies_and_marks_wait_for_nothing_and_keep_their_order(device: torch.device) -> None:
    calls = driver_for(device)
    given = torch.arange(5, dtype=torch.int32).pin_memory()
    there = torch.zeros(5, dtype=torch.int32, device=device)
    back = torch.zeros(5, dtype=torch.int32).pin_memory()
    mark = calls.make_event()
    assert mark.is_complete

    def job() -> None:
        sleep: Callable[[int], None] = torch.cuda._sleep
        sleep(BUSY_CYCLES)
        calls.copy_tensor(there, given)
        calls.copy_tensor(back, there)
        mark.record()
        assert not mark.is_complete
        mark.wait()
        assert mark.is_complete and back.tolist() == [0, 1, 2, 3, 4]

    on_a_fresh_thread(device, job)
