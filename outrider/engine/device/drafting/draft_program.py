"""Drafts chains and dynamic trees on static device tensors, with any `DraftForward`.

Every function launches kernels without reading values on the host. `draft_forward` defines draft
rows and live rows.

Shapes: B sessions, R new rows a session, K chain length, F nodes per session of a tree step, n tree
nodes, H width of an output, V target vocabulary size, Vd draft vocabulary size, X session slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.drafting.alternatives import best_alternatives
from outrider.engine.device.drafting.draft_forward import AttentionContext, DraftForward, NewRows
from outrider.engine.device.drafting.draft_masks import DraftTokenMasks
from outrider.engine.device.drafting.draft_row_state import (
    DraftSampling,
    chain_output_path,
    tree_output_path,
)
from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.kernels.drafts.coupled_topk import put_coupled_topk
from outrider.engine.kernels.drafts.distribution_sampling import (
    ChainDistributions,
    DrawnDistributions,
    draw_from_distributions,
    stack_distributions,
)
from outrider.engine.kernels.drafts.growth import (
    FrontierRows,
    empty_candidates,
    grow_mask,
    num_candidates,
    select_frontier,
)
from outrider.engine.kernels.drafts.in_process_distributions import write_distributions
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.drafts.tree_rank import TreeDraft, rank_tree
from outrider.engine.kernels.logits_processor.process import process_draft_logits
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.session_tensors import LogitsProcessorState, SamplingState


class ChainLevels(NamedTuple):
    """Features and logits of the K rows that predict the tokens of each chain. The first of them is
    the session's live row."""

    features: tuple[Tensor, ...]
    """Outputs of the draft model, one tensor [B, H] for each of the K rows."""
    logits: tuple[Tensor, ...]
    """Draft logits after the logits processor, one tensor [B, Vd] for each of the K rows."""


class ChainDraft(NamedTuple):
    """Drafted chains, one for each session."""

    tokens: Tensor
    """int32 [B, K]: target ids."""
    columns: Tensor
    """int32 [B, K]: draft ids."""
    distributions: ChainDistributions | None = None
    """The distributions that the tokens were drawn from, in a form that can be sent to the
    verifier. None unless `distribution_limits` are given."""
    alternatives: Tensor | None = None
    """int32 [B, K, NUM_ALTERNATIVES]: the most probable target ids at each position of the chain,
    best first, padded with -1. None unless requested."""
    levels: ChainLevels | None = None
    """Features and logits of the rows that predict the tokens. None unless requested."""


class DraftProgram:
    """Drafts chains and trees with one `DraftForward`, as functions of device tensors.

    A session's block table must cover the rows up to live + K - 1 (chains) or live + (depth - 1) *
    F (trees), where `live` is the position of the session's live row (its newest row).
    """

    def __init__(self, forward: DraftForward) -> None:
        self.forward = forward

    def catch_up(self, rows: NewRows, *, prune: bool = True) -> Tensor:
        """Write the KV of new rows and return the output [B, H] of each session's live row, without
        drafting. prune: see `DraftForward.catch_up`."""
        forward, layout = self.forward, self.forward.layout(rows)
        places = forward.row_positions(layout.positions, layout.write_slots)
        return forward.catch_up(rows, layout, places, prune=prune)

    def draft_chain(
        self,
        rows: NewRows,
        *,
        state: SamplingState,
        length: int,
        warp: LogitsProcessorState | None = None,
        draft_distributions: Tensor | None = None,
        distribution_limits: DistributionLimits | None = None,
        mixed_rules: bool = False,
        drawing: DraftSampling | None = None,
        allowed_tokens: DraftTokenMasks | None = None,
        with_others: bool = False,
        with_levels: bool = False,
        given: Tensor | None = None,
        prune: bool = True,
    ) -> ChainDraft:
        """Write the KV of new rows, then draft a chain of `length` tokens for each session.

        The session's acceptance rule decides how its tokens are chosen. Greedy and target-only
        sessions take the most probable token. Coupled sessions take the most probable token after
        adding the noise shared with the target. Rejection sessions draw from softmax(logits / T).

        state: sampling state, indexed by session slot. warp: state of the logits processor; None to
        leave the logits as they are. draft_distributions: float32 [X, at least K, Vd], to which the
        distribution at each position of a session's chain is written for `accept_sampled`; None to
        keep none. distribution_limits: size limits of distributions. If given, tokens are drawn
        from distributions of limited size, which are returned; all sessions must then follow the
        rejection rule, unless `mixed_rules` is set. mixed_rules: whether sessions of other rules
        are allowed, too; they choose their tokens as they do without limits. drawing: sampling
        state for rows whose session slot is not the slot of their block table; None if the slots
        are the same. allowed_tokens: masks of the tokens that may be drafted; None to allow all.
        with_others: whether to return alternatives. with_levels: whether to return `ChainLevels`.
        given: int32 [B, K], draft ids that replace drafted tokens; -1 keeps the drafted token.
        prune: see `DraftForward.catch_up`.
        """
        forward = self.forward
        layout = forward.layout(rows, num_steps=length - 1)
        places = forward.row_positions(layout.positions, layout.write_slots)
        x = forward.catch_up(rows, layout, places, prune=prune)
        ids, (batch, num_new) = forward.vocabulary.target_ids, rows.tokens.shape
        columns, drawn, others = list[Tensor](), list[DrawnDistributions](), list[Tensor]()
        levels: list[tuple[Tensor, Tensor]] = []
        owners, told, distribution_state = rows.slots, None, (state, rows.slots)
        if drawing is not None:
            owners, told = drawing.owners, drawing.pending_tokens
            distribution_state = (
                (state, owners) if distribution_limits is None else drawing.sampling_state(state)
            )
        for level in range(length):
            where = (state, owners, layout.following[level])
            if level:
                first = batch * (num_new + level - 1)
                here = slice(first, first + batch)
                session = AttentionContext(rows.tables, rows.slots, layout.positions[here])
                x = forward.run_step(columns[-1], x, places.select(here), session, num_nodes=1)
            logits = forward.logits(x)
            if allowed_tokens is not None:
                logits = allowed_tokens.apply_masks(logits, level, ids)
            if warp is not None:
                logits = process_draft_logits(
                    logits, warp, *where, chain_output_path(told, columns)
                )
            if with_levels:
                levels.append((x, logits))
            if distribution_limits is not None:
                drawn.append(
                    draw_from_distributions(
                        logits, *distribution_state, where[2], ids=ids, limits=distribution_limits
                    )
                )
                if not mixed_rules:
                    columns.append(drawn[-1].columns)
                    continue
            column = choose_tokens(logits, *where, rows_per_slot=1, side="draft", ids=ids)
            if drawn:
                column = torch.where(drawn[-1].sizes > 0, drawn[-1].columns, column)
            if given is not None:
                column = torch.where(given[:, level] >= 0, given[:, level], column)
            columns.append(column)
            if with_others:
                others.append(best_alternatives(logits, *where, ids=ids))
            if draft_distributions is not None:
                write_distributions(draft_distributions, logits, state, owners, level)
        chosen = torch.stack(columns, dim=1)
        return ChainDraft(
            tokens=ids[chosen.long()].int(),
            columns=chosen,
            distributions=stack_distributions(drawn) if drawn else None,
            alternatives=torch.stack(others, dim=1) if others else None,
            levels=ChainLevels(*zip(*levels, strict=True)) if levels else None,
        )

    def draft_tree(
        self,
        rows: NewRows,
        *,
        state: SamplingState,
        num_nodes: int,
        top_k: int,
        depth: int,
        warp: LogitsProcessorState | None = None,
        coupled: bool = False,
        drawing: DraftSampling | None = None,
        allowed_tokens: DraftTokenMasks | None = None,
    ) -> TreeDraft:
        """Write the KV of new rows, then draft a dynamic tree of `num_nodes` nodes for each
        session, as EAGLE-2 does.

        Nodes are ranked by the sum of log softmax(logits / T) along their path. coupled: whether
        any session may follow the coupled rule. Nodes of such sessions are ranked after adding the
        noise shared with the target. top_k: maximum number of children per node. depth: number of
        levels. state, warp, drawing: as in `draft_chain`. allowed_tokens: masks of the first level;
        other levels are not masked.
        """
        batch, width = rows.slots.shape[0], min(top_k, num_nodes)
        forward = self.forward
        layout = forward.layout(rows, num_steps=depth - 1, step_rows=width)
        places = forward.row_positions(layout.positions, layout.write_slots)
        x = forward.catch_up(rows, layout, places)
        owners, told = rows.slots, None
        if drawing is not None:
            owners, told = drawing.owners, drawing.pending_tokens
        target_ids, heat = forward.vocabulary.target_ids, state.temperatures[owners.long()]
        session = AttentionContext(rows.tables, rows.slots, layout.live + 1)
        candidates = empty_candidates(batch, num_candidates(top_k, width, depth), x.device)
        frontier: FrontierRows | None = None
        mask: Tensor | None = None
        first, place, drafted = 0, rows.tokens.numel(), list[Tensor]()
        for level in range(depth):
            if frontier is not None:
                drafted.append(frontier.columns)
                here = slice(place, place + batch * width)
                mask = grow_mask(mask, frontier.parents)
                x = forward.run_step(
                    frontier.columns.flatten(),
                    x,
                    places.select(here),
                    session,
                    num_nodes=width,
                    mask=mask,
                    parents=frontier.parents.flatten(),
                )
                place += batch * width
            logits, count = forward.logits(x), width if level else 1
            if allowed_tokens is not None and not level:
                logits = allowed_tokens.apply_masks(logits, level, target_ids)
            if warp is not None:
                path = tree_output_path(told, drafted, mask)
                following = layout.following[level].repeat_interleave(count)
                logits = process_draft_logits(logits, warp, state, owners, following, path)
            row_heat = heat[:, None].expand(-1, count).reshape(-1)
            offered, ids = log_softmax_topk(logits, top_k, temperatures=row_heat)
            if coupled:
                where = layout.following[level].repeat_interleave(count)
                put_coupled_topk(offered, ids, logits, state, owners, where, ids=target_ids)
            frontier = select_frontier(offered, ids, frontier, candidates, first, width=width)
            first += offered.numel() // batch
        return rank_tree(candidates, target_ids, num_nodes=num_nodes)
