"""How long rounds on a device last, by their shapes, as measured at the start."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import (
    LEAST_MIXED_PIECES,
    MIXED_PIECE_BUCKETS,
    MOST_MIXED_PIECES,
    PIECE_TOKENS,
    Drafts,
    Judge,
    RoundShape,
)


class RoundTimes:
    """Seconds of rounds of a family; None of each until `learn`, and for ever without graphs."""

    def __init__(self, family: ShapeFamily, *, drafts_itself: bool, prompt_stretch: float) -> None:
        """`prompt_stretch`: how many times as long a round may last for the prompts in it."""
        self._family = family
        self._own = Drafts.OWN if drafts_itself else Drafts.NONE
        self._prompt_stretch = prompt_stretch
        self._seconds: Mapping[RoundShape, float] = {}
        self._plain: dict[tuple[int, bool, int, bool], float | None] = {}
        """What `plain_s` answered."""
        self._beside: dict[int, int] = {}
        """Prompt tokens beside so many rows, once asked for."""

    def learn(self, seconds: Mapping[RoundShape, float]) -> None:
        """Seconds of each shape of the family."""
        self._seconds = seconds
        self._beside.clear()
        self._plain.clear()

    def plain_s(
        self, rows: int, *, own: bool, pieces: int = 0, featured: bool = False
    ) -> float | None:
        """Seconds of a round without drafts from outside, with own ones or none; `featured`:
        of which features are kept."""
        asked = rows, own, pieces, featured
        if asked not in self._plain:
            drafts = Drafts.OWN if own else Drafts.NONE
            self._plain[asked] = self._of(rows, 1, drafts, pieces, featured=featured)
        return self._plain[asked]

    def drafted_s(self, rows: int, nodes: int) -> float | None:
        """Seconds of a round that verifies so many nodes of each row from outside."""
        return self._of(rows, nodes, Drafts.CHAIN)

    def prompt_tokens_beside(self, rows: int, crowded: bool = False) -> int:
        """Prompt tokens that a round takes in which `rows` sessions decode: so many pieces that it
        lasts at most `prompt_stretch` times as long as without; at least the fewest that any round
        has, and all that there is room for where prompts are `crowded`."""
        if crowded:
            return MOST_MIXED_PIECES * PIECE_TOKENS
        found = self._beside.get(rows)
        if found is None:
            found = self._beside[rows] = self._pieces_beside(rows) * PIECE_TOKENS
        return found

    def _pieces_beside(self, rows: int) -> int:
        lasts = partial(self._of, rows, 1, self._own)
        alone, most = lasts(0), LEAST_MIXED_PIECES
        for pieces in MIXED_PIECE_BUCKETS:
            took = lasts(pieces)
            if alone is None or took is None or took <= self._prompt_stretch * alone:
                most = max(most, pieces)
        return most

    def _of(
        self, rows: int, nodes: int, drafts: Drafts, pieces: int = 0, *, featured: bool = False
    ) -> float | None:
        if not self._seconds:
            return None
        shape = self._family.fit(
            rows=rows,
            nodes=nodes,
            drafts=drafts,
            judge=Judge.MATCH,
            features=featured,
            pieces=pieces,
        )
        return self._seconds.get(shape)
