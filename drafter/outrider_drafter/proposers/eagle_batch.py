"""Batched steps of an EAGLE head over sessions: catch-up rows, then one tree level after another.

Draft row i pairs (f_i, t_{i+1}) at draft position i; with n real rows, nodes of level d sit at
position n + d - 1 and take their parent's x as feature. `EagleKV` is the K/V cache of a session:
rows made from real features are stable and kept; rows made from the head's own features are
appended behind them while a tree grows and dropped with it. `EagleForest` runs several trees below
a session's live rows. N rows, H hidden, D draft rows of a slot, S stored rows, Q query rows, nq/nkv
query/key-value heads, hd head dim, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from outrider.engine.heads import DraftHead
from outrider.errors import ResourceExhaustedError
from outrider_drafter.proposers.forest import DraftForest, StepRows, TreeVisibility
from outrider_drafter.proposers.tree_growth import StepFrontier

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

    def as_views(self) -> tuple[Tensor, Tensor]:
        """Keys and values, [nkv, S, hd] each, without a copy."""
        return self._data[0, :, : self.rows], self._data[1, :, : self.rows]

    def release(self) -> None:
        """Return everything to the budget; idempotent."""
        self._budget.return_rows(self._data.shape[2])
        self._data = self._data[:, :, :0]
        self.stable = self.rows = 0


def attend_rows(
    query_QNh: Tensor, keys_GSh: Tensor, values_GSh: Tensor, hidden_QD: Tensor | None = None
) -> Tensor:
    """Grouped-head attention of Q rows, [Q, nq, hd]; softmax in fp32 or better.

    Every query sees all rows, but for those of the last D that `hidden_QD` (bool) hides from it.
    """
    return attend_parts(query_QNh, [(keys_GSh, values_GSh)], hidden_QD)


def attend_parts(
    query_QNh: Tensor,
    parts: Sequence[tuple[Tensor, Tensor]],
    hidden_QD: Tensor | None = None,
) -> Tensor:
    """`attend` over rows that lie in several places: keys and values, [nkv, *, hd], of each."""
    num_rows, num_heads, head_dim = query_QNh.shape
    num_kv = parts[0][0].shape[0]
    group = num_heads // num_kv
    query = query_QNh.view(num_rows, num_kv, group, head_dim).transpose(0, 1)
    query = query.reshape(num_kv, num_rows * group, head_dim) * head_dim**-0.5
    scores = _join_keys([torch.bmm(query, keys.transpose(1, 2)) for keys, _ in parts])
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


def _join_keys(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CatchUpRows:
    """New rows of one session, made from real features; they follow the stable ones."""

    kv: EagleKV
    token_ids: Tensor
    """[m] t_{i+1}, int64."""
    features: Tensor
    """[m, H] f_i."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WrittenRows:
    """Rows after their K/V write: what the rest of the block still needs."""

    inputs: Tensor
    features: Tensor
    positions: Tensor


def write_catch_up_rows(head: DraftHead, rows: Sequence[CatchUpRows]) -> _WrittenRows:
    """Write the K/V of real rows and declare them stable. Nothing else is computed for them."""
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
    return _WrittenRows(inputs=inputs, features=features, positions=positions)


class EagleBatch:
    """Sessions whose trees grow together through an EAGLE head; a `TreeDraftModel`."""

    def __init__(self, head: DraftHead, rows: Sequence[CatchUpRows]) -> None:
        """Catch up on `rows`; the last row of each slot is its live one."""
        self.target_ids: Tensor | None = head.target_ids
        self._head = head
        self._kvs = [r.kv for r in rows]
        written = write_catch_up_rows(head, rows)
        ends = np.cumsum([r.token_ids.shape[0] for r in rows])
        live = None
        if len(ends) < written.positions.shape[0]:
            live = torch.from_numpy(ends - 1).to(written.positions.device)
        self._x = self._finish(_pick(written, live), [(kv, 1, None) for kv in self._kvs])
        self._first_row = dict(enumerate(range(len(rows))))
        """First row of each slot in the previous step."""
        self._ancestry = TreeVisibility()
        self._level = 0

    @property
    def features(self) -> Tensor:
        """x [R, H] of the rows run last; at first, of the live ones."""
        return self._x

    def root_logits(self) -> Tensor:
        """Logits [slots, Vd] of the live rows."""
        return self._head.logits(self._x)

    def step(self, frontiers: Sequence[tuple[int, StepFrontier]]) -> Tensor:
        """Run the frontier rows of some slots; logits [R, Vd]."""
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        first_row: dict[int, int] = {}
        for slot, frontier in frontiers:
            first_row[slot] = len(tokens)
            tokens += frontier.tokens
            parents += [self._first_row[slot] + p for p in frontier.parents]
            depths += [self._kvs[slot].stable + self._level] * len(frontier.tokens)
        device = self._x.device
        unchanged = parents == list(range(self._x.shape[0]))
        features = self._x if unchanged else self._x[torch.tensor(parents, device=device)]
        positions = torch.tensor(depths, device=device)
        inputs = self._head.inputs(torch.tensor(tokens, device=device), features)
        keys, values = self._head.kv(inputs, features, positions)
        spans = []
        for slot, frontier in frontiers:
            first, size = first_row[slot], len(frontier.tokens)
            self._kvs[slot].append_rows(keys[first : first + size], values[first : first + size])
            spans.append((self._kvs[slot], size, self._hidden(slot, frontier)))
        written = _WrittenRows(inputs=inputs, features=features, positions=positions)
        self._x = self._finish(written, spans)
        self._first_row = first_row
        self._level += 1
        return self._head.logits(self._x)

    def _hidden(self, slot: int, frontier: StepFrontier) -> Tensor | None:
        """Which draft rows [rows, D] each new row must not see; None if it sees all."""
        visible = self._ancestry.add_rows(slot, frontier)
        return None if visible is None else torch.from_numpy(~visible).to(self._x.device)

    def _finish(
        self, written: _WrittenRows, spans: Sequence[tuple[EagleKV, int, Tensor | None]]
    ) -> Tensor:
        """The block after its K/V write: x [R, H]; `spans` say whose cache each row reads."""
        query = self._head.query(written.inputs, written.positions)
        outs, first = [], 0
        for kv, size, hidden in spans:
            keys, values = kv.as_views()
            outs.append(attend_rows(query[first : first + size], keys, values, hidden))
            first += size
        residual = self._head.residual(written.inputs, written.features)
        return self._head.finish(residual, _joined(outs))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _pick(written: _WrittenRows, rows: Tensor | None) -> _WrittenRows:
    if rows is None:
        return written
    return _WrittenRows(
        inputs=written.inputs[rows],
        features=written.features[rows],
        positions=written.positions[rows],
    )


_MAX_ROWS: Final = 8192
"""Draft rows of one session at a time."""


class EagleForest(DraftForest):
    """A `DraftForest` of an EAGLE head, with draft rows in memory of its own.

    Sessions' rows stay as they are, and so does their share of the K/V budget.
    """

    def __init__(
        self, head: DraftHead, batch: EagleBatch, kvs: Sequence[EagleKV], *, max_context: int
    ) -> None:
        """`batch` has just run the live rows of the sessions whose stable rows are `kvs`."""
        super().__init__([kv.stable for kv in kvs])
        self.target_ids = head.target_ids
        self._head = head
        self._kvs = kvs
        self._max_context = max_context
        self._x = batch.features
        """[rows, H]: what each row hands on to those below it."""
        self._logits = batch.root_logits()
        self._drafts = [
            EagleKV(
                EagleKVBudget(_MAX_ROWS),
                num_kv_heads=head.config.num_kv_heads,
                head_dim=head.config.head_dim,
                dtype=kv.as_views()[0].dtype,
                device=kv.as_views()[0].device,
            )
            for kv in kvs
        ]

    def root_logits(self) -> Tensor:
        """Logits [L, Vd] of the live rows."""
        return self._logits

    def rows_left(self, owner: int) -> int:
        """Far more than a launch has."""
        return _MAX_ROWS - self._drafts[owner].rows

    def levels_left(self, owner: int) -> int:
        """As positions allow."""
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
        query = head.query(inputs, where)
        outs = []
        for owner, first, size, visible in spans:
            drafts, rows = self._drafts[owner], slice(first, first + size)
            drafts.reserve(drafts.rows + size, ceiling=_MAX_ROWS)
            drafts.append_rows(keys[rows], values[rows])
            hidden = torch.from_numpy(~visible).to(device)
            stable = self._kvs[owner].as_views()
            outs.append(attend_parts(query[rows], [stable, drafts.as_views()], hidden))
        x = head.finish(head.residual(inputs, features), torch.cat(outs))
        self._x = torch.cat((self._x, x))
        return head.logits(x)

    def _drop(self, kept: Sequence[int]) -> None:
        self._x = self._x[: len(self)]
        for drafts, rows in zip(self._drafts, kept, strict=True):
            drafts.mark_stable()
            drafts.truncate(rows)
