"""Draft tokens on the path to a row, which penalties count as output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class OutputPath(NamedTuple):
    """For each row of logits, the draft tokens between the root and the row's position. Penalties
    treat them like tokens of the output.

    Shapes: B sessions with n rows each, W draft tokens per session.
    """

    columns: Tensor
    """int32 [B, W], last dimension contiguous: the column of each draft token in the logits; -1 for
    absent tokens."""
    mask: Tensor | None = None
    """uint8 [B, n, W], last dimension contiguous: entry (b, i, w) is 1 if draft token w is on the
    path of row i."""
    num_visible: int = 0
    """Used if `mask` is None: the path of row i of a session is its first num_visible + i draft
    tokens."""
