"""EagleForest: rows of an EAGLE head, run from the host for several sessions at once.

Row i pairs feature f_i with token t_{i+1} at draft position i. Rows made from real features are
written first (catch-up). The last real row of a session is its live row, the root of its draft
rows. With n real rows, draft rows of level d are at position n + d - 1 and take the output x of
their parent row as their feature. `EagleKV` is the KV cache of a session: rows made from real
features are stable and kept; draft rows are appended behind them and dropped with their trees.

Letters in shapes: N rows; H hidden size; L sessions; S stored rows; Q query rows; D draft rows; nq
and nkv query and key/value heads; hd head dimension; Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.heads import DraftHead
from outrider.errors import ResourceExhaustedError
from outrider_drafter.proposers.forest import DraftForest, StepRows

_MAX_ROWS: Final = 8192
"""Maximum number of draft rows of one session if they are stored apart from its KV."""
_FIRST_CAPACITY = 256


class EagleKVBudget:
    """Limit on the number of KV rows that all sessions together hold."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.used_rows = 0

    def reserve_rows(self, rows: int) -> None:
        """Reserve rows. Raises ResourceExhaustedError if too few rows are left."""
        if self.used_rows + rows > self.max_rows:
            raise ResourceExhaustedError(
                f"draft KV budget of {self.max_rows} rows is used up", reason="DRAFT_KV_EXHAUSTED"
            )
        self.used_rows += rows

    def return_rows(self, rows: int) -> None:
        """Free a number of rows that `reserve_rows` reserved."""
        self.used_rows -= rows


class EagleKV:
    """Keys and values of one session, [nkv, capacity, hd] each. The capacity grows by doubling."""

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
        """Number of rows that were made from features of the target. Draft rows come after them."""
        self.rows = 0
        """Number of stable rows and draft rows together."""

    def reserve(self, rows: int, *, ceiling: int) -> None:
        """Ensure capacity for `rows` rows in total. Raises ResourceExhaustedError if the budget has
        too few rows left.

        The capacity doubles, but not beyond `ceiling`, the maximum number of rows that the session
        can ever need.
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
        """Append keys and values [N, nkv, hd]. The capacity must have been reserved."""
        end = self.rows + keys.shape[0]
        self._data[0, :, self.rows : end] = keys.transpose(0, 1)
        self._data[1, :, self.rows : end] = values.transpose(0, 1)
        self.rows = end

    def mark_stable(self) -> None:
        """Mark all current rows as stable."""
        self.stable = self.rows

    def truncate(self, stable: int) -> None:
        """Drop all draft rows, and all stable rows with index >= `stable`."""
        self.stable = min(self.stable, stable)
        self.rows = self.stable

    def drop_rows(self, rows: int) -> None:
        """Drop all but the first `rows` rows."""
        self.rows = rows

    def as_views(self) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values, [nkv, S, hd] each."""
        return self._data[0, :, : self.rows], self._data[1, :, : self.rows]

    def release(self) -> None:
        """Free all rows and return them to the budget; idempotent."""
        self._budget.return_rows(self._data.shape[2])
        self._data = self._data[:, :, :0]
        self.stable = self.rows = 0


def attend_parts(
    query_QNh: Tensor,
    parts: Sequence[tuple[Tensor, Tensor]],
    hidden_QD: Tensor | None = None,
) -> Tensor:
    """Return the grouped-query attention output of Q rows, [Q, nq, hd]; the softmax is computed in
    at least fp32.

    `parts`: pairs of keys and values, [nkv, *, hd] each, that are attended to as if concatenated.
    `hidden_QD` (bool [Q, D]): True where a query does not attend to one of the last D keys. Every
    query attends to all other keys.
    """
    num_rows, num_heads, head_dim = query_QNh.shape
    num_kv = parts[0][0].shape[0]
    group = num_heads // num_kv
    query = query_QNh.view(num_rows, num_kv, group, head_dim).transpose(0, 1)
    query = query.reshape(num_kv, num_rows * group, head_dim) * head_dim**-0.5
    scores = _joined([torch.bmm(query, keys.transpose(1, 2)) for keys, _ in parts], dim=2)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CatchUpRows:
    """New KV rows of one session, made from features of the target. They follow the session's
    stable rows."""

    kv: EagleKV
    token_ids: Tensor
    """int64 [m]: token t_{i+1} of each row."""
    features: Tensor
    """[m, H]: feature f_i of each row."""


class _WrittenRows(NamedTuple):
    """Rows whose KV was written, with the values that the rest of the block needs."""

    inputs: Tensor
    features: Tensor
    positions: Tensor

    def select(self, rows: NDArray[np.int64]) -> _WrittenRows:
        """Return some of the rows, whose indices must be ascending."""
        if len(rows) == self.positions.shape[0]:
            return self
        at = torch.from_numpy(rows).to(self.positions.device)
        return _WrittenRows(self.inputs[at], self.features[at], self.positions[at])


def write_catch_up_rows(head: DraftHead, rows: Sequence[CatchUpRows]) -> _WrittenRows:
    """Write the KV of rows that were made from features of the target, and mark these rows as
    stable. No logits are computed. Return the inputs from which the outputs of these rows can be
    computed."""
    tokens = _joined([r.token_ids for r in rows])
    features = _joined([r.features for r in rows])
    sizes = [r.token_ids.shape[0] for r in rows]
    starts = np.array([r.kv.stable for r in rows])
    within = np.arange(sum(sizes)) - np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    positions = torch.from_numpy(np.repeat(starts, sizes) + within).to(tokens.device)
    inputs = head.inputs(tokens, features)
    keys, values = head.kv(inputs, features, positions)
    offset = 0
    for row, size in zip(rows, sizes, strict=True):
        row.kv.append_rows(keys[offset : offset + size], values[offset : offset + size])
        row.kv.mark_stable()
        offset += size
    return _WrittenRows(inputs, features, positions)


class EagleForest(DraftForest):
    """`DraftForest` of an EAGLE head. Its draft rows are below the live (newest) rows of several
    sessions."""

    def __init__(
        self,
        head: DraftHead,
        rows: Sequence[CatchUpRows],
        *,
        max_context: int,
        in_own_memory: bool = False,
    ) -> None:
        """Run the new rows of each session in `rows`; the last one becomes the session's live row.

        `max_context`: maximum number of draft positions of a session. `in_own_memory`: whether
        draft rows are stored apart, so that the sessions' KV and budget do not change. Otherwise
        draft rows are appended to the session's KV, where capacity must have been reserved.
        """
        self._kvs = [r.kv for r in rows]
        written = write_catch_up_rows(head, rows)
        super().__init__([kv.stable for kv in self._kvs])
        self.target_ids = head.target_ids
        self._head = head
        self._max_context = max_context
        self._drafts = [_empty_like(kv) for kv in self._kvs] if in_own_memory else self._kvs
        """KV to which the draft rows of each session are appended."""
        self._first_drafts = [kv.rows for kv in self._drafts]
        """Number of rows in that KV before the first draft row, for each session."""
        live = written.select(np.cumsum([r.token_ids.shape[0] for r in rows]) - 1)
        spans = [StepRows(owner, owner, 1, None) for owner in range(len(rows))]
        self._x = self._finish(live, spans)
        """[rows, H]: output of each row, which is the feature of its children."""
        self._root_logits = head.logits(self._x)

    def root_logits(self) -> Tensor:
        """Return the draft logits of the live row of each session, [sessions, draft vocabulary]."""
        return self._root_logits

    def rows_left(self, owner: int) -> int:
        """Return how many more draft rows can be added below root `owner`. The limit is far more
        than a launch needs."""
        return _MAX_ROWS - self._drafts[owner].rows

    def levels_left(self, owner: int) -> int:
        """Return the maximum number of levels below root `owner` that the head's positions
        allow."""
        return self._max_context - self._kvs[owner].stable + 1

    def _run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[StepRows],
    ) -> Tensor:
        head, device = self._head, self._x.device
        features = self._x[torch.tensor(parents, device=device)]
        where = torch.tensor(positions, device=device)
        inputs = head.inputs(torch.tensor(tokens, device=device), features)
        keys, values = head.kv(inputs, features, where)
        for owner, first, size, _ in spans:
            drafts, rows = self._drafts[owner], slice(first, first + size)
            if drafts is not self._kvs[owner]:
                drafts.reserve(drafts.rows + size, ceiling=_MAX_ROWS)
            drafts.append_rows(keys[rows], values[rows])
        x = self._finish(_WrittenRows(inputs, features, where), spans)
        self._x = torch.cat((self._x, x))
        return head.logits(x)

    def _finish(self, written: _WrittenRows, spans: Sequence[StepRows]) -> Tensor:
        """Run the block after its KV write and return x [N, H]. `spans` assigns the rows to
        sessions."""
        query = self._head.query(written.inputs, written.positions)
        outs = []
        for owner, first, size, visible in spans:
            hidden = None if visible is None else torch.from_numpy(~visible).to(query.device)
            outs.append(attend_parts(query[first : first + size], self._parts(owner), hidden))
        residual = self._head.residual(written.inputs, written.features)
        return self._head.finish(residual, _joined(outs))

    def _parts(self, owner: int) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of a session's rows and, if they are stored apart, of its
        draft rows."""
        kv, drafts = self._kvs[owner], self._drafts[owner]
        apart = drafts is not kv and drafts.rows
        return [kv.as_views(), drafts.as_views()] if apart else [kv.as_views()]

    def _drop(self, kept: Sequence[int]) -> None:
        self._x = self._x[: len(self)]
        for drafts, first, rows in zip(self._drafts, self._first_drafts, kept, strict=True):
            drafts.drop_rows(first + rows)


def _empty_like(kv: EagleKV) -> EagleKV:
    """Return empty KV for the draft rows of a session, apart from the session's own KV."""
    keys, _ = kv.as_views()
    return EagleKV(
        EagleKVBudget(_MAX_ROWS),
        num_kv_heads=keys.shape[0],
        head_dim=keys.shape[2],
        dtype=keys.dtype,
        device=keys.device,
    )


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=dim)
