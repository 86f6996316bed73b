"""Draft tokens on the path to a row, which penalties count as output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class OutputPath(NamedTuple):
    """For each row of a launch, the draft tokens before it, which penalties count as output."""

    columns: Tensor
    """int32 [B, W], last dimension contiguous: columns of the logits; -1 for none."""
    mask: Tensor | None = None
    """uint8 [B, n, W], last dimension contiguous: 1 if row i of a session has token w on its
    path."""
    num_visible: int = 0
    """Without a mask, the path of row i of a session consists of the first num_visible + i
    tokens."""
