"""Drafting for what has not happened, with an EAGLE-3 head on static device tensors.

A live proposal is run once more as it stands, its tokens given (`score`): the outputs at its places
say what may follow there, and are the own features of the branches that begin there. A branch is
drafted like a session (`DraftProgram.chain`, `tree`) over a block table of its own, which begins
with the blocks of the session (`fork`): of the prefix at most one partly filled block is copied.

B sessions or branches, R rows of a branch's path, N nodes of a proposal, P = 1 + N places (the
root's, then the nodes'), c candidates a place, H hidden size, X session slots, T blocks of a table,
S blocks of a branch's own, V branches that there are blocks for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.draft import DraftProgram, NewRows, Places, Seen
from outrider.engine.device.drawing import Drawing
from outrider.engine.device.other_ids import ranked_ids
from outrider.engine.kernels.attention.rotary import rotary_table
from outrider.engine.kernels.drafts.given import given_layout
from outrider.engine.kernels.state import SamplingState, WarpState
from outrider.engine.kernels.warp.logits import warp_drafts
from outrider.engine.kernels.warp.path import TokenPath


class GivenNodes(NamedTuple):
    """The nodes of proposals, parents before their children."""

    tokens: Tensor
    """int32 [B, N]: target ids; negative: there is no node."""
    parents: Tensor
    """int32 [B, N]: the node above, ROOT (-1) below the root. Nodes that are not there have one
    too."""
    are_chains: bool = False
    """Whether every node is the parent of the next one."""


class Scores(NamedTuple):
    """What may follow at each place; places without a node have anything."""

    tokens: Tensor
    """int32 [B, P, c]: target ids, best first; -1: there is none."""
    logprobs: Tensor
    """float32 [B, P, c]; -inf: there is none."""
    features: Tensor
    """[B, P, H]: the head's output at each place."""


class BranchRows(NamedTuple):
    """Paths of branches; those of a row past its count are not there, but must be finite."""

    owners: Tensor
    """int32 [B]: the session slot of each branch."""
    counts: Tensor
    """int32 [B]: new rows, the outcome's own the last of them; 0 for padding."""
    starts: Tensor
    """int32 [B]: draft position of the first one."""
    tokens: Tensor
    """int32 [B, R]: target ids; -1 where there is none."""
    sources: Tensor
    """int32 [B, R]: each row's feature among the held ones."""
    draft_keys: Tensor
    """int64 [B]: keys of the DRAFT noise."""


class AheadProgram(DraftProgram):
    """A `DraftProgram` that also drafts for outcomes."""

    def score(
        self,
        rows: NewRows,
        given: GivenNodes,
        *,
        state: SamplingState,
        count: int,
        sweeps: int,
        warp: WarpState | None = None,
    ) -> Scores:
        """Catch up, run given proposals and offer `count` tokens at every place, by the law of
        softmax(logits / T), those of coupled sessions by shared noise. warp: as for `chain`.

        All nodes of a proposal run together, `sweeps` times: at first each with the output of the
        root in the place of its parent's, then with what its parent gave in the sweep before. So
        after k sweeps what stands at the first k levels is exact, and what is below them nearly.
        A session's table must hold the rows up to live + N.
        """
        (batch, num_nodes), new = given.tokens.shape, rows.tokens.numel()
        layout = self._layout(rows, num_steps=1, step_rows=num_nodes)
        below = given_layout(given.parents, layout.live)
        positions = torch.cat((layout.positions[:new], below.positions))
        places = Places(rotary_table(positions, self.weights.inv_freq), layout.write_slots)
        x = self._catch_up(rows, layout, places, prune=True)
        session = Seen(rows.tables, rows.slots, layout.live + 1)
        mask = None if given.are_chains else below.seen[:, 1:]
        tokens, nodes = given.tokens.flatten(), places.at(slice(new, None))
        features = x[:, None].expand(-1, 1 + num_nodes, -1)
        for _ in range(min(sweeps, num_nodes)):
            block = self._block_inputs(tokens, features.flatten(0, 1), rows=below.sources)
            step = self._step(block, nodes, session, num_nodes=num_nodes, mask=mask)
            features = torch.cat((x[:, None], step.view(batch, num_nodes, -1)), dim=1)
        # The tokens are known: one pass over the output projection serves all places.
        logits, following = self.logits(features.flatten(0, 1)), below.following
        if warp is not None:
            columns = self.weights.columns_of(given.tokens)
            path = TokenPath(columns, None if given.are_chains else below.seen)
            logits = warp_drafts(logits, warp, state, rows.slots, following, path)
        heat = state.temperatures[rows.slots.long()].repeat_interleave(1 + num_nodes)
        found, logprobs = ranked_ids(
            logits,
            count,
            state,
            rows.slots,
            following,
            ids=self.weights.target_ids,
            temperatures=heat,
        )
        shape = (batch, 1 + num_nodes, count)
        return Scores(found.view(shape), logprobs.view(shape), features)

    def fork(
        self, rows: BranchRows, *, tables: Tensor, scratch: Tensor, held: Tensor, counted: bool
    ) -> tuple[NewRows, Drawing]:
        """What to draft branches from, as new rows of sessions of their own.

        tables int32 [X, T]; scratch int32 [V, S + 1]: blocks of each branch's own, the last one
        the padding block; held [F, H]: features. A branch must find room in its own blocks for all
        that it writes, from the block of its first row on. counted: whether penalties are to
        count the paths' tokens.
        """
        size, owners = self._block_tokens, rows.owners.long()
        first = (rows.starts // size)[:, None]
        theirs, own = tables[owners], scratch[: len(owners)]
        beyond = torch.arange(tables.shape[1], device=owners.device) - first
        forked = own.gather(1, beyond.clamp(0, own.shape[1] - 1).long())
        self._copy_blocks(theirs.gather(1, first.long())[:, 0], own[:, 0])
        new = NewRows(
            slots=torch.arange(len(owners), dtype=torch.int32, device=owners.device),
            tables=torch.where(beyond < 0, theirs, forked),
            tokens=rows.tokens,
            features=held[rows.sources.long()],
            counts=rows.counts,
            starts=rows.starts,
        )
        uncounted = self.weights.columns_of(rows.tokens) if counted else None
        return new, Drawing(rows.owners, rows.draft_keys, uncounted)

    def _copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy K/V blocks, sources and targets int32 [B]; no block is both."""
        for pool in (self._keys, self._values):
            blocks = pool.view(pool.shape[0], -1, self._block_tokens, pool.shape[2])
            blocks.index_copy_(1, targets.long(), blocks.index_select(1, sources.long()))
