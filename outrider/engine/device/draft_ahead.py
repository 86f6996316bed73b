"""Drafting for what has not happened, with an EAGLE-3 head on static device tensors.

A live proposal is run once more as it stands, its tokens given (`score`): the outputs at its places
say what may follow there, and are the own features of the branches that begin there. A branch is
drafted like a session (`DraftProgram.chain`, `tree`) over a block table of its own, which begins
with the blocks of the session (`fork`): of the prefix at most one partly filled block is copied.

B sessions or branches, R rows of a branch's path, L levels of W nodes of a proposal, P = 1 + L * W
places (the root's, then level by level), c candidates a place, H hidden size, X session slots,
T blocks of a table, S blocks of a branch's own, V branches that there are blocks for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.draft import DraftProgram, NewRows, Seen
from outrider.engine.device.drawing import Drawing
from outrider.engine.kernels.drafts.coupled_topk import put_coupled_topk
from outrider.engine.kernels.drafts.growth import grow_mask
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.state import SamplingState, WarpState
from outrider.engine.kernels.warp.logits import warp_drafts
from outrider.engine.kernels.warp.path import TokenPath


class GivenNodes(NamedTuple):
    """The nodes of proposals, level by level."""

    tokens: Tensor
    """int32 [L, B, W]: target ids; negative: there is no node."""
    parents: Tensor
    """int32 [L, B, W]: row of the parent in the level above: b * W + w, b on the first level.
    Nodes that are not there have one too."""


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
        warp: WarpState | None = None,
    ) -> Scores:
        """Catch up, run given proposals and offer `count` tokens at every place, by the law of
        softmax(logits / T), those of coupled sessions by shared noise. warp: as for `chain`.

        A session's table must hold the rows up to live + L * W.
        """
        (levels, batch, width), w = given.tokens.shape, self.weights
        layout = self._layout(rows, num_steps=levels, step_rows=width)
        places = self._places(layout)
        x = self._catch_up(rows, layout, places, prune=True)
        session = Seen(rows.tables, rows.slots, layout.live + 1)
        features, masks = [x.view(batch, 1, -1)], list[Tensor]()
        mask: Tensor | None = None
        place = rows.tokens.numel()
        for level in range(levels):
            here = slice(place, place + batch * width)
            parents = given.parents[level]
            block = self._block_inputs(given.tokens[level].flatten(), x, rows=parents.flatten())
            if width == 1:
                session = session._replace(context=layout.positions[here])
            else:
                mask = grow_mask(mask, parents)
                masks.append(mask)
            x = self._step(block, places.at(here), session, num_nodes=width, mask=mask)
            features.append(x.view(batch, width, -1))
            place += batch * width
        joined = torch.cat(features, dim=1)
        # The tokens are known: one pass over the output projection serves all levels.
        logits = self.logits(joined.flatten(0, 1))
        below = layout.following[1:].repeat_interleave(width, dim=0)
        following = torch.cat((layout.following[:1], below)).t().flatten()
        if warp is not None:
            path = _given_path(self._columns(given.tokens), masks)
            logits = warp_drafts(logits, warp, state, rows.slots, following, path)
        heat = state.temperatures[rows.slots.long()].repeat_interleave(joined.shape[1])
        logprobs, columns = log_softmax_topk(logits, count, temperatures=heat)
        put_coupled_topk(logprobs, columns, logits, state, rows.slots, following, ids=w.target_ids)
        found = w.target_ids[columns.clamp(min=0).long()].int()
        shape = (batch, joined.shape[1], count)
        tokens = torch.where(columns >= 0, found, -1)
        return Scores(tokens.view(shape), logprobs.view(shape), joined)

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
        uncounted = self._columns(rows.tokens) if counted else None
        return new, Drawing(rows.owners, rows.draft_keys, uncounted)

    def _copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy K/V blocks, sources and targets int32 [B]; no block is both."""
        for pool in (self._keys, self._values):
            blocks = pool.view(pool.shape[0], -1, self._block_tokens, pool.shape[2])
            blocks.index_copy_(1, targets.long(), blocks.index_select(1, sources.long()))

    def _columns(self, tokens: Tensor) -> Tensor:
        """Draft ids of target ids, int32 as `tokens`; -1 where there is none."""
        columns = self.weights.draft_columns[tokens.clamp(min=0).long()]
        return torch.where(tokens >= 0, columns, -1)


def _given_path(columns: Tensor, masks: list[Tensor]) -> TokenPath:
    """What is output at each place: columns int32 [L, B, W] of the nodes; masks uint8 [B, W, l * W]
    of the levels l = 1 .. L, none for chains."""
    levels, batch, width = columns.shape
    # A chain's would be a view across sessions; the kernel reads a path's tokens side by side.
    flat = columns.transpose(0, 1).reshape(batch, levels * width).contiguous()
    if not masks:
        return TokenPath(flat)
    pad = torch.nn.functional.pad
    rows = [pad(mask, (0, levels * width - mask.shape[2])) for mask in masks]
    return TokenPath(flat, torch.cat((torch.zeros_like(rows[0][:, :1]), *rows), dim=1))
