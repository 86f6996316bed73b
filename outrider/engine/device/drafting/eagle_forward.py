"""Forward pass of an EAGLE-3 head (Li et al., 2025), one decoder layer over features of the target.

Shapes: B sessions, R new rows a session, H hidden size, M rows of a draft step, N rows of a forward
pass, Q query heads, d head dimension, Vd draft vocabulary size. Draft row i pairs feature f_i with
token t_{i+1}.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import (
    AttentionContext,
    DraftForward,
    DraftVocabulary,
    NewRows,
    ProposalNodes,
    RowPositions,
)
from outrider.engine.device.drafting.eagle_weights import HeadWeights
from outrider.engine.kernels.attention.rotary import rotary_write
from outrider.engine.kernels.attention.tree import tree_attention
from outrider.engine.kernels.drafts.inputs import BlockInputs, DraftLayout, head_inputs
from outrider.engine.kernels.drafts.proposal_layout import ProposalLayout
from outrider.engine.kernels.linear.fused import SKINNY_ROWS, add_linear, fused_linear
from outrider.engine.kernels.norm import rms_norm


class HeadForward(DraftForward):
    """`DraftForward` of an EAGLE-3 head. Its outputs are predicted features, which drafted tokens
    use in place of features of the target."""

    def __init__(
        self, weights: HeadWeights, *, storage: Tensor, block_tokens: int, max_len: int
    ) -> None:
        """storage: keys and values of one layer, [2, 1, G, S, d]. The other arguments are those of
        `DraftForward`."""
        super().__init__(
            DraftVocabulary(weights.target_ids, weights.draft_columns),
            weights.inv_freq,
            storage=storage,
            block_tokens=block_tokens,
            max_len=max_len,
        )
        self.weights = weights
        self.feature_size = weights.config.hidden_size
        self._keys, self._values = storage[0, 0], storage[1, 0]

    def write_rows(self, rows: NewRows) -> None:
        """Write the KV of new rows and compute nothing else."""
        layout = self.layout(rows)
        places = self.row_positions(layout.positions, layout.write_slots)
        self._write_kv(self._inputs(rows).inputs, places)

    def logits(self, x: Tensor) -> Tensor:
        """Return draft logits [M, Vd], float32 or bfloat16, of features [M, H]."""
        w = self.weights
        norm = None if w.config.norm_output else w.final_norm
        dtype = torch.float32 if x.dtype == torch.float16 else None
        eps = w.config.rms_norm_eps
        return fused_linear(x, w.lm_head, norm_weight=norm, eps=eps, out_dtype=dtype)

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
        """Run drafted tokens. The feature of each token is its parent's output. See
        `DraftForward.run_step`."""
        block = self._block_inputs(columns, x, ids=self.weights.target_ids, rows=parents)
        return self._step(block, places, session, num_nodes=num_nodes, mask=mask)

    def run_proposal(
        self,
        rows: NewRows,
        given: ProposalNodes,
        layout: DraftLayout,
        below: ProposalLayout,
        sweeps: int,
    ) -> Tensor:
        """Write the KV of new rows, then run all nodes of the proposals together, `sweeps` times;
        see `DraftForward.run_proposal`.

        In the first sweep the feature of every node is the output of the root; in later sweeps it
        is the parent's output of the sweep before. After k sweeps the outputs of the first k levels
        are exact, and those of deeper levels are approximations.
        """
        (batch, num_nodes), new = given.tokens.shape, rows.tokens.numel()
        positions = torch.cat((layout.positions[:new], below.positions))
        places = self.row_positions(positions, layout.write_slots)
        x = self.catch_up(rows, layout, places)
        session = AttentionContext(rows.tables, rows.slots, layout.live + 1)
        mask = None if given.are_chains else below.seen[:, 1:]
        tokens, nodes = given.tokens.flatten(), places.select(slice(new, None))
        features = x[:, None].expand(-1, 1 + num_nodes, -1)
        for _ in range(min(sweeps, num_nodes)):
            block = self._block_inputs(tokens, features.flatten(0, 1), rows=below.sources)
            step = self._step(block, nodes, session, num_nodes=num_nodes, mask=mask)
            features = torch.cat((x[:, None], step.view(batch, num_nodes, -1)), dim=1)
        return features

    def catch_up(
        self, rows: NewRows, layout: DraftLayout, places: RowPositions, *, prune: bool = True
    ) -> Tensor:
        """Write the KV of new rows and return the output [B, H] of each live row. prune: whether
        only the KV is computed for rows that are not live."""
        block = self._inputs(rows)
        session = AttentionContext(rows.tables, rows.slots, rows.starts)
        num_rows = rows.tokens.shape[1]
        new = places.select(slice(0, rows.tokens.numel()))
        if num_rows == 1 or not prune:
            x = self._step(block, new, session, num_nodes=num_rows, mask=None)
            return x if num_rows == 1 else x[layout.live_rows]
        session = session._replace(context=layout.live)
        if rows.tokens.numel() <= SKINNY_ROWS:
            # With so few rows the pass over the weights costs the most, so queries of rows that
            # are not live are free.
            query = self._project(block.inputs, new)[layout.live_rows]
        else:
            self._write_kv(block.inputs, new)
            query = self._query(block.inputs[layout.live_rows], new.table[layout.live_rows])
        attended = self._attend(query, session, num_nodes=1, mask=None)
        return self._finish(block.residual[layout.live_rows], attended)

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

    def _step(
        self,
        block: BlockInputs,
        places: RowPositions,
        session: AttentionContext,
        *,
        num_nodes: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Run the whole block for every row and return its outputs [N, H]."""
        query = self._project(block.inputs, places)
        attended = self._attend(query, session, num_nodes=num_nodes, mask=mask)
        return self._finish(block.residual, attended)

    def _project(self, inputs: Tensor, places: RowPositions) -> Tensor:
        """Return the queries [N, Q, d] of all rows and write their KV."""
        w = self.weights
        qkv = fused_linear(inputs, w.qkv, bias=w.qkv_bias)
        return self._rotate(qkv, places, num_heads=w.config.num_heads)

    def _write_kv(self, inputs: Tensor, places: RowPositions) -> None:
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

    def _rotate(self, projected: Tensor, places: RowPositions, *, num_heads: int) -> Tensor:
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
        self, query: Tensor, session: AttentionContext, *, num_nodes: int, mask: Tensor | None
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
            block_tokens=self.block_tokens,
            positions=None,
            max_len=self._max_len,
        )

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        w, eps = self.weights, self.weights.config.rms_norm_eps
        h, normed = add_linear(attended, w.o_proj, residual, norm_weight=w.post_norm, eps=eps)
        gated = fused_linear(normed, w.gate_up, gated=True)
        x = fused_linear(gated, w.down, residual=h)
        return rms_norm(x, w.final_norm, eps) if w.config.norm_output else x
