"""Uploads that are not tied to rounds, of which any number can be under way."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(array: NDArray[np.int32], out: Tensor) -> None:
    """Copy `array` [n] into `out` int32 [n], in the order of the stream; `array` is free at once.

    On a CUDA device each call takes pinned memory of its own, so nothing waits and nothing is
    overwritten: torch gives such memory out again only when the copies from it are done.
    """
    source = torch.from_numpy(array)
    if out.is_cuda:
        source = source.pin_memory()
    out.copy_(source, non_blocking=True)
