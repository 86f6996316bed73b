# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Reading of the device clock that gives the time stamps of an exchange."""

from __future__ import annotations

import time

import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.exchange.numbers import device_clock


def write_clock(moment: Tensor, address: Tensor) -> None:
    """Write the current time of the device's clock, in nanoseconds, to `moment`, int64 [1] in host
    memory. address: int64 [1] on the device, holds the address of `moment`."""
    if address.is_cuda:
        write_clock_triton(moment, address)
    else:
        write_clock_torch(moment, address)


def write_clock_torch(moment: Tensor, address: Tensor) -> None:
    """Run `write_clock` on a CPU, whose clock is `time.monotonic_ns`."""
    del address
    moment[0] = time.monotonic_ns()


def write_clock_triton(moment: Tensor, address: Tensor) -> None:
    """Launch the Triton kernel of `write_clock`, with one warp."""
    del moment
    _write_clock[(1,)](address, num_warps=1)


@triton.jit
def _write_clock(address):
    tl.store(tl.load(address).to(tl.pointer_type(tl.int64)), device_clock())
