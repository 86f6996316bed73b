"""Draft tokens on the path to a row, which penalties count as output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class OutputPath(NamedTuple):
    """Drafted tokens that count as output at the rows of a bucket."""

    columns: Tensor
    """int32 [B, W], rows of any stride but 1 in the last place: columns of the logits; -1 matches
    none."""
    mask: Tensor | None = None
    """uint8 [B, n, W], of any stride but 1 in the last place: 1 where row i of a session has token
    w on its path."""
    num_visible: int = 0
    """Without a mask, row i of a session has the first num_visible + i tokens on its path."""
