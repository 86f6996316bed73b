"""Kernels that launches ask for are compiled by threads, into the cache that launches read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from outrider.engine.kernels.compile_ahead import KernelCompiler
from outrider.engine.weight_copies import WeightCopies


class _Driver:
    """A driver of a device that is not there: it compiles for it and launches nothing."""

    def __init__(self) -> None:
        self.launchers = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.launchers += 1


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Driver]:
    """The only device of the process, with an empty cache of compiled kernels."""
    # Triton 3.9 warns where it is unset.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    found = _Driver()
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        monkeypatch.setattr("triton.runtime.driver._active", found)
        yield found


def _double(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, BLOCK)
    inside = columns < count
    tl.store(out + columns, 2 * tl.load(x + columns, mask=inside), mask=inside)


def _launch(kernel: Any, block: int, *, warm_up: bool = False) -> Any:
    x = torch.zeros(16)
    return kernel.run(x, x, 16, BLOCK=block, grid=(1,), warmup=warm_up, num_warps=4)


def test_launches_find_in_the_cache_what_was_compiled_ahead(device: _Driver) -> None:
    with KernelCompiler() as compiler:
        ahead: Any = JITFunction(_double)
        assert _launch(ahead, 16) is None
        assert _launch(ahead, 16) is None
        assert _launch(ahead, 32) is None
    assert compiler.num_kernels == device.launchers == 2
    hits = []
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda **facts: hits.append(facts["cache_hit"])
        for block in (16, 32, 64):
            assert _launch(ahead, block, warm_up=True) is not None
    assert hits == [True, True, False]


def test_a_compiler_knows_whether_a_start_before_has_compiled_its_kernels(device: _Driver) -> None:
    cached = []
    for blocks in ((16,), (16, 32), (32, 16)):
        kernel: Any = JITFunction(_double)
        with KernelCompiler() as compiler:
            for block in blocks:
                _launch(kernel, block)
                cached.append(compiler.wait_cached())
    assert cached == [False, True, False, True, True]


def test_weights_are_copied_while_kernels_compile(device: _Driver) -> None:
    both = threading.Barrier(2, timeout=10)

    def compile_kernel(function: Any, request: dict[str, Any]) -> None:
        both.wait()

    copies = WeightCopies()
    copies.add(both.wait)
    copies.start()
    with KernelCompiler(compile_kernel):
        _launch(JITFunction(_double), 16)
    copies.wait()


def test_a_kernel_that_fails_is_left_to_its_launch(
    device: _Driver, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: Any, request: dict[str, Any]) -> None:
        raise RuntimeError("no register is left")

    with KernelCompiler(fail):
        _launch(JITFunction(_double), 16)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.__dict__["reason"] == "no register is left"
    assert _launch(JITFunction(_double), 16, warm_up=True) is not None
