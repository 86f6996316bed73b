"""Round durations on the device by batch shape, as measured at startup."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import AcceptanceMode, DraftKind, RoundShape


class MeasuredRoundTimes:
    """Measured round durations of a shape family, in seconds. All are None before
    `set_measurements`, and always without CUDA graphs."""

    def __init__(self, family: ShapeFamily) -> None:
        self._family = family
        self._seconds: Mapping[RoundShape, float] = {}
        self._plain: dict[tuple[int, int, int], float | None] = {}
        """Cached results of `plain_s`."""

    def set_measurements(self, seconds: Mapping[RoundShape, float]) -> None:
        """Set the duration of each shape of the family, in seconds."""
        self._seconds = seconds
        self._plain.clear()

    def plain_s(self, rows: int, *, own_nodes: int = 0, chunks: int = 0) -> float | None:
        """Return the seconds of a round without proposals; None if unknown. `own_nodes` is the
        number of nodes of rows with in-process drafts, or 0."""
        asked = rows, own_nodes, chunks
        if asked not in self._plain:
            drafts = DraftKind.IN_PROCESS if own_nodes else DraftKind.NONE
            nodes = own_nodes or 1
            self._plain[asked] = self._of(rows, nodes, drafts, chunks)
        return self._plain[asked]

    def drafted_round_s(self, rows: int, nodes: int) -> float | None:
        """Return the seconds of a round that verifies proposals of `nodes` nodes in each row; None
        if unknown."""
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
