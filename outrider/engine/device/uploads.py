"""Uploads that are not tied to rounds, of which any number can be under way."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(out: Tensor, *parts: NDArray[np.int32]) -> None:
    """Copy `parts`, one behind the other, into `out` int32 [n], n being all their words, in the
    order of the stream; they are free at once.

    On a CUDA device each call takes pinned memory of its own, so nothing waits and nothing is
    overwritten: torch gives such memory out again only when the copies from it are done. It is
    written by numpy: torch would wake its pool of threads for more than 32,768 words, which took up
    to 5 ms of a round.
    """
    staged = torch.empty(out.shape[0], dtype=torch.int32, pin_memory=out.is_cuda)
    words, end = staged.numpy(), 0
    for part in parts:
        start, end = end, end + part.size
        words[start:end] = part.reshape(-1)
    assert end == len(words)
    out.copy_(staged, non_blocking=True)
