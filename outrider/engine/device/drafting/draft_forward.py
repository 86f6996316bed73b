"""Interface of a draft model's forward passes on a device, for EAGLE heads and small models.

Every function launches kernels without reading values on the host, so that a whole draft can be one
CUDA graph. On a CPU the same code uses the kernels' PyTorch references.

A draft row is one input of the draft model: a token, together with a feature if the model is an
EAGLE head. Row r of a session has draft position r and KV slot r. The live row of a session is its
newest row, the only one whose prediction is used.

Shapes: B sessions, R new rows a session, N nodes of a proposal, P = 1 + N positions (the root, then
the nodes), M rows of one forward, F width of a feature, H width of an output, V target vocabulary
size, Vd draft vocabulary size, L layers, G key/value heads, S pool slots, d head dimension, X
session slots, T blocks of a block table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.kernels.attention.rotary import rotary_table
from outrider.engine.kernels.drafts.inputs import DraftLayout, draft_layout
from outrider.engine.kernels.drafts.proposal_layout import ProposalLayout, layout_proposals


class NewRows(NamedTuple):
    """New draft rows of a batch of sessions, whose KV is not written yet. Each session has R rows,
    of which only the first `counts` are valid."""

    slots: Tensor
    """int32 [B]: session slots, which are row indices of `tables`."""
    tables: Tensor
    """int32 [X, T]: KV blocks of every session slot."""
    tokens: Tensor
    """int32 [B, R]: the token of each row; -1 for rows without a token."""
    features: Tensor
    """[B, R, F]: the feature of each row."""
    counts: Tensor
    """int32 [B]: number of valid rows of each session; 0 for padding."""
    starts: Tensor
    """int32 [B]: draft position of each session's first new row."""


class ProposalNodes(NamedTuple):
    """Draft tokens of the proposals of B sessions, ordered so that parents come before their
    children."""

    tokens: Tensor
    """int32 [B, N]: target ids; negative for padding nodes."""
    parents: Tensor
    """int32 [B, N]: index of each node's parent; ROOT (-1) for children of the root. Padding nodes
    need a valid parent, too."""
    are_chains: bool = False
    """Whether every node is the parent of the next one."""


class RowPositions(NamedTuple):
    """Positions and pool slots of the rows of one forward."""

    positions: Tensor
    """int32 [M]: draft position of each row."""
    table: Tensor
    """[M, 2, d/2]: cosines and sines of the rotary embedding."""
    write_slots: Tensor
    """int64 [M]: pool slot that each row's KV is written to; -1 to write none."""

    def select(self, rows: slice) -> RowPositions:
        """Return the positions and slots of a slice of the rows."""
        return RowPositions(self.positions[rows], self.table[rows], self.write_slots[rows])


class AttentionContext(NamedTuple):
    """Block tables int32 [X, T], session slots int32 [B] and context lengths for attention."""

    tables: Tensor
    slots: Tensor
    context: Tensor
    """int32 [B]: number of the session's first KV rows, which all rows of the forward attend to."""


class DraftVocabulary(NamedTuple):
    """Mapping between draft ids, which are the columns of the draft model's logits, and token ids
    of the target."""

    target_ids: Tensor
    """int64 [Vd]: target id of every draft id."""
    draft_columns: Tensor
    """int32 [V]: draft id of every target id; -1 for target ids that cannot be drafted."""

    @classmethod
    def identity(cls, vocab_size: int, device: torch.device) -> DraftVocabulary:
        """Return a vocabulary in which draft ids equal target ids."""
        ids = torch.arange(vocab_size, device=device)
        return cls(ids, ids.int())

    def columns_of(self, tokens: Tensor) -> Tensor:
        """Return the draft ids of the target ids `tokens`, int32 of the same shape. The result is
        -1 for negative ids and for target ids that cannot be drafted."""
        columns = self.draft_columns[tokens.clamp(min=0).long()]
        return torch.where(tokens >= 0, columns, -1)


class DraftForward(ABC):
    """Forward passes of a draft model over paged KV storage that the caller owns.

    A session's block table must cover all rows that are written. The KV of rows past the end of the
    table is dropped. Rows of a session with count 0 (padding) write no KV, and their outputs are
    undefined.
    """

    feature_size: int
    """Width F of a feature; 0 if draft rows consist of tokens alone."""
    keeps_proposal_kv: bool = False
    """Whether the KV that `run_proposal` writes for a chain equals the KV of new rows with the same
    tokens. Drafts that continue the chain then need not run its tokens again."""

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        inv_freq: Tensor,
        *,
        storage: Tensor,
        block_tokens: int,
        max_len: int,
    ) -> None:
        """inv_freq: float32 [d/2], rotary frequencies. storage: [2, L, G, S, d], keys and values,
        all of which must be finite. max_len: maximum number of rows of a session."""
        self.vocabulary = vocabulary
        self.block_tokens = block_tokens
        self._storage, self._inv_freq, self._max_len = storage, inv_freq, max_len

    @property
    def first_token(self) -> int:
        """Index of the session's token that draft row 0 contains. It is 1 for a head with features,
        because a draft row pairs a feature with the token after it, and 0 otherwise."""
        return 1 if self.feature_size else 0

    def layout(self, rows: NewRows, *, num_steps: int = 0, step_rows: int = 1) -> DraftLayout:
        """Return the layout of new rows and of `num_steps` draft steps after them, with `step_rows`
        rows per session in each step; see `draft_layout`."""
        found = draft_layout(
            rows.counts,
            rows.starts,
            rows.tables,
            rows.slots,
            num_rows=rows.tokens.shape[1],
            num_steps=num_steps,
            step_rows=step_rows,
            block_tokens=self.block_tokens,
        )
        return found if self.first_token else found._replace(following=found.following - 1)

    def proposal_layout(self, given: ProposalNodes, live: Tensor) -> ProposalLayout:
        """Return the layout of the nodes of proposals; see `layout_proposals`. live: int32 [B],
        draft positions of the live rows, which are the proposals' roots."""
        found = layout_proposals(given.parents, live)
        return found if self.first_token else found._replace(following=found.following - 1)

    def row_positions(self, positions: Tensor, write_slots: Tensor) -> RowPositions:
        """Return the `RowPositions` of M rows. positions: int32 [M], draft positions. write_slots:
        int64 [M], pool slots for the rows' KV."""
        return RowPositions(positions, rotary_table(positions, self._inv_freq), write_slots)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy KV blocks of all layers. sources and targets are block ids, int32 [B]; no block may
        be in both."""
        width = self._storage.shape[-1]
        blocks = self._storage.view(
            -1, self._storage.shape[3] // self.block_tokens, self.block_tokens, width
        )
        blocks.index_copy_(1, targets.long(), blocks.index_select(1, sources.long()))

    @abstractmethod
    def write_rows(self, rows: NewRows) -> None:
        """Write the KV of new rows without computing outputs."""

    @abstractmethod
    def catch_up(
        self, rows: NewRows, layout: DraftLayout, places: RowPositions, *, prune: bool = True
    ) -> Tensor:
        """Write the KV of new rows and return the output [B, H] of each session's live row.

        places: positions of the new rows, possibly followed by positions of later rows. prune:
        whether rows that are not live may be left out of the computation once their KV is written.
        """

    @abstractmethod
    def run_step(
        self,
        columns: Tensor,
        x: Tensor,
        places: RowPositions,
        session: AttentionContext,
        *,
        num_nodes: int,
        mask: Tensor | None = None,
        parents: Tensor | None = None,
    ) -> Tensor:
        """Run M drafted tokens and return their outputs [M, H].

        columns: the tokens' draft ids, [M]. x: outputs of the rows that the tokens follow, [any
        number, H]. places: positions of the tokens. session: context that the tokens attend to.
        num_nodes: number of tokens per session. parents: int32 [M], the row of x that each token
        follows; None if token i follows row i. mask: as in `tree_attention`.
        """

    @abstractmethod
    def run_proposal(
        self,
        rows: NewRows,
        given: ProposalNodes,
        layout: DraftLayout,
        below: ProposalLayout,
        sweeps: int,
    ) -> Tensor:
        """Write the KV of new rows, run the nodes of the proposals together, and return the outputs
        [B, P, H] of the live rows and the nodes.

        layout: layout of the new rows. below: layout of the nodes. sweeps: number of passes over
        the nodes, for models in which the input of a node includes the output of its parent.
        """

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor:
        """Return the draft logits [M, Vd], float32 or bfloat16, for outputs x [M, H]."""
