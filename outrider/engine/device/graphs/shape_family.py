"""Bounded set of batch shapes in which the rounds of an engine run.

All shapes are captured before the first request, and no request can add one.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.engine.device.graphs.shapes import (
    CHAIN_BUCKETS,
    CHUNK_BUCKETS,
    CHUNK_TOKENS,
    FEW_CHAIN_BUCKETS,
    FEW_TREE_BUCKETS,
    MANY_CHUNKS,
    MANY_CHUNKS_CHAIN_BUCKETS,
    MANY_CHUNKS_ROW_BUCKETS,
    MAX_CHUNKS,
    MAX_IN_PROCESS_TREE_ROWS,
    MAX_SHORT_CHAIN_CHUNKS,
    MAX_TOKEN_ROWS,
    MIN_SHORT_CHAIN_ROWS,
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
    """All batch shapes of one engine, for which CUDA graphs are captured at startup."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_nodes: int,
        in_process_nodes: int,
        in_process_tree_nodes: int = 0,
        short_chain_nodes: int = 0,
        has_features: bool,
        has_sampled_acceptance: bool,
        max_prefill_tokens: int,
        has_remote_distributions: bool = False,
    ) -> None:
        """Define the shapes of one engine.

        max_rows: maximum number of sessions of a round.

        max_prefill_tokens: the scheduler's budget of prompt tokens per round. Shapes have as many
        prefill chunks as these tokens need, but at most MAX_CHUNKS.

        max_nodes: maximum number of nodes of a row whose drafts come from the host (the drafter
        process or an n-gram lookup), the root included; 1 without such drafts.

        in_process_nodes: nodes of a row with drafts from the in-process drafter, the root included;
        0 without that drafter. With it, drafts from the host are rare and get few bucket sizes.

        in_process_tree_nodes: nodes of a row with a tree of the in-process drafter, used beside its
        chains when there are few sessions (`MAX_IN_PROCESS_TREE_ROWS`); 0 without such trees.

        short_chain_nodes: nodes of a row with a shorter chain of the in-process drafter, used when
        there are many sessions (`MIN_SHORT_CHAIN_ROWS`); 0 without such chains. Rounds with more
        prefill chunks than `MAX_SHORT_CHAIN_CHUNKS` have `in_process_nodes` instead.

        has_features: whether the engine projects features for a drafter.

        has_sampled_acceptance: whether the engine serves acceptance rules that draw random numbers
        (`AcceptanceMode.SAMPLED`).

        has_remote_distributions: whether the drafts of `DraftKind.IN_PROCESS` come from another
        device together with the distributions that they were drawn from.
        """
        self._max_rows = max_rows
        self._max_nodes = max_nodes
        self._in_process_nodes = in_process_nodes
        self._in_process_tree_nodes = in_process_tree_nodes
        self._short_chain_nodes = short_chain_nodes
        self._chain_sizes = FEW_CHAIN_BUCKETS if in_process_nodes else CHAIN_BUCKETS
        self._tree_sizes = FEW_TREE_BUCKETS if in_process_nodes else TREE_BUCKETS
        self._has_features = has_features
        self._max_chunks = min(-(-max_prefill_tokens // CHUNK_TOKENS), MAX_CHUNKS)
        self._chunk_sizes = buckets_up_to(CHUNK_BUCKETS, self._max_chunks)
        self._mixed_chunk_sizes = buckets_up_to(MIXED_CHUNK_BUCKETS, self._max_chunks)
        self._acceptance_modes = (
            (AcceptanceMode.MATCH, AcceptanceMode.SAMPLED)
            if has_sampled_acceptance
            else (AcceptanceMode.MATCH,)
        )
        self._has_remote_distributions = has_remote_distributions and has_sampled_acceptance
        self._most_rows: dict[int, int] = {}
        self._cache: dict[tuple[int, int, DraftKind, AcceptanceMode, bool, int], RoundShape] = {}

    def max_rows(self, nodes: int) -> int:
        """Return the maximum number of decoding sessions of one launch whose drafts from the host
        have up to `nodes` nodes each, including the root."""
        most = self._most_rows.get(nodes)
        if most is None:
            most = self._most_rows[nodes] = self._max_rows_of(nodes)
        return most

    def _max_rows_of(self, nodes: int) -> int:
        if nodes == 1:
            return self._max_rows
        _, size = self._draft_bucket(DraftKind.TREE, nodes, self._chain_sizes)
        fitting = [rows for rows in self._row_sizes() if rows * size <= MAX_TOKEN_ROWS]
        return min(fitting[-1] if fitting else 1, self._max_rows)

    @property
    def max_in_process_tree_rows(self) -> int:
        """Maximum number of decoding sessions of one launch with trees of the in-process drafter; 0
        without such trees."""
        return min(self._max_rows, MAX_IN_PROCESS_TREE_ROWS) if self._in_process_tree_nodes else 0

    @property
    def short_chain_nodes(self) -> int:
        """Number of nodes of a row with a shorter chain of the in-process drafter; 0 without such
        chains."""
        return self._short_chain_nodes

    def allows_short_chains(self, rows: int) -> bool:
        """Return whether rounds with this number of decoding sessions may use the shorter chains of
        `short_chain_nodes`."""
        return bool(self._short_chain_nodes) and rows >= MIN_SHORT_CHAIN_ROWS

    @property
    def max_prefill_tokens(self) -> int:
        """Maximum number of prompt tokens of a round. The unused token rows of a chunk that is not
        full count, too."""
        return self._max_chunks * CHUNK_TOKENS

    def allows_prefill(self, draft_kind: DraftKind, nodes: int, chunks: int) -> bool:
        """Return whether `chunks` prefill chunks may share a launch with rows whose drafts are of
        this kind and have up to `nodes` nodes, including the root."""
        if draft_kind in (DraftKind.NONE, DraftKind.IN_PROCESS):
            return True
        if self._in_process_nodes:
            return False
        draft_kind, _ = self._draft_bucket(draft_kind, nodes, self._chain_sizes)
        return draft_kind is DraftKind.CHAIN or chunks <= MANY_CHUNKS

    def fit_shape(
        self,
        *,
        rows: int,
        nodes: int,
        draft_kind: DraftKind,
        acceptance_mode: AcceptanceMode,
        has_features: bool,
        chunks: int,
    ) -> RoundShape:
        """Return the captured shape in which a round runs.

        rows, chunks: number of decoding sessions and prefill chunks of the round.

        nodes: maximum number of nodes of a row, including the root.

        has_features: whether the features of any row are needed after the round.
        """
        key = (rows, nodes, draft_kind, acceptance_mode, has_features, chunks)
        shape = self._cache.get(key)
        if shape is None:
            shape = self._cache[key] = self._fit(
                rows, nodes, draft_kind, acceptance_mode, has_features, chunks
            )
        return shape

    def _fit(
        self,
        rows: int,
        nodes: int,
        draft_kind: DraftKind,
        acceptance_mode: AcceptanceMode,
        has_features: bool,
        chunks: int,
    ) -> RoundShape:
        mixed = rows > 0 and chunks > 0
        chunk_sizes = self._mixed_chunk_sizes if mixed else self._chunk_sizes
        many = mixed and chunks > MANY_CHUNKS
        chain_sizes: tuple[int, ...] = self._chain_sizes
        if mixed:
            chain_sizes = MANY_CHUNKS_CHAIN_BUCKETS if many else MIXED_CHAIN_BUCKETS
        draft_kind, nodes = self._draft_bucket(draft_kind, nodes, chain_sizes)
        acceptance_mode = self._fit_acceptance(draft_kind, acceptance_mode, mixed=mixed, rows=rows)
        if rows:
            row_sizes = MIXED_ROW_BUCKETS if mixed else ROW_BUCKETS
            rows = bucket_for(rows, MANY_CHUNKS_ROW_BUCKETS if many else row_sizes)
        is_short = draft_kind is DraftKind.IN_PROCESS and nodes == self._short_chain_nodes
        if is_short and (not self.allows_short_chains(rows) or chunks > MAX_SHORT_CHAIN_CHUNKS):
            nodes = self._in_process_nodes
        if not rows and draft_kind is not DraftKind.IN_PROCESS:
            nodes, draft_kind = 1, DraftKind.NONE
        # Features are projected in every shape whose sessions may keep them: the projection is
        # cheap, and this saves graphs.
        projects = self._has_features and (
            has_features or chunks > 0 or draft_kind is not DraftKind.NONE
        )
        return RoundShape(
            rows=rows,
            nodes=nodes,
            draft_kind=draft_kind,
            acceptance_mode=acceptance_mode,
            has_features=projects or draft_kind is DraftKind.IN_PROCESS,
            chunks=bucket_for(chunks, chunk_sizes) if chunks else 0,
        )

    def _fit_acceptance(
        self, draft_kind: DraftKind, asked: AcceptanceMode, *, mixed: bool, rows: int
    ) -> AcceptanceMode:
        # A SAMPLED graph accepts by comparing tokens at nearly no extra cost, so one graph serves
        # both modes. Rounds with in-process drafts have a graph for each mode, because SAMPLED ones
        # also compute draft distributions.
        most = self._acceptance_modes[-1]
        if draft_kind is not DraftKind.IN_PROCESS or most is AcceptanceMode.MATCH:
            return most
        if asked is AcceptanceMode.MATCH:
            return asked
        # A round with prefill chunks is long beside two small kernels, and one mode less saves its
        # graphs of every number of rows and chunks.
        with_distributions = mixed or asked is AcceptanceMode.REJECTION
        if self._has_remote_distributions and rows and with_distributions:
            return AcceptanceMode.REJECTION
        return AcceptanceMode.SAMPLED

    def all_shapes(self) -> Iterator[RoundShape]:
        """Yield all shapes, each once."""
        seen: set[RoundShape] = set()
        for shape in self._enumerate_shapes():
            if shape not in seen:
                seen.add(shape)
                yield shape

    def _enumerate_shapes(self) -> Iterator[RoundShape]:
        for acceptance_mode in AcceptanceMode:
            for draft_kind, nodes in self._draft_buckets():
                for rows in self._row_sizes(draft_kind, nodes):
                    yield self._fit(rows, nodes, draft_kind, acceptance_mode, False, 0)
                    yield self._fit(rows, nodes, draft_kind, acceptance_mode, True, 0)
                    for chunks in self._mixed_chunk_sizes:
                        if self.allows_prefill(draft_kind, nodes, chunks):
                            yield self._fit(rows, nodes, draft_kind, acceptance_mode, False, chunks)
                for chunks in self._chunk_sizes:
                    yield self._fit(0, nodes, draft_kind, acceptance_mode, False, chunks)

    def _draft_buckets(self) -> Iterator[tuple[DraftKind, int]]:
        """Yield the kind of drafts and the number of nodes per row of every captured shape."""
        yield DraftKind.NONE, 1
        if self._in_process_nodes:
            yield DraftKind.IN_PROCESS, self._in_process_nodes
        if self._in_process_tree_nodes:
            yield DraftKind.IN_PROCESS, self._in_process_tree_nodes
        if self._short_chain_nodes:
            yield DraftKind.IN_PROCESS, self._short_chain_nodes
        if self._max_nodes > 1:
            for nodes in buckets_up_to(
                self._chain_sizes, min(self._max_nodes, self._chain_sizes[-1])
            ):
                yield DraftKind.CHAIN, nodes
            for nodes in buckets_up_to(self._tree_sizes, self._max_nodes):
                yield DraftKind.TREE, nodes

    def _draft_bucket(
        self, draft_kind: DraftKind, nodes: int, chain_sizes: tuple[int, ...]
    ) -> tuple[DraftKind, int]:
        """Return the kind of drafts and the node bucket of a row with `nodes` nodes. `chain_sizes`:
        the buckets of chains. A chain that is longer than any chain of the family runs as a
        tree."""
        match draft_kind:
            case DraftKind.NONE:
                return draft_kind, 1
            case DraftKind.IN_PROCESS:
                others = (self._in_process_tree_nodes, self._short_chain_nodes)
                is_other = nodes > 1 and nodes in others
                return draft_kind, nodes if is_other else self._in_process_nodes
            case DraftKind.CHAIN if nodes <= self._chain_sizes[-1]:
                return draft_kind, bucket_for(nodes, chain_sizes)
            case _:
                return DraftKind.TREE, bucket_for(nodes, self._tree_sizes)

    def _row_sizes(self, draft_kind: DraftKind = DraftKind.NONE, nodes: int = 1) -> tuple[int, ...]:
        most = self.max_rows(nodes) if draft_kind is DraftKind.TREE else self._max_rows
        if draft_kind is DraftKind.IN_PROCESS and nodes == self._in_process_tree_nodes:
            most = self.max_in_process_tree_rows
        return buckets_up_to(ROW_BUCKETS, most)
