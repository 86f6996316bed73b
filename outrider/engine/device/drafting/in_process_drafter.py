"""Draft head inside the verifier process, for the placements `colocated` and `fused`.

The head's KV uses the same slots and block tables as the target's pool. All draft shapes share this
KV, so a session can change its shape at the cost of one round without drafts.

Shapes: X session slots, n drafts of the largest shape, B sessions of a launch, G key/value heads, S
pool slots, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.drafting.chain_levels import ChainLevelDrafter
from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.draft_masks import DraftTokenMasks
from outrider.engine.device.drafting.draft_program import DraftProgram
from outrider.engine.device.drafting.eagle_forward import HeadForward
from outrider.engine.device.drafting.eagle_weights import HeadWeights
from outrider.engine.device.drafting.recent_rows import RecentRows
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.device.slots.session_slots import DeviceSessionSlots
from outrider.engine.heads import DraftHead
from outrider.engine.kernels.acceptance.randomized import DenseChainDistribution
from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.engine.kv_cache import KVPool
from outrider.spec.plan import tree_depth


class InProcessDraftShape(NamedTuple):
    """Shape of the drafts of an in-process drafter."""

    num_nodes: int
    """Number n of draft tokens per session, without the root."""
    top_k: int = 1
    """Number of candidate children per node; 1 for a chain."""
    depth: int = 0
    """Number of levels of a tree; 0 to use `default_depth`."""

    @property
    def is_tree(self) -> bool:
        """Whether drafts have branches."""
        return self.top_k > 1

    @property
    def levels(self) -> int:
        """Number of draft tokens on the longest path of a draft."""
        if not self.is_tree:
            return self.num_nodes
        return tree_depth(self.num_nodes, self.depth)

    @property
    def extra_slots(self) -> int:
        """Maximum number of KV slots that the device may use after those that the host knows to be
        committed: the nodes of two rounds in flight, and the steps of the next drafts."""
        width = min(self.top_k, self.num_nodes) if self.is_tree else 1
        return 2 * (1 + self.num_nodes) + max(0, self.levels - 1) * width


class InProcessDrafter:
    """`RoundDrafter` that drafts for every session on the verifier's device with an EAGLE-3
    head."""

    def __init__(
        self,
        head: DraftHead,
        slots: DeviceSessionSlots,
        pool: KVPool,
        *,
        shapes: Sequence[InProcessDraftShape],
        max_len: int,
    ) -> None:
        """`shapes`: shapes of the drafts, each with a different number of nodes. Rounds that
        include a session with a grammar use the first shape."""
        self.shape = shapes[0]
        self._shapes = {1 + shape.num_nodes: shape for shape in shapes}
        """Maps the number of nodes of a draft, including the root, to the draft shape."""
        self.weights = weights = HeadWeights.from_head(head)
        device, config = pool.storage.device, head.config
        self.slots = slots
        self.storage = torch.zeros(
            (2, 1, config.num_kv_heads, pool.storage.shape[3], config.head_dim),
            dtype=pool.storage.dtype,
            device=device,
        )
        """[2, 1, G, S, d]: keys and values of the head."""
        forward = HeadForward(
            weights,
            storage=self.storage,
            block_tokens=pool.block_tokens,
            max_len=max_len,
        )
        self.program = DraftProgram(forward)
        count = slots.sequence.lengths.shape[0]
        size = (count, max(shape.num_nodes for shape in shapes))
        self.tokens = torch.full(size, -1, dtype=torch.int32, device=device)
        """int32 [X, n]: the drafts that each session's next round verifies; -1 for absent nodes."""
        self._parents: Tensor | None = None
        """int32 [X, n]: parents of `tokens` (see `ConstrainedTree`), PADDING_NODE for absent nodes.
        None if all shapes are chains."""
        self.distribution: DenseChainDistribution | None = None
        """The distributions that chains were drawn from, indexed by session slot. None if the first
        shape is a tree; sessions of the rejection rule then use the target-only rule."""
        self.logits_slots = LogitsSlots(
            count, config.draft_vocab_size, device, draft_columns=weights.draft_columns
        )
        """State of the sessions' logits processor over the draft vocabulary."""
        self.kept = RecentRows(
            slots,
            max_rows=1 + self.shape.num_nodes,
            hidden_size=config.hidden_size,
            dtype=pool.storage.dtype,
        )
        """The draft rows that each session's last round of the first shape committed. They are
        stored so that drafts can be made from them again."""
        self.levels: ChainLevelDrafter | None = None
        """Drafts chains of the first shape token by token; None if that shape is a tree."""
        self.padding = slots.padding
        """Device slot of padding rows."""
        if any(shape.is_tree for shape in shapes):
            self._parents = torch.full(size, PADDING_NODE, dtype=torch.int32, device=device)
        if self.shape.is_tree:
            return
        distributions = (count, self.shape.num_nodes, config.draft_vocab_size)
        self.distribution = DenseChainDistribution(
            probs=torch.zeros(distributions, dtype=torch.float32, device=device),
            draft_columns=weights.draft_columns,
            target_ids=weights.target_ids,
        )
        self.levels = ChainLevelDrafter(
            self.program,
            weights,
            slots,
            kept=self.kept,
            tokens=self.first_tokens,
            distribution=self.distribution,
            warp=self.logits_slots,
        )

    @property
    def shapes(self) -> Sequence[InProcessDraftShape]:
        """Shapes of the drafts. Rounds that include a session with a grammar use the first
        shape."""
        return tuple(self._shapes.values())

    @property
    def first_tokens(self) -> Tensor:
        """int32 [X, num_nodes of the first shape]: a view of the columns of `tokens` that drafts of
        the first shape use."""
        return self.tokens[:, : self.shape.num_nodes]

    def parents_of(self, num_nodes: int) -> Tensor | None:
        """See `RoundDrafter`."""
        return self._parents if self._shapes[num_nodes].is_tree else None

    def forget_drafts(self, slots: int | slice = slice(None)) -> None:
        """Clear the drafts of these slots, so that their next round verifies none. Runs in stream
        order."""
        self.tokens[slots].fill_(-1)
        if self._parents is not None:
            self._parents[slots].fill_(PADDING_NODE)

    def receive_drafts(
        self, slots: Tensor, *, num_nodes: int, rejection: bool
    ) -> DenseChainDistribution | None:
        """Return the distributions that the drafts were drawn from, or None for trees. The drafts
        are already in `tokens`, so nothing is received."""
        return None if self._shapes[num_nodes].is_tree else self.distribution

    def flag_undrafted(self, flags: Tensor) -> Tensor:
        """Return the acceptance flags, int32 [B], unchanged, because the host knows which rows have
        no draft."""
        return flags

    def begin_rows(self) -> None:
        """Do nothing, because rows need no preparation."""

    def write_rows(self, rows: NewRows) -> None:
        """Write the KV of draft rows after which nothing is drafted."""
        self.program.forward.write_rows(rows)

    def draft_round(self, rows: NewRows, *, num_nodes: int, sampled: bool) -> None:
        """Write the KV of new draft rows and draft for each of their sessions. num_nodes: number of
        nodes of the draft shape, including the root. sampled: whether any session may use the
        logits processor or need the distributions of its drafts."""
        shape = self._shapes[num_nodes]
        if sampled and shape is self.shape:
            self.kept.store_rows(rows)
        if shape.is_tree:
            self._draft_trees(rows, shape, sampled=sampled)
            return
        chain = self.program.draft_chain(
            rows,
            length=shape.num_nodes,
            state=self.slots.sampling,
            warp=self.logits_slots.state if sampled else None,
            draft_distributions=self.distribution.probs
            if sampled and self.distribution is not None
            else None,
        )
        slots = rows.slots.long()
        self.tokens[:, : shape.num_nodes].index_copy_(0, slots, chain.tokens)
        if shape.num_nodes < self.shape.num_nodes:
            # The next round may verify chains of the usual length.
            self.first_tokens[:, shape.num_nodes :].index_fill_(0, slots, -1)

    def store_catch_up(self, rows: NewRows) -> None:
        """Store these draft rows for drafts that are made later. If the drafts are chains, also run
        the head over the rows."""
        self.kept.store_rows(rows)
        if self.levels is not None:
            self.levels.run_rows(rows)

    def draft_stored(self, slots: Tensor, allowed_tokens: DraftTokenMasks) -> None:
        """Draft trees from the stored draft rows of these slots, int32 [B], under masks for the
        first level. The trees replace the current drafts of the slots."""
        rows = self.kept.rows_of(slots)
        self._draft_trees(rows, self.shape, sampled=True, allowed_tokens=allowed_tokens)

    def read_trees(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Wait for the device, and return the tokens and the parents of these slots' trees on the
        host, int32 [len(slots), num_nodes of the first shape] each."""
        assert self._parents is not None
        chosen, count = list(slots), self.shape.num_nodes
        return self.tokens.cpu()[chosen, :count], self._parents.cpu()[chosen, :count]

    def _draft_trees(
        self,
        rows: NewRows,
        shape: InProcessDraftShape,
        *,
        sampled: bool,
        allowed_tokens: DraftTokenMasks | None = None,
    ) -> None:
        assert self._parents is not None
        tree = self.program.draft_tree(
            rows,
            state=self.slots.sampling,
            num_nodes=shape.num_nodes,
            top_k=shape.top_k,
            depth=shape.levels,
            warp=self.logits_slots.state if sampled else None,
            coupled=True,
            allowed_tokens=allowed_tokens,
        )
        places = rows.slots.long()
        self.tokens[:, : shape.num_nodes].index_copy_(0, places, tree.tokens)
        self._parents[:, : shape.num_nodes].index_copy_(0, places, tree.parents)
