"""Round durations on the device by batch shape, as measured at startup."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import (
    CHUNK_TOKENS,
    MAX_MIXED_CHUNKS,
    MIN_MIXED_CHUNKS,
    MIXED_CHUNK_BUCKETS,
    AcceptanceMode,
    DraftKind,
    RoundShape,
)


class MeasuredRoundTimes:
    """Seconds of the rounds of a shape family.

    None for each until `set_measurements`, and always without graphs.
    """

    def __init__(
        self, family: ShapeFamily, *, drafts_itself: bool, max_prefill_slowdown: float
    ) -> None:
        """`max_prefill_slowdown`: how many times as long a round may last for the prompts in it."""
        self._family = family
        self._own = DraftKind.IN_PROCESS if drafts_itself else DraftKind.NONE
        self._prompt_stretch = max_prefill_slowdown
        self._seconds: Mapping[RoundShape, float] = {}
        self._plain: dict[tuple[int, bool, int, bool], float | None] = {}
        """What `plain_round_s` answered."""
        self._beside: dict[int, int] = {}
        """Prompt tokens beside so many rows, once asked for."""

    def set_measurements(self, seconds: Mapping[RoundShape, float]) -> None:
        """Seconds of each shape of the family."""
        self._seconds = seconds
        self._beside.clear()
        self._plain.clear()

    def plain_s(
        self, rows: int, *, own: bool, chunks: int = 0, featured: bool = False
    ) -> float | None:
        """Seconds of a round without drafts from outside, with own ones or none; `featured`:
        of which features are kept."""
        asked = rows, own, chunks, featured
        if asked not in self._plain:
            drafts = DraftKind.IN_PROCESS if own else DraftKind.NONE
            self._plain[asked] = self._of(rows, 1, drafts, chunks, featured=featured)
        return self._plain[asked]

    def drafted_round_s(self, rows: int, nodes: int) -> float | None:
        """Seconds of a round that verifies so many nodes of each row from outside."""
        return self._of(rows, nodes, DraftKind.CHAIN)

    def prompt_tokens_beside(self, rows: int, crowded: bool = False) -> int:
        """Prompt tokens that a round takes in which `rows` sessions decode: so many pieces that it
        lasts at most `max_prefill_slowdown` times as long as without; at least the fewest that any
        round has, and all that there is room for where prompts are `crowded`."""
        if crowded:
            return MAX_MIXED_CHUNKS * CHUNK_TOKENS
        found = self._beside.get(rows)
        if found is None:
            found = self._beside[rows] = self._chunks_beside(rows) * CHUNK_TOKENS
        return found

    def _chunks_beside(self, rows: int) -> int:
        lasts = partial(self._of, rows, 1, self._own)
        alone, most = lasts(0), MIN_MIXED_CHUNKS
        for chunks in MIXED_CHUNK_BUCKETS:
            took = lasts(chunks)
            if alone is None or took is None or took <= self._prompt_stretch * alone:
                most = max(most, chunks)
        return most

    def _of(
        self, rows: int, nodes: int, drafts: DraftKind, chunks: int = 0, *, featured: bool = False
    ) -> float | None:
        if not self._seconds:
            return None
        shape = self._family.fit_shape(
            rows=rows,
            nodes=nodes,
            draft_kind=drafts,
            acceptance_mode=AcceptanceMode.MATCH,
            has_features=featured,
            chunks=chunks,
        )
        return self._seconds.get(shape)
