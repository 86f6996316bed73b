"""The small kernels at the front of a round: token rows and their embeddings."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kernels.embedding import embed, embed_torch, embed_triton
from outrider.engine.kernels.norm import rms_norm
from outrider.engine.kernels.session_tensors import SequenceState
from outrider.engine.kernels.token_rows import build_verify_inputs_torch, build_verify_inputs_triton


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 8])
@pytest.mark.parametrize("by_slot", [False, True])
def test_a_row_is_its_sessions_root_and_its_drafts(num_nodes: int, by_slot: bool) -> None:
    generator = torch.Generator().manual_seed(num_nodes)

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(1, 1000, shape, generator=generator, dtype=torch.int32)

    sequence = SequenceState(tables=ints(7, 3), lengths=ints(7), roots=ints(7))
    slots = torch.tensor([5, 0, 6], dtype=torch.int32)
    drafts = ints(7 if by_slot else 3, num_nodes - 1)
    tokens, context = build_verify_inputs_torch(
        sequence, slots, drafts, num_nodes=num_nodes, by_slot=by_slot
    )
    rows = tokens.view(3, num_nodes)
    for row, slot in enumerate(slots.tolist()):
        assert rows[row, 0] == sequence.roots[slot]
        assert context[row] == sequence.lengths[slot] - 1
        assert torch.equal(rows[row, 1:], drafts[slot if by_slot else row])
    got = build_verify_inputs_triton(sequence, slots, drafts, num_nodes=num_nodes, by_slot=by_slot)
    assert torch.equal(got[0], tokens)
    assert torch.equal(got[1], context)


@pytest.mark.parametrize("hidden", [24, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_the_tables_rows_and_their_norm(hidden: int, dtype: torch.dtype) -> None:
    embedding = torch.randn(11, hidden).to(dtype)
    weight = torch.rand(hidden).to(dtype)
    tokens = torch.tensor([3, -1, 10, 0], dtype=torch.int32)
    expected = torch.stack([embedding[3], embedding[0], embedding[10], embedding[0]])
    assert torch.equal(embed_torch(tokens, embedding), expected)
    rows, normed = embed(tokens, embedding, weight, 1e-5)
    assert torch.equal(rows, expected)
    assert isinstance(normed, torch.Tensor)
    torch.testing.assert_close(normed, rms_norm(expected, weight, 1e-5))
    rows, half = embed_triton(tokens, embedding, weight, 1e-5)
    assert torch.equal(rows, expected)
    quotient = (half.squares.sum(0) / hidden + half.eps).sqrt()[:, None]
    wide = expected.double() * weight.double()
    error = (half.scaled.double() / quotient - wide / quotient).abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 2e-2)
    torch.testing.assert_close(
        half.squares.sum(0).double(), expected.double().square().sum(1), rtol=1e-5, atol=0.0
    )
