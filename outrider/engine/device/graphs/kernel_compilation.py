"""Compilation of the kernels of many graphs at once, before the first of them is captured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.trial_capture import TrialCapture
from outrider.engine.kernels.compile_ahead import KernelCompiler
from outrider.engine.kernels.linear.launch import product_workspace
from outrider.errors import OutriderError

logger = logging.getLogger(__name__)


def compile_kernels(
    graphs: GraphCache, device: torch.device, run: Callable[[Callable[[], bool]], None]
) -> None:
    """Compile, in parallel and into Triton's cache on disk, the kernels of the graphs of `run`.

    `run` calls `graphs.run_graph` for graphs that are not captured, with any inputs: nothing is
    executed, so that weights need not be loaded yet. Its argument is `KernelCompiler.wait_cached`:
    with it, `run` can leave out graphs whose kernels are surely cached. What cannot be learnt in
    this way is compiled by the first run of its graph, as without this. Nothing happens where
    graphs are off.
    """
    if not graphs.enabled:
        return
    began = time.monotonic()
    product_workspace(device)
    compiler = KernelCompiler()
    try:
        with compiler:
            trial = TrialCapture(device)
            with graphs.capture_by(trial):
                run(compiler.wait_cached)
            del trial
            facts = {"kernels": compiler.num_kernels, "asked_s": round(time.monotonic() - began, 1)}
            logger.info("compiling kernels", extra=facts)
    except OutriderError:
        raise
    except Exception as error:  # Triton's and CUDA's errors have no class in common
        # It saves time and nothing else; what fails for good fails in the first run, too.
        logger.warning("kernels not compiled ahead", extra={"reason": str(error)})
    torch.cuda.empty_cache()
    seconds = round(time.monotonic() - began, 1)
    logger.info("kernels compiled", extra={"kernels": compiler.num_kernels, "seconds": seconds})
