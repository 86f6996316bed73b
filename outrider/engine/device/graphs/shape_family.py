"""The bounded family of shapes that a device's rounds run in (pure).

All of it is captured before the first request; no request can widen it.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.engine.device.graphs.shapes import (
    CHAIN_BUCKETS,
    FEW_CHAIN_BUCKETS,
    FEW_TREE_BUCKETS,
    MIXED_CHAIN_BUCKETS,
    MIXED_PIECE_BUCKETS,
    MIXED_ROW_BUCKETS,
    MOST_TOKEN_ROWS,
    PIECE_BUCKETS,
    ROW_BUCKETS,
    TREE_BUCKETS,
    Drafts,
    Judge,
    RoundShape,
    bucket,
    up_to,
)


class ShapeFamily:
    """The shapes of one engine."""

    def __init__(
        self, *, max_rows: int, max_nodes: int, own_nodes: int, features: bool, judges: bool
    ) -> None:
        """`max_rows`: most sessions of a round; `max_nodes`: most nodes of a row with drafts from
        outside, the root included, 1 if there are none; `own_nodes`: nodes of a row with own
        drafts, 0 without. With them drafts from outside (a lookup's, say) are the exception, and
        have few sizes; `features`: whether a projection is there; `judges`: whether rules that
        toss coins are served."""
        self._max_rows = max_rows
        self._max_nodes = max_nodes
        self._own_nodes = own_nodes
        self._chain_sizes = FEW_CHAIN_BUCKETS if own_nodes else CHAIN_BUCKETS
        self._tree_sizes = FEW_TREE_BUCKETS if own_nodes else TREE_BUCKETS
        self._features = features
        self._judges = (Judge.MATCH, Judge.SAMPLED) if judges else (Judge.MATCH,)
        self._most_rows: dict[int, int] = {}
        self._found: dict[tuple[int, int, Drafts, Judge, bool, int], RoundShape] = {}

    def most_rows(self, nodes: int) -> int:
        """Rows with drafts from outside, of up to `nodes` nodes each, that one launch may have."""
        most = self._most_rows.get(nodes)
        if most is None:
            most = self._most_rows[nodes] = self._most_rows_of(nodes)
        return most

    def _most_rows_of(self, nodes: int) -> int:
        if nodes == 1:
            return self._max_rows
        _, size = self._drafted(Drafts.TREE, nodes, mixed=False)
        fitting = [rows for rows in self._row_sizes() if rows * size <= MOST_TOKEN_ROWS]
        return min(fitting[-1] if fitting else 1, self._max_rows)

    def mixes(self, drafts: Drafts) -> bool:
        """Whether prompts may share a launch with rows of such drafts."""
        return not self._own_nodes or drafts in (Drafts.NONE, Drafts.OWN)

    def fit(
        self, *, rows: int, nodes: int, drafts: Drafts, judge: Judge, features: bool, pieces: int
    ) -> RoundShape:
        """The shape of a round of so many rows and pieces; `nodes`: the most of any row,
        `features`: whether any is to be kept."""
        key = (rows, nodes, drafts, judge, features, pieces)
        shape = self._found.get(key)
        if shape is None:
            shape = self._found[key] = self._fit(rows, nodes, drafts, judge, features, pieces)
        return shape

    def _fit(
        self, rows: int, nodes: int, drafts: Drafts, judge: Judge, features: bool, pieces: int
    ) -> RoundShape:
        mixed = rows > 0 and pieces > 0
        piece_sizes = MIXED_PIECE_BUCKETS if mixed else PIECE_BUCKETS
        drafts, nodes = self._drafted(drafts, nodes, mixed=mixed)
        # Judging any rule costs next to nothing where all compare tokens; own laws do cost.
        if drafts is not Drafts.OWN or judge not in self._judges:
            judge = self._judges[-1]
        if rows:
            rows = bucket(rows, MIXED_ROW_BUCKETS if mixed else ROW_BUCKETS)
        elif drafts is not Drafts.OWN:
            nodes, drafts = 1, Drafts.NONE
        # Features are projected wherever sessions may keep them: it costs little, graphs are few.
        tapped = self._features and (features or pieces > 0 or drafts is not Drafts.NONE)
        return RoundShape(
            rows=rows,
            nodes=nodes,
            drafts=drafts,
            judge=judge,
            features=tapped or drafts is Drafts.OWN,
            pieces=bucket(pieces, piece_sizes) if pieces else 0,
        )

    def shapes(self) -> Iterator[RoundShape]:
        """All shapes; no two are equal."""
        seen: set[RoundShape] = set()
        for shape in self._every():
            if shape not in seen:
                seen.add(shape)
                yield shape

    def _every(self) -> Iterator[RoundShape]:
        for judge in self._judges:
            for drafts, nodes in self._kinds():
                for rows in self._row_sizes(drafts, nodes):
                    yield self._fit(rows, nodes, drafts, judge, False, 0)
                    yield self._fit(rows, nodes, drafts, judge, True, 0)
                    for pieces in MIXED_PIECE_BUCKETS if self.mixes(drafts) else ():
                        yield self._fit(rows, nodes, drafts, judge, False, pieces)
                for pieces in PIECE_BUCKETS:
                    yield self._fit(0, nodes, drafts, judge, False, pieces)

    def _kinds(self) -> Iterator[tuple[Drafts, int]]:
        """Where a row's drafts come from, and its nodes."""
        yield Drafts.NONE, 1
        if self._own_nodes:
            yield Drafts.OWN, self._own_nodes
        if self._max_nodes > 1:
            for nodes in up_to(self._chain_sizes, min(self._max_nodes, self._chain_sizes[-1])):
                yield Drafts.CHAIN, nodes
            for nodes in up_to(self._tree_sizes, self._max_nodes):
                yield Drafts.TREE, nodes

    def _drafted(self, drafts: Drafts, nodes: int, *, mixed: bool) -> tuple[Drafts, int]:
        """The bucket of a row's nodes, and the kind of drafts that it is run as."""
        match drafts:
            case Drafts.NONE:
                return drafts, 1
            case Drafts.OWN:
                return drafts, self._own_nodes
            case Drafts.CHAIN if nodes <= self._chain_sizes[-1]:
                return drafts, bucket(nodes, MIXED_CHAIN_BUCKETS if mixed else self._chain_sizes)
            case _:
                return Drafts.TREE, bucket(nodes, self._tree_sizes)

    def _row_sizes(self, drafts: Drafts = Drafts.NONE, nodes: int = 1) -> tuple[int, ...]:
        most = self.most_rows(nodes) if drafts is Drafts.TREE else self._max_rows
        return up_to(ROW_BUCKETS, most)
