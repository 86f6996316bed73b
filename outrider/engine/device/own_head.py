"""A draft head in the verifier's own process (colocated and fused placement).

X session slots, n drafts, Vd draft vocabulary. The head's K/V has the slots of the target's pool
and is addressed by the same block tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.draft import DraftProgram, NewRows
from outrider.engine.device.draft_masks import DraftMasks
from outrider.engine.device.head_weights import HeadWeights
from outrider.engine.device.slots import SessionSlots
from outrider.engine.device.warp_slots import WarpSlots
from outrider.engine.heads import DraftHead
from outrider.engine.kernels.acceptance.coins import ChainLaw
from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.engine.kvcache import KVPool
from outrider.spec.plan import default_depth


class OwnShape(NamedTuple):
    """What the head drafts for every round of every session."""

    num_nodes: int
    """n: drafts, the root not counted."""
    top_k: int = 1
    """Children tried of a node; 1: a chain."""
    depth: int = 0
    """Levels of a tree; 0: as many as `default_depth` says."""

    @property
    def is_tree(self) -> bool:
        """Whether drafts have branches."""
        return self.top_k > 1

    @property
    def levels(self) -> int:
        """Levels of the drafts."""
        if not self.is_tree:
            return self.num_nodes
        return min(self.depth or default_depth(self.num_nodes), self.num_nodes)

    @property
    def maskable_levels(self) -> int:
        """Levels of which the host can say what may be drafted there: all of a chain, in which a
        level has one place; of a tree the first."""
        return 1 if self.is_tree else self.num_nodes

    @property
    def extra_slots(self) -> int:
        """K/V slots that may be written past those that the host knows to be committed: two rounds
        may be unsettled, and the steps of the next drafts stand behind them."""
        width = min(self.top_k, self.num_nodes) if self.is_tree else 1
        return 2 * (1 + self.num_nodes) + max(0, self.levels - 1) * width


class OwnHead:
    """Drafts for every session, on the device."""

    def __init__(
        self, head: DraftHead, slots: SessionSlots, pool: KVPool, *, shape: OwnShape, max_len: int
    ) -> None:
        self.shape = shape
        weights = HeadWeights.from_head(head)
        device, config = pool.storage.device, head.config
        self._slots = slots
        self.storage = torch.zeros(
            (2, 1, config.num_kv_heads, pool.storage.shape[3], config.head_dim),
            dtype=pool.storage.dtype,
            device=device,
        )
        """[2, 1, G, S, d]: the head's K/V."""
        self.program = DraftProgram(
            weights,
            storage=self.storage,
            block_tokens=pool.block_tokens,
            max_len=max_len,
        )
        count = slots.sequence.lengths.shape[0]
        size = (count, shape.num_nodes)
        self.tokens = torch.full(size, -1, dtype=torch.int32, device=device)
        """int32 [X, n]: the drafts that each session's next round verifies; -1: no node."""
        self.parents: Tensor | None = None
        """int32 [X, n]: their parents (see `DraftTree`), PADDING_NODE: no node. None: chains."""
        self.law: ChainLaw | None = None
        """The laws that chains were drawn from, kept with the session until they are used. Trees
        have none: the rejection rule judges them target-only."""
        self.warp = WarpSlots(
            count, config.draft_vocab_size, device, draft_columns=weights.draft_columns
        )
        """What the sessions do to the head's logits."""
        width = 1 + shape.num_nodes
        self._features = torch.zeros(
            (count, width, config.hidden_size), dtype=pool.storage.dtype, device=device
        )
        """[X, 1 + n, H]: of each session's newest rows, kept in rounds in which one may be in a
        grammar;"""
        self._words = torch.zeros((count, 2 + width), dtype=torch.int32, device=device)
        """how many they are, where they begin, and their tokens, int32 [X, 2 + 1 + n]."""
        self.padding = slots.padding
        """The slot of padding rows."""
        if shape.is_tree:
            self.parents = torch.full(size, PADDING_NODE, dtype=torch.int32, device=device)
            return
        laws = (count, shape.num_nodes, config.draft_vocab_size)
        self.law = ChainLaw(
            probs=torch.zeros(laws, dtype=torch.float32, device=device),
            draft_columns=weights.draft_columns,
            target_ids=weights.target_ids,
        )

    def forget(self, slot: int) -> None:
        """Let the next round of a slot's session verify no draft, in the order of the stream."""
        self.tokens[slot].fill_(-1)
        if self.parents is not None:
            self.parents[slot].fill_(PADDING_NODE)

    def draft(self, rows: NewRows, *, sampled: bool) -> None:
        """Catch up on real rows and draft for each of their sessions. sampled: whether any session
        may warp its logits or need the laws of its drafts."""
        if sampled:
            self.keep(rows)
        self._draft(rows, sampled=sampled)

    def keep(self, rows: NewRows) -> None:
        """Keep these rows of each session for `redraft`."""
        slots, width = rows.slots.long(), rows.tokens.shape[1]
        self._features[:, :width].index_copy_(0, slots, rows.features.to(self._features.dtype))
        words = torch.cat((rows.counts[:, None], rows.starts[:, None], rows.tokens), dim=1)
        self._words[:, : 2 + width].index_copy_(0, slots, words.int())

    def redraft(self, slots: Tensor, legal: DraftMasks) -> Tensor | None:
        """Catch up on what was kept and draft, under masks, for sessions whose last drafts nobody
        has verified; slots: int32 [B]. Of chains int32 [B, n, 1 + A]: what was drafted, and the
        others as in `ChainDraft`."""
        words = self._words[slots.long()]
        # Kernels take vectors and matrices that lie as they are counted.
        kept = NewRows(
            slots=slots,
            tables=self._slots.sequence.tables,
            tokens=words[:, 2:].contiguous(),
            features=self._features[slots.long()],
            counts=torch.where(slots != self.padding, words[:, 0], 0),
            starts=words[:, 1].contiguous(),
        )
        return self._draft(kept, sampled=True, legal=legal)

    def _draft(
        self, rows: NewRows, *, sampled: bool, legal: DraftMasks | None = None
    ) -> Tensor | None:
        places, state = rows.slots.long(), self._slots.sampling
        warp = self.warp.state if sampled else None
        if self.parents is not None:
            tree = self.program.tree(
                rows,
                state=state,
                num_nodes=self.shape.num_nodes,
                top_k=self.shape.top_k,
                depth=self.shape.levels,
                warp=warp,
                coupled=True,
                legal=legal,
            )
            self.tokens.index_copy_(0, places, tree.tokens)
            self.parents.index_copy_(0, places, tree.parents)
            return None
        chain = self.program.chain(
            rows,
            length=self.shape.num_nodes,
            state=state,
            warp=warp,
            with_probs=sampled,
            legal=legal,
            with_others=legal is not None,
        )
        self.tokens.index_copy_(0, places, chain.tokens)
        if self.law is not None and chain.probs is not None:
            self.law.probs.index_copy_(0, places, chain.probs)
        if chain.others is None:
            return None
        return torch.cat((chain.tokens[:, :, None], chain.others), dim=2)
