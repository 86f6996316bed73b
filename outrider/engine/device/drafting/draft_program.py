"""Drafting on static device tensors: chains and dynamic trees, whatever drafts them.

Every function launches kernels and looks at no value, see `draft_forward`.

B sessions, R new rows a session, K chain length, F frontier rows of a tree step, n tree nodes,
k candidates a row, H width of an output, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.drafting.alternatives import best_ids
from outrider.engine.device.drafting.draft_forward import DraftForward, NewRows, Seen
from outrider.engine.device.drafting.draft_masks import DraftMasks
from outrider.engine.device.drafting.draft_row_state import Drawing, chain_path, tree_path
from outrider.engine.draft_sampling import LawLimits
from outrider.engine.kernels.drafts.coupled_topk import put_coupled_topk
from outrider.engine.kernels.drafts.distribution_sampling import (
    ChainLaws,
    DrawnLaws,
    draw_from_laws,
    stack_laws,
)
from outrider.engine.kernels.drafts.growth import (
    FrontierRows,
    empty_candidates,
    grow_mask,
    num_candidates,
    select_frontier,
)
from outrider.engine.kernels.drafts.in_process_distributions import put_own_laws
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.drafts.tree_rank import TreeDraft, rank_tree
from outrider.engine.kernels.logits_processor.process import warp_drafts
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.session_tensors import SamplingState, WarpState


class ChainDraft(NamedTuple):
    """One chain a session."""

    tokens: Tensor
    """int32 [B, K]: target ids."""
    columns: Tensor
    """int32 [B, K]: draft ids."""
    laws: ChainLaws | None = None
    """The laws that the tokens were drawn from in a form that can be shipped, if asked for."""
    others: Tensor | None = None
    """int32 [B, K, NUM_OTHERS]: target ids that might have been drafted at each level, best first,
    -1 where there are no more; if asked for."""


class DraftProgram:
    """Drafts by one forward as functions of device tensors.

    A session's table must hold the rows up to live + K - 1 (chains) or live + (depth - 1) * F
    (trees).
    """

    def __init__(self, forward: DraftForward) -> None:
        self.forward = forward

    def catch_up(self, rows: NewRows, *, prune: bool = True) -> Tensor:
        """See `DraftForward.catch_up`, by itself."""
        forward, layout = self.forward, self.forward.layout(rows)
        places = forward.places(layout.positions, layout.write_slots)
        return forward.catch_up(rows, layout, places, prune=prune)

    def chain(
        self,
        rows: NewRows,
        *,
        state: SamplingState,
        length: int,
        warp: WarpState | None = None,
        own_laws: Tensor | None = None,
        law_limits: LawLimits | None = None,
        drawing: Drawing | None = None,
        legal: DraftMasks | None = None,
        with_others: bool = False,
        prune: bool = True,
    ) -> ChainDraft:
        """Catch up, then draft `length` tokens by each session's rule.

        Greedy and target-only sessions take the mode, coupled ones the target's noise, rejection
        ones draw from softmax(logits / T). own_laws: float32 [X, >= K, Vd], by slot and level,
        where these are kept for `accept_sampled`; None: nowhere. warp: what sessions do to draft
        logits; None: nothing. law_limits: draw from laws within these instead, and return them;
        rejection sessions only. drawing: whose rule, warper and noise; None: those of the rows'
        slots. legal: what may be drafted at each level; None: anything. with_others: asks for
        these.
        """
        forward = self.forward
        layout = forward.layout(rows, num_steps=length - 1)
        places = forward.places(layout.positions, layout.write_slots)
        x = forward.catch_up(rows, layout, places, prune=prune)
        ids, (batch, num_new) = forward.vocabulary.target_ids, rows.tokens.shape
        columns, drawn, others = list[Tensor](), list[DrawnLaws](), list[Tensor]()
        owners, told, law_state = rows.slots, None, (state, rows.slots)
        if drawing is not None:
            owners, told = drawing.owners, drawing.uncounted
            law_state = (state, owners) if law_limits is None else drawing.keyed(state)
        for level in range(length):
            where = (state, owners, layout.following[level])
            if level:
                first = batch * (num_new + level - 1)
                here = slice(first, first + batch)
                session = Seen(rows.tables, rows.slots, layout.positions[here])
                x = forward.step(columns[-1], x, places.at(here), session, num_nodes=1)
            logits = forward.logits(x)
            if legal is not None:
                logits = legal.cut(logits, level, ids)
            if warp is not None:
                logits = warp_drafts(logits, warp, *where, chain_path(told, columns))
            if law_limits is not None:
                drawn.append(
                    draw_from_laws(logits, *law_state, where[2], ids=ids, limits=law_limits)
                )
                columns.append(drawn[-1].columns)
                continue
            columns.append(choose_tokens(logits, *where, rows_per_slot=1, side="draft", ids=ids))
            if with_others:
                others.append(best_ids(logits, *where, ids=ids))
            if own_laws is not None:
                put_own_laws(own_laws, logits, state, owners, level)
        chosen = torch.stack(columns, dim=1)
        return ChainDraft(
            tokens=ids[chosen.long()].int(),
            columns=chosen,
            laws=stack_laws(drawn) if drawn else None,
            others=torch.stack(others, dim=1) if others else None,
        )

    def tree(
        self,
        rows: NewRows,
        *,
        state: SamplingState,
        num_nodes: int,
        top_k: int,
        depth: int,
        warp: WarpState | None = None,
        coupled: bool = False,
        drawing: Drawing | None = None,
        legal: DraftMasks | None = None,
    ) -> TreeDraft:
        """Catch up, then grow EAGLE's dynamic tree.

        Nodes are ranked by sums of log softmax(logits / T); those of coupled sessions by shared
        noise, if `coupled` says that there may be any. warp, drawing, legal: as for `chain`, but
        that only the first level is masked.
        """
        batch, width = rows.slots.shape[0], min(top_k, num_nodes)
        forward = self.forward
        layout = forward.layout(rows, num_steps=depth - 1, step_rows=width)
        places = forward.places(layout.positions, layout.write_slots)
        x = forward.catch_up(rows, layout, places)
        owners, told = rows.slots, None
        if drawing is not None:
            owners, told = drawing.owners, drawing.uncounted
        target_ids, heat = forward.vocabulary.target_ids, state.temperatures[owners.long()]
        session = Seen(rows.tables, rows.slots, layout.live + 1)
        candidates = empty_candidates(batch, num_candidates(top_k, width, depth), x.device)
        frontier: FrontierRows | None = None
        mask: Tensor | None = None
        first, place, drafted = 0, rows.tokens.numel(), list[Tensor]()
        for level in range(depth):
            if frontier is not None:
                drafted.append(frontier.columns)
                here = slice(place, place + batch * width)
                mask = grow_mask(mask, frontier.parents)
                x = forward.step(
                    frontier.columns.flatten(),
                    x,
                    places.at(here),
                    session,
                    num_nodes=width,
                    mask=mask,
                    parents=frontier.parents.flatten(),
                )
                place += batch * width
            logits, count = forward.logits(x), width if level else 1
            if legal is not None and not level:
                logits = legal.cut(logits, level, target_ids)
            if warp is not None:
                path = tree_path(told, drafted, mask)
                following = layout.following[level].repeat_interleave(count)
                logits = warp_drafts(logits, warp, state, owners, following, path)
            row_heat = heat[:, None].expand(-1, count).reshape(-1)
            offered, ids = log_softmax_topk(logits, top_k, temperatures=row_heat)
            if coupled:
                where = layout.following[level].repeat_interleave(count)
                put_coupled_topk(offered, ids, logits, state, owners, where, ids=target_ids)
            frontier = select_frontier(offered, ids, frontier, candidates, first, width=width)
            first += offered.numel() // batch
        return rank_tree(candidates, target_ids, num_nodes=num_nodes)
