"""Prefix cache: KV blocks that sessions leave behind, reused by later sessions.

Engine thread only. Only full blocks are kept. A block is keyed by its tokens without the first, and
the token after it: a draft head's KV of a position is computed with the next token (EAGLE-3, arXiv
2503.01840). Blocks form a tree: a block is found by its predecessor and its own tokens, compared
one by one, so no two prefixes are ever taken for each other. A block also records what a session
that skips it must have: whether the in-process head has its KV there, and the features for a
drafter outside.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.engine.kv_cache import KVPool
from outrider_verifier.exchange.feature_store import FeatureStore
from outrider_verifier.state.session import Session

_Key = tuple[int, bytes]
"""The number of the block before, and tokens; the first token of all stands for the number of the
block before the first."""


@dataclass(slots=True, eq=False)
class _CachedBlock:
    """A block and what is known of it."""

    number: int
    """No other has had it."""
    key: _Key
    block: int
    has_draft_kv: bool
    """Whether the in-process drafter has its KV there, too."""
    features: tuple[int, ...] = ()
    """The store's chunks with its features; none if they are not known."""


class PrefixCache:
    """Blocks of a pool by the prefixes that they hold."""

    def __init__(
        self,
        pool: KVPool,
        *,
        store: FeatureStore | None,
        drafted: Callable[[Session], bool],
        feature_bytes: int,
        counters: Counter[str],
    ) -> None:
        """`store`: features of sessions, in chunks of which a block has a whole number. `drafted`:
        whether the in-process drafter has the KV of all that a session has written.
        `feature_bytes`: most that features of kept blocks take."""
        self._pool, self._store, self._drafted = pool, store, drafted
        self._counters = counters
        self._kept: dict[_Key, _CachedBlock] = {}
        self._of_block: dict[int, _CachedBlock] = {}
        self._numbers = itertools.count(1)
        self._featured: OrderedDict[int, _CachedBlock] = OrderedDict()
        """Those with features, by number; what was used longest ago is first."""
        self._budget = feature_bytes
        self._chunks = 1 if store is None else pool.block_tokens // store.chunk
        """Of a block."""
        pool.ledger.evicted = self._evicted

    def __len__(self) -> int:
        """Blocks that are kept, those that sessions hold included."""
        return len(self._kept)

    @property
    def feature_bytes(self) -> int:
        """Host memory that features of kept blocks take, what sessions hold of it included."""
        if self._store is None:
            return 0
        return len(self._featured) * self._chunks * self._store.chunk_bytes

    # ---- a session begins ----------------------------------------------------------------------

    def attach_prefix(self, session: Session, slots: int) -> int:
        """Let a session that holds no block hold blocks for `slots` slots, of which the first are
        written: how many tokens it need not prefill. At 0 it holds nothing yet."""
        if self._store is not None:
            # With its features the round before may have left its prompts to be kept.
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
        """The blocks that it may begin with."""
        size, told = self._pool.block_tokens, session.written_positions
        most = (session.length - 1) // size
        if session.keeps_features and not self._may_append(session):
            # Its drafter could not be told what nobody computes.
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
        """Whether the store takes in the features of a whole prefix."""
        store = self._store
        if store is None or not store.is_complete(session.handle):
            return False
        return store.has_room(session.kv_len - session.written_positions)

    def _append_features(self, session: Session, found: list[_CachedBlock], known: int) -> None:
        """The store has the features before these blocks, and of the first `known` positions of
        theirs; now it has all."""
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
        """Keep what a session has written: a prompt that is whole, or all of it when it loses its
        KV."""
        # What was written behind its last token was not emitted.
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
        """The draft KV of no block is there any more: its drafter is another one."""
        for kept in self._kept.values():
            kept.has_draft_kv = False

    def _keep_block(self, key: _Key, block: int, *, drafted: bool) -> _CachedBlock:
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _CachedBlock(next(self._numbers), key, block, drafted)
            self._hold(kept)
        elif drafted and not kept.has_draft_kv:
            # The same with the draft head's KV is of use to more sessions.
            if kept.block != block:
                del self._of_block[kept.block]
                self._pool.ledger.release_block(kept.block)
                kept.block = block
                self._hold(kept)
            kept.has_draft_kv = True
        return kept

    def _hold(self, kept: _CachedBlock) -> None:
        other = self._of_block.get(kept.block)
        if other is not None:
            # Nothing leads to it any more: what came before it was evicted.
            self._forget(other)
        self._pool.ledger.retain_block(kept.block)
        self._of_block[kept.block] = kept

    def _keep_features(self, session: Session, kept: list[_CachedBlock]) -> None:
        """Of those blocks that have none yet, as far as the store has them."""
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
        """Of its first blocks: the tokens behind the first one of all, B for each."""
        width = self._pool.block_tokens * session.tokens.itemsize
        data = session.tokens[1 : 1 + blocks * self._pool.block_tokens].tobytes()
        return (data[start : start + width] for start in range(0, blocks * width, width))


def _root(session: Session) -> int:
    """What stands for the number of a block before the first: no block has it."""
    return -1 - int(session.tokens[0])
