"""Bounded set of batch shapes of a device's rounds. Pure.

All shapes are captured before the first request; no request can add one.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.engine.device.graphs.shapes import (
    CHAIN_BUCKETS,
    CHUNK_BUCKETS,
    FEW_CHAIN_BUCKETS,
    FEW_TREE_BUCKETS,
    MAX_TOKEN_ROWS,
    MIXED_CHAIN_BUCKETS,
    MIXED_CHUNK_BUCKETS,
    MIXED_ROW_BUCKETS,
    ROW_BUCKETS,
    TREE_BUCKETS,
    AcceptanceMode,
    DraftKind,
    RoundShape,
    bucket_for,
    buckets_up_to,
)


class ShapeFamily:
    """Batch shapes of one engine, all captured at startup."""

    def __init__(
        self, *, max_rows: int, max_nodes: int, in_process_nodes: int, features: bool, judges: bool
    ) -> None:
        """`max_rows`: most sessions of a round; `max_nodes`: most nodes of a row with drafts from
        outside, the root included, 1 if there are none; `in_process_nodes`: nodes of a row with own
        drafts, 0 without. With them drafts from outside (a lookup's, say) are the exception, and
        have few sizes; `features`: whether a projection is there; `judges`: whether rules that
        toss random draws are served."""
        self._max_rows = max_rows
        self._max_nodes = max_nodes
        self._in_process_nodes = in_process_nodes
        self._chain_sizes = FEW_CHAIN_BUCKETS if in_process_nodes else CHAIN_BUCKETS
        self._tree_sizes = FEW_TREE_BUCKETS if in_process_nodes else TREE_BUCKETS
        self._features = features
        self._judges = (
            (AcceptanceMode.MATCH, AcceptanceMode.SAMPLED) if judges else (AcceptanceMode.MATCH,)
        )
        self._most_rows: dict[int, int] = {}
        self._found: dict[tuple[int, int, DraftKind, AcceptanceMode, bool, int], RoundShape] = {}

    def max_rows(self, nodes: int) -> int:
        """Rows with drafts from outside, of up to `nodes` nodes each, that one launch may have."""
        most = self._most_rows.get(nodes)
        if most is None:
            most = self._most_rows[nodes] = self._max_rows_of(nodes)
        return most

    def _max_rows_of(self, nodes: int) -> int:
        if nodes == 1:
            return self._max_rows
        _, size = self._drafted(DraftKind.TREE, nodes, mixed=False)
        fitting = [rows for rows in self._row_sizes() if rows * size <= MAX_TOKEN_ROWS]
        return min(fitting[-1] if fitting else 1, self._max_rows)

    def allows_prefill(self, drafts: DraftKind) -> bool:
        """Whether prompts may share a launch with rows of such drafts."""
        return not self._in_process_nodes or drafts in (DraftKind.NONE, DraftKind.IN_PROCESS)

    def fit_shape(
        self,
        *,
        rows: int,
        nodes: int,
        drafts: DraftKind,
        judge: AcceptanceMode,
        features: bool,
        chunks: int,
    ) -> RoundShape:
        """The shape of a round of so many rows and prefill chunks; `nodes`: the most of any row,
        `features`: whether any is to be kept."""
        key = (rows, nodes, drafts, judge, features, chunks)
        shape = self._found.get(key)
        if shape is None:
            shape = self._found[key] = self._fit(rows, nodes, drafts, judge, features, chunks)
        return shape

    def _fit(
        self,
        rows: int,
        nodes: int,
        drafts: DraftKind,
        judge: AcceptanceMode,
        features: bool,
        chunks: int,
    ) -> RoundShape:
        mixed = rows > 0 and chunks > 0
        piece_sizes = MIXED_CHUNK_BUCKETS if mixed else CHUNK_BUCKETS
        drafts, nodes = self._drafted(drafts, nodes, mixed=mixed)
        # Judging any rule costs next to nothing where all compare tokens; in-process draft
        # distributions do cost.
        if drafts is not DraftKind.IN_PROCESS or judge not in self._judges:
            judge = self._judges[-1]
        if rows:
            rows = bucket_for(rows, MIXED_ROW_BUCKETS if mixed else ROW_BUCKETS)
        elif drafts is not DraftKind.IN_PROCESS:
            nodes, drafts = 1, DraftKind.NONE
        # Features are projected wherever sessions may keep them: it costs little, graphs are few.
        tapped = self._features and (features or chunks > 0 or drafts is not DraftKind.NONE)
        return RoundShape(
            rows=rows,
            nodes=nodes,
            draft_kind=drafts,
            acceptance_mode=judge,
            has_features=tapped or drafts is DraftKind.IN_PROCESS,
            chunks=bucket_for(chunks, piece_sizes) if chunks else 0,
        )

    def all_shapes(self) -> Iterator[RoundShape]:
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
                    for chunks in MIXED_CHUNK_BUCKETS if self.allows_prefill(drafts) else ():
                        yield self._fit(rows, nodes, drafts, judge, False, chunks)
                for chunks in CHUNK_BUCKETS:
                    yield self._fit(0, nodes, drafts, judge, False, chunks)

    def _kinds(self) -> Iterator[tuple[DraftKind, int]]:
        """Where a row's drafts come from, and its nodes."""
        yield DraftKind.NONE, 1
        if self._in_process_nodes:
            yield DraftKind.IN_PROCESS, self._in_process_nodes
        if self._max_nodes > 1:
            for nodes in buckets_up_to(
                self._chain_sizes, min(self._max_nodes, self._chain_sizes[-1])
            ):
                yield DraftKind.CHAIN, nodes
            for nodes in buckets_up_to(self._tree_sizes, self._max_nodes):
                yield DraftKind.TREE, nodes

    def _drafted(self, drafts: DraftKind, nodes: int, *, mixed: bool) -> tuple[DraftKind, int]:
        """The bucket of a row's nodes, and the kind of drafts that it is run as."""
        match drafts:
            case DraftKind.NONE:
                return drafts, 1
            case DraftKind.IN_PROCESS:
                return drafts, self._in_process_nodes
            case DraftKind.CHAIN if nodes <= self._chain_sizes[-1]:
                return drafts, bucket_for(
                    nodes, MIXED_CHAIN_BUCKETS if mixed else self._chain_sizes
                )
            case _:
                return DraftKind.TREE, bucket_for(nodes, self._tree_sizes)

    def _row_sizes(self, drafts: DraftKind = DraftKind.NONE, nodes: int = 1) -> tuple[int, ...]:
        most = self.max_rows(nodes) if drafts is DraftKind.TREE else self._max_rows
        return buckets_up_to(ROW_BUCKETS, most)
