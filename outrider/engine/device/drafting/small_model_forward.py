"""Forward pass of a small language model as draft model.

Shapes: B sessions, R new rows a session, N nodes of a given tree, H hidden size, M rows of a step,
V target vocabulary size. Draft row r consists of token t_r alone, without a feature.
"""

from __future__ import annotations

from typing import Final

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
from outrider.engine.device.target_kernels import RowGroup
from outrider.engine.device.target_program import TargetProgram
from outrider.engine.kernels.attention.layout import RoundLayout
from outrider.engine.kernels.drafts.inputs import DraftLayout
from outrider.engine.kernels.drafts.proposal_layout import ProposalLayout
from outrider.engine.target import TargetModel

_CHUNK_ROWS: Final = 64
"""Maximum number of rows of a session that attend together in `write_rows`."""


class ModelForward(DraftForward):
    """`DraftForward` of a small language model. Its outputs are those of the model's last layer."""

    feature_size = 0
    keeps_proposal_kv = True

    def __init__(
        self,
        model: TargetModel,
        *,
        vocab_size: int,
        storage: Tensor,
        block_tokens: int,
        max_len: int,
    ) -> None:
        """`vocab_size`: vocabulary size of the target, at most that of the model. The other
        arguments are those of `DraftForward`.

        The model's weights must not be packed for oneDNN, and each token must attend to the whole
        context. Sliding windows are not supported, because trees use attention masks.
        """
        super().__init__(
            DraftVocabulary.identity(vocab_size, storage.device),
            model.inverse_frequencies,
            storage=storage,
            block_tokens=block_tokens,
            max_len=max_len,
        )
        assert model.pool.block_tokens == block_tokens
        self._vocab_size = vocab_size
        self._program = TargetProgram(model, storage=storage)

    def write_rows(self, rows: NewRows) -> None:
        """Write the KV of new rows. The number R of rows per session must be a multiple of ceil(R /
        64), because the rows attend in equal chunks of at most 64."""
        layout, size = self.layout(rows), rows.tokens.shape[1]
        chunks = -(-size // _CHUNK_ROWS)
        assert size % chunks == 0, size
        firsts = torch.arange(chunks, dtype=torch.int32, device=rows.starts.device)
        context = rows.starts[:, None] + firsts * (size // chunks)
        group = RowGroup(
            slots=rows.slots.repeat_interleave(chunks),
            context=context.flatten(),
            round_layout=RoundLayout(layout.positions, layout.write_slots, None),
            num_nodes=size // chunks,
        )
        self._run(rows.tokens, [group], rows.tables)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits, float32 [M, V], for outputs x [M, H], without columns for ids beyond
        the target's vocabulary."""
        found = self._program.logits_of(x)
        return (
            found
            if found.shape[1] == self._vocab_size
            else found[:, : self._vocab_size].contiguous()
        )

    def catch_up(
        self, rows: NewRows, layout: DraftLayout, places: RowPositions, *, prune: bool = True
    ) -> Tensor:
        """Run all new rows and return the output [B, H] of each live row. `prune` is ignored,
        because it would save little."""
        return self._run(rows.tokens, [_new(rows, layout)], rows.tables)[layout.live_rows]

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
        """Run drafted tokens; see `DraftForward.run_step`. `x` and `parents` are ignored, because
        the model knows earlier tokens by their KV."""
        group = RowGroup(
            slots=session.slots,
            context=session.context,
            round_layout=RoundLayout(places.positions, places.write_slots, mask),
            num_nodes=num_nodes,
        )
        return self._run(columns, [group], session.tables)

    def run_proposal(
        self,
        rows: NewRows,
        given: ProposalNodes,
        layout: DraftLayout,
        below: ProposalLayout,
        sweeps: int,
    ) -> Tensor:
        """Run new rows and the nodes of the proposals in one forward pass; see
        `DraftForward.run_proposal`. `sweeps` is ignored, because one pass gives exact outputs."""
        if given.are_chains:
            return self._given_chains(rows, given)
        (batch, num_nodes), new = given.tokens.shape, rows.tokens.numel()
        nodes = RowGroup(
            slots=rows.slots,
            context=layout.live + 1,
            round_layout=RoundLayout(
                below.positions,
                layout.write_slots[new:],
                None if given.are_chains else below.seen[:, 1:],
            ),
            num_nodes=num_nodes,
        )
        tokens = torch.cat((rows.tokens.flatten(), given.tokens.flatten()))
        x = self._run(tokens, [_new(rows, layout), nodes], rows.tables)
        live = x[layout.live_rows][:, None]
        return torch.cat((live, x[new:].view(batch, num_nodes, -1)), dim=1)

    def _given_chains(self, rows: NewRows, given: ProposalNodes) -> Tensor:
        """Run chains as further new rows, so that each layer needs one attention call, not two."""
        (batch, num_nodes), width = given.tokens.shape, rows.tokens.shape[1]
        device, counts = rows.counts.device, rows.counts[:, None]
        places = torch.arange(width + num_nodes, device=device).expand(batch, -1)
        both = torch.cat((rows.tokens, given.tokens), dim=1)
        source = torch.where(places < counts, places, places - counts + width)
        tokens = both.gather(1, source.clamp(max=width + num_nodes - 1).long())
        there = torch.where(rows.counts > 0, rows.counts + num_nodes, 0)
        joined = rows._replace(tokens=tokens, counts=there)
        x = self._run(tokens, [_new(joined, self.layout(joined))], rows.tables)
        last = (counts - 1).clamp(min=0) + torch.arange(1 + num_nodes, device=device)
        return x.view(batch, width + num_nodes, -1)[
            torch.arange(batch, device=device)[:, None], last
        ]

    def _run(self, tokens: Tensor, groups: list[RowGroup], tables: Tensor) -> Tensor:
        return self._program.outputs(tokens.flatten(), groups, tables, max_len=self._max_len)


def _new(rows: NewRows, layout: DraftLayout) -> RowGroup:
    new = rows.tokens.numel()
    return RowGroup(
        slots=rows.slots,
        context=rows.starts,
        round_layout=RoundLayout(layout.positions[:new], layout.write_slots[:new], None),
        num_nodes=rows.tokens.shape[1],
    )
