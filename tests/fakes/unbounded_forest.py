"""A draft forest without limits, to be completed with a model."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_drafter.proposers.forest import DraftForest


class UnboundedForest(DraftForest):
    """Rows and levels are always left, and no rows are kept that would have to be dropped."""

    def rows_left(self, owner: int) -> int:
        return 1 << 20

    def levels_left(self, owner: int) -> int:
        return 1 << 20

    def _drop(self, kept: Sequence[int]) -> None:
        pass
