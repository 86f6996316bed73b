"""The target's forward with batch-invariant kernels: KV and logits of a text are the same bits by
every way to compute them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.device.target_kernels import (
    AttentionLimits,
    HeadWrites,
    InvariantKernels,
    RowGroup,
)
from outrider.engine.device.target_program import TargetProgram
from outrider.engine.kernels.attention.invariant import invariant_attention_triton
from outrider.engine.kernels.attention.layout import tree_layout
from outrider.engine.kernels.attention.rotary import rotary_write_triton
from outrider.engine.kernels.linear.fused import Normed
from outrider.engine.kernels.linear.invariant import invariant_config, invariant_linear_triton
from outrider.engine.kernels.linear.launch import RotaryOut
from outrider.engine.kernels.norm import rms_norm_triton
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from tests.grids import thorough
from tests.unit.engine.kernels.trees import scattered

LENGTH, BLOCK = 72, 16
"""Positions of the text: they go on in a second KV tile."""


class InterpretedKernels(InvariantKernels):
    """The kernels themselves, on tensors of the CPU; few and many rows take what a GPU takes."""

    def project_heads(self, x: Normed, linear: PlainLinear, writes: HeadWrites) -> Tensor:
        assert isinstance(x, Tensor)
        config, head_dim = invariant_config(x, linear.weight), writes.keys.shape[2]
        if x.shape[0] <= 64 and writes.qk_norms is None and head_dim % config.block_n == 0:
            rotary = RotaryOut(*writes[:5])
            query = invariant_linear_triton(x, linear.weight, bias=linear.bias, rotary=rotary)
            return query.view(len(x), writes.num_heads, -1)
        qkv = invariant_linear_triton(x, linear.weight, bias=linear.bias)
        return rotary_write_triton(
            qkv.view(len(x), -1, head_dim),
            *writes[:4],
            num_heads=writes.num_heads,
            interleaved=True,
            qk_norms=writes.qk_norms,
            eps=writes.eps,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        group: RowGroup,
        limits: AttentionLimits,
        *,
        out: Tensor | None,
    ) -> Tensor:
        return invariant_attention_triton(
            query,
            keys,
            values,
            tables=limits.tables,
            slots=group.slots,
            context=group.context,
            num_nodes=group.num_nodes,
            positions=group.round_layout.positions,
            paths=group.round_layout.paths,
            block_tokens=limits.block_tokens,
            max_len=limits.max_len,
            window=limits.window,
            out=out,
        )

    def add(
        self,
        x: Tensor,
        linear: PlainLinear,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        *,
        out: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        result = invariant_linear_triton(
            x, linear.weight, bias=linear.bias, residual=residual, out=out
        )
        return result, rms_norm_triton(result, norm_weight, eps)

    def multiply(
        self, x: Normed, linear: PlainLinear, *, gated: bool, out_dtype: torch.dtype | None
    ) -> Tensor:
        assert isinstance(x, Tensor)
        return invariant_linear_triton(
            x, linear.weight, bias=linear.bias, gated=gated, out_dtype=out_dtype
        )


class Session:
    """A text whose positions are computed in any way, over a KV cache of its own."""

    def __init__(self, model: TargetModel, seed: int = 0, *, others: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.paging = scattered(rng, 1 + others, 8, BLOCK)
        _, _, kv_heads, _, dim = model.pool.storage.shape
        num_layers = len(model.weights.layers)
        shape = (2, num_layers, kv_heads, self.paging.num_pool_slots, dim)
        generator = torch.Generator().manual_seed(seed)
        self.storage = torch.randn(shape, generator=generator).bfloat16()
        self.program = TargetProgram(model, storage=self.storage, kernels=InterpretedKernels())
        self.others = others

    def run(
        self, tokens: list[int], context: int, parents: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, V] of nodes behind `context`, and their KV [2, L, G, N, d]."""
        batch, num_nodes = 1 + self.others, len(tokens)
        contexts = torch.tensor([context] + [3] * self.others, dtype=torch.int32)
        rows = [tokens] + [[7] * num_nodes] * self.others
        layout = tree_layout(
            None if parents is None else torch.tensor([parents] * batch, dtype=torch.int32),
            contexts,
            self.paging.tables,
            self.paging.slots,
            num_nodes=num_nodes,
            block_tokens=BLOCK,
            with_paths=True,
        )
        group = RowGroup(self.paging.slots, contexts, layout, num_nodes)
        output = self.program.run_forward(
            torch.tensor(rows, dtype=torch.int32).flatten(),
            [group],
            self.paging.tables,
            max_len=8 * BLOCK,
        )
        places = torch.from_numpy(self.paging.pool_slots(0, BLOCK))[context : context + num_nodes]
        return output.logits[:num_nodes], self.storage[:, :, :, places].clone()


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> TargetModel:
    """Two layers show how the sums of one reach the next."""
    whole = load_target(tiny_target, kv_tokens=64, packed=False, dtype=torch.bfloat16)
    weights = replace(whole.weights, layers=whole.weights.layers[:2])
    return TargetModel(whole.config, weights, whole.pool)


@pytest.fixture(scope="module")
def text() -> list[int]:
    return np.random.default_rng(1).integers(5, 380, LENGTH).tolist()


@pytest.fixture(scope="module")
def expected(model: TargetModel, text: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and KV of all positions, computed as one prompt."""
    return Session(model).run(text, 0)


def check(
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    first: int,
    nodes: list[int] | None = None,
) -> None:
    """The nodes (None: all) have the bits of the positions from `first` on."""
    logits, kv = found
    chosen = list(range(len(logits))) if nodes is None else nodes
    places = slice(first, first + len(chosen))
    assert torch.equal(logits[chosen], expected[0][places])
    assert torch.equal(kv[:, :, :, chosen], expected[1][:, :, :, places])


@pytest.mark.parametrize("cuts", [(1, 64), thorough((16, 17, 50))])
def test_prompts_may_be_cut_anywhere(
    model: TargetModel, text: list[int], expected: tuple[Tensor, Tensor], cuts: tuple[int, ...]
) -> None:
    session = Session(model, seed=2)
    for first, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        check(session.run(text[first:end], first), expected, first)


def test_decoded_tokens_and_chains_have_the_bits_of_the_prompt(
    model: TargetModel, text: list[int], expected: tuple[Tensor, Tensor]
) -> None:
    session = Session(model, seed=3)
    session.run(text[:61], 0)
    for position in (61, 62):
        check(session.run([text[position]], position), expected, position)
    # Two accepted, the third one is wrong; the next chain overwrites it.
    found = session.run([*text[63:65], 9, 9], 63)
    check((found[0][:2], found[1][:, :, :, :2]), expected, 63)
    check(session.run(text[65:70], 65), expected, 65)


def test_other_sessions_change_no_bit(
    model: TargetModel, text: list[int], expected: tuple[Tensor, Tensor]
) -> None:
    session = Session(model, seed=4, others=1)
    check(session.run(text[:40], 0), expected, 0)
    check(session.run(text[40:45], 40), expected, 40)


def test_paths_of_trees_have_the_bits_of_the_prompt(
    model: TargetModel, text: list[int], expected: tuple[Tensor, Tensor]
) -> None:
    """The path root, 2, 3, 6 crosses into the second KV tile; its siblings are wrong."""
    session = Session(model, seed=5)
    session.run(text[:62], 0)
    tokens = [text[62], 9, text[63], text[64], 9, 9, text[65]]
    found = session.run(tokens, 62, parents=[-1, -1, 1, 1, 2, 2])
    check(found, expected, 62, nodes=[0, 2, 3, 6])
