"""Drafting with an EAGLE-3 head on static device tensors: chains and dynamic trees.

Every function launches kernels and looks at no value, so that a whole draft can be one CUDA graph;
on a CPU the same code runs on the kernels' torch twins.

B sessions, R new rows a session, K chain length, F frontier rows of a tree step, n tree nodes,
k candidates a row, H hidden size, Vd draft vocabulary, X session slots, T blocks of a table.
Draft row i pairs feature f_i with token t_{i+1} at draft position i and K/V slot i; the live row is
the newest one, the only one whose prediction is wanted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.draft_masks import DraftMasks
from outrider.engine.device.drawing import Drawing, chain_path, tree_path
from outrider.engine.device.head_weights import HeadWeights
from outrider.engine.device.other_ids import best_ids
from outrider.engine.device.own_law import own_law
from outrider.engine.draft_sampling import LawLimits
from outrider.engine.kernels.attention.rotary import rotary_table, rotary_write
from outrider.engine.kernels.attention.tree import tree_attention
from outrider.engine.kernels.drafts.coupled_topk import put_coupled_topk
from outrider.engine.kernels.drafts.growth import (
    FrontierRows,
    empty_candidates,
    grow_mask,
    num_candidates,
    select_frontier,
)
from outrider.engine.kernels.drafts.inputs import (
    BlockInputs,
    DraftLayout,
    draft_layout,
    head_inputs,
)
from outrider.engine.kernels.drafts.law_draw import ChainLaws, DrawnLaws, draw_from_laws, stack_laws
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.drafts.tree_rank import TreeDraft, rank_tree
from outrider.engine.kernels.linear.fused import SKINNY_ROWS, add_linear, fused_linear
from outrider.engine.kernels.norm import rms_norm
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.state import SamplingState, WarpState
from outrider.engine.kernels.warp.logits import warp_drafts


class NewRows(NamedTuple):
    """New draft rows of a batch of sessions: the first `counts` of each session's R rows."""

    slots: Tensor
    """int32 [B]: rows of `tables`."""
    tables: Tensor
    """int32 [X, T]: K/V blocks of every session slot."""
    tokens: Tensor
    """int32 [B, R]: t_{i+1} of row i."""
    features: Tensor
    """[B, R, H]: f_i of row i."""
    counts: Tensor
    """int32 [B]: rows that are there; 0 for padding."""
    starts: Tensor
    """int32 [B]: draft position of the first one."""


class ChainDraft(NamedTuple):
    """One chain a session."""

    tokens: Tensor
    """int32 [B, K]: target ids."""
    columns: Tensor
    """int32 [B, K]: draft ids."""
    probs: Tensor | None
    """float32 [B, K, Vd]: softmax(logits / T), the laws that the tokens were drawn from."""
    laws: ChainLaws | None = None
    """The same in a form that can be shipped, if asked for."""
    others: Tensor | None = None
    """int32 [B, K, NUM_OTHERS]: target ids that might have been drafted at each level, best first,
    -1 where there are no more; if asked for."""


class Places(NamedTuple):
    """Where the rows of one forward stand."""

    table: Tensor
    """[N, 2, d/2]: cos and sin."""
    write_slots: Tensor
    """int64 [N]."""

    def at(self, rows: slice) -> Places:
        """Those of some rows."""
        return Places(self.table[rows], self.write_slots[rows])


class Seen(NamedTuple):
    """What attention needs beside the queries."""

    tables: Tensor
    slots: Tensor
    context: Tensor
    """int32 [B]: K/V rows that every row sees."""


class DraftProgram:
    """The head as functions of device tensors. K/V lives in a paged storage of the caller.

    A session's table must hold the rows up to live + K - 1 (chains) or live + (depth - 1) * F
    (trees): what is past the table's end is not kept. Rows of a session with count 0 (padding) are
    written nowhere; what is computed for them is not defined.
    """

    def __init__(
        self, weights: HeadWeights, *, storage: Tensor, block_tokens: int, max_len: int
    ) -> None:
        """storage [2, 1, G, S, d]: keys and values, finite; max_len: most rows of a session."""
        self.weights = weights
        self._keys, self._values = storage[0, 0], storage[1, 0]
        self._block_tokens = block_tokens
        self._max_len = max_len

    def write(self, rows: NewRows) -> None:
        """Write the K/V of new rows and compute nothing else."""
        layout = self._layout(rows)
        self._write_kv(self._inputs(rows).inputs, self._places(layout))

    def catch_up(self, rows: NewRows, *, prune: bool = True) -> Tensor:
        """Write the K/V of new rows; x [B, H], the output feature of each session's live row.

        prune: dead rows stop after their K/V write, else they run through the block.
        """
        layout = self._layout(rows)
        return self._catch_up(rows, layout, self._places(layout), prune=prune)

    def logits(self, x: Tensor) -> Tensor:
        """Draft logits [N, Vd] of features [N, H]: float32 or bfloat16."""
        w = self.weights
        norm = None if w.config.norm_output else w.final_norm
        dtype = torch.float32 if x.dtype == torch.float16 else None
        eps = w.config.rms_norm_eps
        return fused_linear(x, w.lm_head, norm_weight=norm, eps=eps, out_dtype=dtype)

    def chain(
        self,
        rows: NewRows,
        *,
        state: SamplingState,
        length: int,
        warp: WarpState | None = None,
        with_probs: bool = False,
        law_limits: LawLimits | None = None,
        drawing: Drawing | None = None,
        legal: DraftMasks | None = None,
        with_others: bool = False,
        prune: bool = True,
    ) -> ChainDraft:
        """Catch up, then draft `length` tokens by each session's rule.

        Greedy and target-only sessions take the mode, coupled ones the target's noise, rejection
        ones draw from the laws that `with_probs` returns. warp: what sessions do to draft logits;
        None: nothing. law_limits: draw from laws within these instead, and return them; rejection
        sessions only. drawing: whose rule, warper and noise; None: those of the rows' slots.
        legal: what may be drafted at each level; None: anything. with_others: asks for these.
        """
        layout = self._layout(rows, num_steps=length - 1)
        places = self._places(layout)
        x = self._catch_up(rows, layout, places, prune=prune)
        ids, (batch, num_new) = self.weights.target_ids, rows.tokens.shape
        columns, laws, drawn = list[Tensor](), list[Tensor](), list[DrawnLaws]()
        others = list[Tensor]()
        owners, told, law_state = rows.slots, None, (state, rows.slots)
        if drawing is not None:
            owners, told = drawing.owners, drawing.uncounted
            law_state = (state, owners) if law_limits is None else drawing.keyed(state)
        for level in range(length):
            where = (state, owners, layout.following[level])
            if level:
                first = batch * (num_new + level - 1)
                here = slice(first, first + batch)
                block = self._block_inputs(columns[-1], x, ids=ids)
                session = Seen(rows.tables, rows.slots, layout.positions[here])
                x = self._step(block, places.at(here), session, num_nodes=1, mask=None)
            logits = self.logits(x)
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
            if with_probs:
                laws.append(own_law(logits, state, owners))
        chosen = torch.stack(columns, dim=1)
        return ChainDraft(
            tokens=ids[chosen.long()].int(),
            columns=chosen,
            probs=torch.stack(laws, dim=1) if laws else None,
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
        layout = self._layout(rows, num_steps=depth - 1, step_rows=width)
        places = self._places(layout)
        x = self._catch_up(rows, layout, places, prune=True)
        owners, told = rows.slots, None
        if drawing is not None:
            owners, told = drawing.owners, drawing.uncounted
        target_ids, heat = self.weights.target_ids, state.temperatures[owners.long()]
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
                parents = frontier.parents.flatten()
                block = self._block_inputs(
                    frontier.columns.flatten(), x, ids=target_ids, rows=parents
                )
                x = self._step(block, places.at(here), session, num_nodes=width, mask=mask)
                place += batch * width
            logits, count = self.logits(x), width if level else 1
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

    def _layout(self, rows: NewRows, *, num_steps: int = 0, step_rows: int = 1) -> DraftLayout:
        return draft_layout(
            rows.counts,
            rows.starts,
            rows.tables,
            rows.slots,
            num_rows=rows.tokens.shape[1],
            num_steps=num_steps,
            step_rows=step_rows,
            block_tokens=self._block_tokens,
        )

    def _places(self, layout: DraftLayout) -> Places:
        table = rotary_table(layout.positions, self.weights.inv_freq)
        return Places(table, layout.write_slots)

    def _inputs(self, rows: NewRows) -> BlockInputs:
        return self._block_inputs(rows.tokens.reshape(-1), rows.features.flatten(0, 1))

    def _block_inputs(
        self,
        tokens: Tensor,
        features: Tensor,
        *,
        ids: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> BlockInputs:
        w = self.weights
        return head_inputs(
            tokens,
            features,
            w.embedding,
            w.input_norm,
            w.hidden_norm,
            eps=w.config.rms_norm_eps,
            ids=ids,
            rows=rows,
            norm_before_residual=w.config.norm_before_residual,
        )

    def _catch_up(
        self, rows: NewRows, layout: DraftLayout, places: Places, *, prune: bool
    ) -> Tensor:
        block = self._inputs(rows)
        session = Seen(rows.tables, rows.slots, rows.starts)
        num_rows = rows.tokens.shape[1]
        new = places.at(slice(0, rows.tokens.numel()))
        if num_rows == 1 or not prune:
            x = self._step(block, new, session, num_nodes=num_rows, mask=None)
            return x if num_rows == 1 else x[layout.live_rows]
        session = session._replace(context=layout.live)
        if rows.tokens.numel() <= SKINNY_ROWS:
            # So few rows cost one pass over the weights: queries of dead rows come free.
            query = self._project(block.inputs, new)[layout.live_rows]
        else:
            self._write_kv(block.inputs, new)
            query = self._query(block.inputs[layout.live_rows], new.table[layout.live_rows])
        attended = self._attend(query, session, num_nodes=1, mask=None)
        return self._finish(block.residual[layout.live_rows], attended)

    def _step(
        self,
        block: BlockInputs,
        places: Places,
        session: Seen,
        *,
        num_nodes: int,
        mask: Tensor | None,
    ) -> Tensor:
        """The whole block for every row; x [N, H]."""
        query = self._project(block.inputs, places)
        attended = self._attend(query, session, num_nodes=num_nodes, mask=mask)
        return self._finish(block.residual, attended)

    def _project(self, inputs: Tensor, places: Places) -> Tensor:
        """Queries [N, Q, d] of all rows; their K/V is written."""
        w = self.weights
        qkv = fused_linear(inputs, w.qkv, bias=w.qkv_bias)
        return self._rotate(qkv, places, num_heads=w.config.num_heads)

    def _write_kv(self, inputs: Tensor, places: Places) -> None:
        weight, bias = self.weights.kv
        self._rotate(fused_linear(inputs, weight, bias=bias), places, num_heads=0)

    def _query(self, inputs: Tensor, table: Tensor) -> Tensor:
        weight, bias = self.weights.query
        config = self.weights.config
        query = fused_linear(inputs, weight, bias=bias)
        nowhere = torch.full(query.shape[:1], -1, dtype=torch.int64, device=query.device)
        return rotary_write(
            query.view(-1, config.num_heads, config.head_dim),
            table,
            nowhere,
            self._keys[:0],
            self._values[:0],
            num_heads=config.num_heads,
            interleaved=False,
        )

    def _rotate(self, projected: Tensor, places: Places, *, num_heads: int) -> Tensor:
        return rotary_write(
            projected.view(projected.shape[0], -1, self.weights.config.head_dim),
            places.table,
            places.write_slots,
            self._keys,
            self._values,
            num_heads=num_heads,
            interleaved=False,
        )

    def _attend(
        self, query: Tensor, session: Seen, *, num_nodes: int, mask: Tensor | None
    ) -> Tensor:
        return tree_attention(
            query,
            self._keys,
            self._values,
            tables=session.tables,
            slots=session.slots,
            context=session.context,
            num_nodes=num_nodes,
            mask=mask,
            block_tokens=self._block_tokens,
            positions=None,
            max_len=self._max_len,
        )

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        w, eps = self.weights, self.weights.config.rms_norm_eps
        h, normed = add_linear(attended, w.o_proj, residual, norm_weight=w.post_norm, eps=eps)
        gated = fused_linear(normed, w.gate_up, gated=True)
        x = fused_linear(gated, w.down, residual=h)
        return rms_norm(x, w.final_norm, eps) if w.config.norm_output else x
