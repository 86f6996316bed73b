"""Compiles the kernels of many graphs in parallel, before the first graph is captured."""

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
    """Compile the kernels of all graphs that `run` requests, in parallel, into Triton's cache on
    disk.

    `run` requests a graph by a call of `graphs.run_graph`, with any inputs. No kernel is executed,
    so weights need not be loaded yet. The argument of `run` is `KernelCompiler.wait_cached`, with
    which `run` can skip graphs whose kernels are already cached. Kernels that are not found in this
    way are compiled later, by the first run of their graph. Does nothing if graphs are disabled.
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
        # Compiling ahead only saves time; a lasting error occurs again in the first run.
        logger.warning("kernels not compiled ahead", extra={"reason": str(error)})
    torch.cuda.empty_cache()
    seconds = round(time.monotonic() - began, 1)
    logger.info("kernels compiled", extra={"kernels": compiler.num_kernels, "seconds": seconds})
