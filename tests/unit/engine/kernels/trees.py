"""Random draft trees, block tables and a plain reading of what the kernels should do with them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROOT, PADDING = -1, -2


def random_parents(rng: np.random.Generator, num_drafts: int, *, padded: int = 0) -> list[int]:
    """Parents of a random tree; the last `padded` nodes are not there."""
    real = [int(rng.integers(ROOT, node)) for node in range(num_drafts - padded)]
    return real + [PADDING] * padded


class Paging(NamedTuple):
    """Sessions whose blocks lie scattered in a pool; the last session is the padding one."""

    tables: Tensor
    """int32 [X, T]."""
    slots: Tensor
    """int32 [B]: sessions in another order than their slots."""
    num_pool_slots: int

    def pool_slots(self, row: int, block_tokens: int) -> NDArray[np.int64]:
        """Pool slots of bucket row `row`, in logical order."""
        blocks = self.tables[int(self.slots[row])].numpy().astype(np.int64)
        return (blocks[:, None] * block_tokens + np.arange(block_tokens)).ravel()


def scattered(rng: np.random.Generator, batch: int, width: int, block_tokens: int) -> Paging:
    """Tables of `batch` sessions and the padding session, `width` blocks each, no block twice."""
    num_blocks = (batch + 1) * width + 3
    blocks = rng.permutation(num_blocks)[: (batch + 1) * width].reshape(batch + 1, width)
    slots = rng.permutation(batch + 1)[:batch]
    return Paging(
        torch.from_numpy(blocks.astype(np.int32)),
        torch.from_numpy(slots.astype(np.int32)),
        num_blocks * block_tokens,
    )
