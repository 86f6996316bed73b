"""Batched steps of an EAGLE head over sessions: catch-up rows, then one tree level after another.

Draft row i pairs (f_i, t_{i+1}) at draft position i; with n real rows, nodes of level d sit at
position n + d - 1 and take their parent's x as feature. N rows, H hidden, D draft rows of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.heads import DraftHead
from outrider_drafter.proposers.eagle_kv import EagleKV, attend_rows
from outrider_drafter.proposers.tree_growth import StepFrontier
from outrider_drafter.proposers.tree_visibility import TreeVisibility


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
