"""EagleForest: draft rows of an EAGLE head for several trees at once, below sessions' live rows.

H hidden, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from outrider.engine.heads import DraftHead
from outrider_drafter.proposers.eagle_batch import EagleBatch
from outrider_drafter.proposers.eagle_kv import EagleKV, EagleKVBudget, attend_parts
from outrider_drafter.proposers.forest import DraftForest, StepRows

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
