"""K/V cache of a one-layer draft head, and attention of few queries over it.

Rows made from real features are stable and kept; rows made from the head's own features are
appended behind them while a tree grows and dropped with it. S stored rows, Q query rows, nq/nkv
query/key-value heads, hd head dim, D draft rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import ResourceExhaustedError

_FIRST_CAPACITY = 256


class EagleKVBudget:
    """How many rows all sessions may hold together."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.used_rows = 0

    def reserve_rows(self, rows: int) -> None:
        """Reserve rows; ResourceExhaustedError if they are not there."""
        if self.used_rows + rows > self.max_rows:
            raise ResourceExhaustedError(
                f"draft K/V budget of {self.max_rows} rows is used up", reason="DRAFT_KV_EXHAUSTED"
            )
        self.used_rows += rows

    def return_rows(self, rows: int) -> None:
        """Return reserved rows."""
        self.used_rows -= rows


class EagleKV:
    """One session's keys and values, [nkv, capacity, hd] each, growing by doubling."""

    def __init__(
        self,
        budget: EagleKVBudget,
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._budget = budget
        self._shape = (2, num_kv_heads, head_dim)
        self._data = torch.empty((2, num_kv_heads, 0, head_dim), dtype=dtype, device=device)
        self.stable = 0
        """Rows built from real features."""
        self.rows = 0
        """Stable rows and the draft rows behind them."""

    def reserve(self, rows: int, *, ceiling: int) -> None:
        """Make room for `rows` in all; ResourceExhaustedError if the budget has none.

        Storage doubles, but not beyond `ceiling`, the most rows that could ever be asked for.
        """
        capacity = self._data.shape[2]
        if rows <= capacity:
            return
        grown = max(rows, min(max(2 * capacity, _FIRST_CAPACITY), ceiling))
        self._budget.reserve_rows(grown - capacity)
        planes, heads, head_dim = self._shape
        data = self._data.new_empty((planes, heads, grown, head_dim))
        data[:, :, : self.rows] = self._data[:, :, : self.rows]
        self._data = data

    def append_rows(self, keys: Tensor, values: Tensor) -> None:
        """Write rows [N, nkv, hd] behind the present ones; room must have been reserved."""
        end = self.rows + keys.shape[0]
        self._data[0, :, self.rows : end] = keys.transpose(0, 1)
        self._data[1, :, self.rows : end] = values.transpose(0, 1)
        self.rows = end

    def mark_stable(self) -> None:
        """Declare all present rows stable."""
        self.stable = self.rows

    def truncate(self, stable: int) -> None:
        """Drop all draft rows, and the stable ones from `stable` on."""
        self.stable = min(self.stable, stable)
        self.rows = self.stable

    def drop_rows(self, rows: int) -> None:
        """Drop all draft rows behind the first `rows` rows."""
        self.rows = rows

    def as_views(self) -> tuple[Tensor, Tensor]:
        """Keys and values, [nkv, S, hd] each, without a copy."""
        return self._data[0, :, : self.rows], self._data[1, :, : self.rows]

    def release(self) -> None:
        """Return everything to the budget; idempotent."""
        self._budget.return_rows(self._data.shape[2])
        self._data = self._data[:, :, :0]
        self.stable = self.rows = 0


def attend_parts(
    query_QNh: Tensor,
    parts: Sequence[tuple[Tensor, Tensor]],
    hidden_QD: Tensor | None = None,
) -> Tensor:
    """Grouped-head attention of Q rows, [Q, nq, hd]; softmax in fp32 or better.

    `parts`: keys and values, [nkv, *, hd] each, of the places where the rows lie. Every query sees
    all rows, but for those of the last D that `hidden_QD` (bool) hides from it.
    """
    num_rows, num_heads, head_dim = query_QNh.shape
    num_kv = parts[0][0].shape[0]
    group = num_heads // num_kv
    query = query_QNh.view(num_rows, num_kv, group, head_dim).transpose(0, 1)
    query = query.reshape(num_kv, num_rows * group, head_dim) * head_dim**-0.5
    scores = _joined([torch.bmm(query, keys.transpose(1, 2)) for keys, _ in parts])
    num_keys = scores.shape[2]
    if hidden_QD is not None and hidden_QD.shape[1]:
        tail = scores.view(num_kv, num_rows, group, num_keys)[..., -hidden_QD.shape[1] :]
        tail.masked_fill_(hidden_QD[None, :, None, :], float("-inf"))
    if scores.dtype in (torch.float16, torch.bfloat16):
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
    else:
        weights = torch.softmax(scores, dim=-1)
    first, others = parts[0], parts[1:]
    begin = first[0].shape[1]
    out = torch.bmm(weights[..., :begin] if others else weights, first[1])
    for keys, values in others:
        end = begin + keys.shape[1]
        out, begin = out.baddbmm(weights[..., begin:end], values), end
    out = out.view(num_kv, num_rows, group, head_dim)
    return out.transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
