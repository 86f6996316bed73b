"""Round durations on the device by batch shape, as measured at startup."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import AcceptanceMode, DraftKind, RoundShape


class MeasuredRoundTimes:
    """Round durations, in seconds, that warm-up measured for the shapes of a `ShapeFamily`. All
    results are None before `set_measurements`, which is never called without CUDA graphs."""

    def __init__(self, family: ShapeFamily) -> None:
        self._family = family
        self._seconds: Mapping[RoundShape, float] = {}
        self._plain: dict[tuple[int, int, int], float | None] = {}
        """Results of `plain_s` by (rows, own_nodes, chunks)."""

    def set_measurements(self, seconds: Mapping[RoundShape, float]) -> None:
        """Set the measured duration, in seconds, of each shape of the family."""
        self._seconds = seconds
        self._plain.clear()

    def plain_s(self, rows: int, *, own_nodes: int = 0, chunks: int = 0) -> float | None:
        """Return the duration, in seconds, of a round with `rows` decode rows and `chunks` prefill
        chunks and without proposals; None if it was not measured. `own_nodes` is the number of
        nodes of each row with an in-process draft, including the root; 0 means that rows have no
        drafts."""
        asked = rows, own_nodes, chunks
        if asked not in self._plain:
            drafts = DraftKind.IN_PROCESS if own_nodes else DraftKind.NONE
            nodes = own_nodes or 1
            self._plain[asked] = self._of(rows, nodes, drafts, chunks)
        return self._plain[asked]

    def drafted_round_s(self, rows: int, nodes: int) -> float | None:
        """Return the duration, in seconds, of a round of `rows` rows that verify proposals of
        `nodes` nodes each, including the root; None if it was not measured."""
        return self._of(rows, nodes, DraftKind.CHAIN)

    def _of(self, rows: int, nodes: int, drafts: DraftKind, chunks: int = 0) -> float | None:
        if not self._seconds:
            return None
        shape = self._family.fit_shape(
            rows=rows,
            nodes=nodes,
            draft_kind=drafts,
            acceptance_mode=AcceptanceMode.MATCH,
            has_features=False,
            chunks=chunks,
        )
        return self._seconds.get(shape)
