"""Prefix cache: keeps KV blocks of sessions, so that later sessions with the same prefix reuse
them.

Used on the engine thread only. Only full blocks are cached. The key of a block is shifted by one
position: it contains the tokens of the block except the first, and the token after the block. The
reason is that a draft head computes the KV of a position with the next token (EAGLE-3, arXiv
2503.01840). Blocks form a tree: a block is found by its predecessor and its exact tokens, so
different prefixes never match. A block also records whether the in-process draft head has its KV
for the block, and the features that a drafter process needs.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from outrider.engine.kv_cache import KVPool
from outrider_verifier.exchange.feature_store import FeatureStore
from outrider_verifier.state.session import Session

logger = logging.getLogger(__name__)

_Key = tuple[int, bytes]
"""Number of the previous block, and the key tokens. For a first block, a value made from the first
token of the prefix replaces the number (`_root`)."""


@dataclass(slots=True, eq=False)
class _CachedBlock:
    """A cached KV block and its metadata."""

    number: int
    """Unique number of the entry, never reused."""
    key: _Key
    block: int
    has_draft_kv: bool
    """Whether the block holds the in-process drafter's KV, too."""
    features: tuple[int, ...] = ()
    """Chunks of the feature store with the block's features; empty if they are not stored."""


class PrefixCache:
    """Maps prefixes to cached blocks of a KV pool."""

    def __init__(
        self,
        pool: KVPool,
        *,
        store: FeatureStore | None,
        drafted: Callable[[Session], bool],
        feature_bytes: int,
        counters: Counter[str],
        compares_kv: bool = False,
    ) -> None:
        """Create an empty cache. `store` holds the features of sessions in chunks. The tokens of a
        KV block fill a whole number of chunks. `drafted` returns whether the in-process drafter has
        the KV of the session's whole prefix. `feature_bytes` is the maximum host memory of the
        features of cached blocks. If `compares_kv` is true, a session's KV is compared with the
        cached KV of the same prefix when it is stored."""
        self._pool, self._store, self._drafted = pool, store, drafted
        self._counters, self._compares_kv = counters, compares_kv
        self._kept: dict[_Key, _CachedBlock] = {}
        self._of_block: dict[int, _CachedBlock] = {}
        self._numbers = itertools.count(1)
        self._featured: OrderedDict[int, _CachedBlock] = OrderedDict()
        """Cached blocks with features, by number, least recently used first."""
        self._budget = feature_bytes
        self._chunks = 1 if store is None else pool.block_tokens // store.chunk
        """Number of feature chunks per block."""
        pool.ledger.evicted = self._evicted

    def __len__(self) -> int:
        """Return the number of cached blocks, including those that sessions use."""
        return len(self._kept)

    @property
    def feature_bytes(self) -> int:
        """Host memory, in bytes, of the features of cached blocks, including features that sessions
        share."""
        if self._store is None:
            return 0
        return len(self._featured) * self._chunks * self._store.chunk_bytes

    # ---- a session begins ----------------------------------------------------------------------

    def attach_prefix(self, session: Session, slots: int) -> int:
        """Attach the cached blocks of the session's prefix to the session, and reserve further
        blocks so that it has KV slots for `slots` tokens in total. Return the number of tokens that
        need no prefill. If it is 0, nothing was attached or reserved. The session must hold no
        blocks when this is called."""
        if self._store is not None:
            # Storing the prompts of the round before may have been deferred together with its
            # features.
            self._store.run_deferred()
        self._counters["prefix_cache_query_tokens"] += session.kv_len
        found = self._find(session)
        if not found or not session.kv.attach_blocks([kept.block for kept in found], slots):
            return 0
        size, told = self._pool.block_tokens, session.written_positions
        if session.keeps_features and told < len(found) * size:
            self._append_features(session, found[told // size :], told % size)
        self._counters["prefix_cache_hit_tokens"] += len(found) * size
        return len(found) * size

    def _find(self, session: Session) -> list[_CachedBlock]:
        """Return the cached blocks with which the session may begin."""
        size, told = self._pool.block_tokens, session.written_positions
        most = (session.length - 1) // size
        if session.keeps_features and not self._may_append(session):
            # The session's drafter needs features of these positions, which would not be
            # computed.
            most = min(most, told // size)
        found: list[_CachedBlock] = []
        before = _root(session)
        for place, tokens in enumerate(self._tokens(session, most)):
            kept = self._kept.get((before, tokens))
            if kept is None or (session.in_process_draft_length and not kept.has_draft_kv):
                break
            untold = session.keeps_features and (place + 1) * size > told
            if untold and not kept.features:
                break
            found.append(kept)
            before = kept.number
        return found

    def _may_append(self, session: Session) -> bool:
        """Return whether the store has space for the features of the session's whole prefix."""
        store = self._store
        if store is None or not store.is_complete(session.handle):
            return False
        return store.has_room(session.kv_len - session.written_positions)

    def _append_features(self, session: Session, found: list[_CachedBlock], known: int) -> None:
        """Add the features of the blocks `found` to the session's features in the store. The store
        already has the features of the first `known` positions of these blocks."""
        store = self._store
        assert store is not None
        whole, known = divmod(known, store.chunk)
        chunks = [chunk for kept in found for chunk in kept.features][whole:]
        if known:
            store.append(session.handle, store.chunk_rows(chunks.pop(0))[known:])
        store.share_chunks(session.handle, chunks)
        # The end of a prefix is of no use without its beginning: it is to go first.
        for kept in reversed(found):
            self._featured.move_to_end(kept.number)

    # ---- what it leaves ------------------------------------------------------------------------

    def store_prefix(self, session: Session) -> None:
        """Store the full KV blocks of a session in the cache."""
        # KV beyond the session's last token belongs to tokens that were not emitted.
        count = min(session.kv.len, session.length - 1) // self._pool.block_tokens
        if not count:
            return
        drafted, blocks = self._drafted(session), session.kv.blocks
        kept: list[_CachedBlock] = []
        before = _root(session)
        for place, tokens in enumerate(self._tokens(session, count)):
            kept.append(self._keep_block((before, tokens), blocks[place], drafted=drafted))
            before = kept[-1].number
        if session.keeps_features and self._store is not None:
            self._keep_features(session, kept)

    def forget_draft_kv(self) -> None:
        """Mark the draft KV of all cached blocks as absent, because the drafter has changed."""
        for kept in self._kept.values():
            kept.has_draft_kv = False

    def _keep_block(self, key: _Key, block: int, *, drafted: bool) -> _CachedBlock:
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _CachedBlock(next(self._numbers), key, block, drafted)
            self._hold(kept)
            return kept
        if self._compares_kv and kept.block != block:
            self._compare_kv(kept.block, block)
        if drafted and not kept.has_draft_kv:
            # A block that also holds draft KV serves more sessions.
            if kept.block != block:
                del self._of_block[kept.block]
                self._pool.ledger.release_block(kept.block)
                kept.block = block
                self._hold(kept)
            kept.has_draft_kv = True
        return kept

    def _compare_kv(self, cached: int, computed: int) -> None:
        """Compare the bits of two blocks with the KV of the same prefix; log a difference."""
        size = self._pool.block_tokens
        first, second = (
            self._pool.storage.narrow(3, block * size, size) for block in (cached, computed)
        )
        self._counters["prefix_kv_comparisons"] += 1
        if not torch.equal(first, second):
            self._counters["prefix_kv_differences"] += 1
            logger.error(
                "the KV of a prefix has other bits than before",
                extra={"cached_block": cached, "computed_block": computed},
            )

    def _hold(self, kept: _CachedBlock) -> None:
        other = self._of_block.get(kept.block)
        if other is not None:
            # The old entry is unreachable, since its predecessor was evicted.
            self._forget(other)
        self._pool.ledger.retain_block(kept.block)
        self._of_block[kept.block] = kept

    def _keep_features(self, session: Session, kept: list[_CachedBlock]) -> None:
        """Store the features of those blocks of `kept` that have none yet, as far as the store has
        them."""
        assert self._store is not None
        chunks, each = self._store.full_blocks(session.handle), self._chunks
        del kept[len(chunks) // each :]
        # The end of a prefix is of no use without its beginning: it is to go first.
        for place in reversed(range(len(kept))):
            if not kept[place].features:
                mine = kept[place].features = tuple(chunks[place * each : (place + 1) * each])
                self._featured[kept[place].number] = kept[place]
                for chunk in mine:
                    self._store.pin_block(chunk)
        while self.feature_bytes > self._budget:
            self._drop_features(next(iter(self._featured.values())))

    def _drop_features(self, kept: _CachedBlock) -> None:
        if self._store is not None and kept.features:
            for chunk in kept.features:
                self._store.unpin_chunk(chunk)
            kept.features = ()
            del self._featured[kept.number]

    def _forget(self, kept: _CachedBlock) -> None:
        del self._kept[kept.key], self._of_block[kept.block]
        self._drop_features(kept)

    def _evicted(self, block: int) -> None:
        self._forget(self._of_block[block])

    def _tokens(self, session: Session, blocks: int) -> Iterator[bytes]:
        """Return the key tokens of the session's first `blocks` blocks, as bytes per block; they
        are shifted by one position (see the module's docstring)."""
        width = self._pool.block_tokens * session.tokens.itemsize
        data = session.tokens[1 : 1 + blocks * self._pool.block_tokens].tobytes()
        return (data[start : start + width] for start in range(0, blocks * width, width))


def _root(session: Session) -> int:
    """Return the value that replaces the previous block's number in the key of a first block. It is
    negative, so no block has this number."""
    return -1 - int(session.tokens[0])
