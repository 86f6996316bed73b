"""The clock of a device is written into memory of the host."""

from __future__ import annotations

import time

import torch

from outrider.engine.kernels.exchange.clock import write_clock_torch, write_clock_triton


def test_the_reference_tells_the_clock_of_its_stamps() -> None:
    moment = torch.zeros(1, dtype=torch.int64)
    before = time.monotonic_ns()
    write_clock_torch(moment, torch.tensor([moment.data_ptr()]))
    assert before <= int(moment[0]) <= time.monotonic_ns()


def test_the_kernel_writes_where_the_address_says() -> None:
    # Interpreted kernels have no clock and write 0.
    moment, other = torch.full((1,), -1), torch.full((1,), -1)
    write_clock_triton(other, torch.tensor([moment.data_ptr()]))
    assert (int(moment[0]), int(other[0])) == (0, -1)
