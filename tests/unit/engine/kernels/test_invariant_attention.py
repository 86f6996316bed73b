"""Batch-invariant attention: right up to rounding, and the same bits for a row wherever it runs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.attention import invariant_kernel
from outrider.engine.kernels.attention.invariant import (
    InvariantConfig,
    choose_invariant_config,
    invariant_attention,
    invariant_attention_torch,
    invariant_attention_triton,
)
from outrider.engine.kernels.attention.layout import tree_layout
from outrider.errors import InvalidRequestError
from tests.unit.engine.kernels.trees import random_parents, scattered

DIM, HEADS, KV_HEADS = 16, 4, 2
LONGEST = 720
POSITIONS = (0, 1, 15, 63, 64, 65, 511, 512, 513, 700)
"""At and beside the edges of KV tiles and of splits."""
SINGLE = InvariantConfig(16, 0, 4, 2)
TILES = InvariantConfig(16, 3, 4, 2)
SPLITS = InvariantConfig(64, 2, 4, 2, max_parts=1)
# The weights of the values are rounded to the type.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Text(NamedTuple):
    """Queries, keys and values of one sequence, by position."""

    q: Tensor
    keys: Tensor
    values: Tensor


def random_text(seed: int, dtype: torch.dtype = torch.bfloat16) -> Text:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(LONGEST, HEADS, DIM, generator=generator)
    keys, values = torch.randn(2, KV_HEADS, LONGEST, DIM, generator=generator)
    return Text((4 * q).to(dtype), keys.to(dtype), values.to(dtype))


def attend(
    texts: list[Text],
    contexts: list[int],
    *,
    num_nodes: int,
    parents: list[list[int]] | None = None,
    on_path: list[list[int]] | None = None,
    config: InvariantConfig | None = None,
    window: int | None = None,
    block_tokens: int = 16,
    spare_blocks: int = 0,
    seed: int = 0,
    torch_reference: bool = False,
) -> Tensor:
    """[B, N, Q * d]: node e of `on_path[b]` (None: of the chain) is position context + e of text b.

    All other slots hold random values.
    """
    batch = len(texts)
    width = -(-LONGEST // block_tokens) + spare_blocks
    paging = scattered(np.random.default_rng(seed), batch, width, block_tokens)
    generator = torch.Generator().manual_seed(seed)
    dtype = texts[0].q.dtype
    cache = torch.randn(2, KV_HEADS, paging.num_pool_slots, DIM, generator=generator).to(dtype)
    q = torch.randn(batch, num_nodes, HEADS, DIM, generator=generator).to(dtype)
    for b, (text, context) in enumerate(zip(texts, contexts, strict=True)):
        nodes = list(range(num_nodes)) if on_path is None else on_path[b]
        places = [*range(context), *(context + node for node in nodes)]
        slots = torch.from_numpy(paging.pool_slots(b, block_tokens))[places]
        length = len(places)
        cache[0][:, slots], cache[1][:, slots] = text.keys[:, :length], text.values[:, :length]
        q[b, nodes] = text.q[context:length]
    context_B = torch.tensor(contexts, dtype=torch.int32)
    layout = tree_layout(
        None if parents is None else torch.tensor(parents, dtype=torch.int32).view(batch, -1),
        context_B,
        paging.tables,
        paging.slots,
        num_nodes=num_nodes,
        block_tokens=block_tokens,
        with_paths=True,
    )
    shared = {
        "tables": paging.tables,
        "slots": paging.slots,
        "context": context_B,
        "num_nodes": num_nodes,
        "positions": layout.positions,
        "paths": layout.paths,
        "block_tokens": block_tokens,
        "max_len": width * block_tokens,
        "window": window,
    }
    launch = invariant_attention_torch if torch_reference else invariant_attention_triton
    result = launch(q.flatten(0, 1), cache[0], cache[1], config=config, **shared)  # type: ignore[arg-type]
    return result.view(batch, num_nodes, -1)


def alone(text: Text, position: int, window: int | None = None) -> Tensor:
    """[Q * d]: the row of a position as a decoding row of its own."""
    return attend([text], [position], num_nodes=1, config=SINGLE, window=window)[0, 0]


@functools.cache
def row_alone(seed: int, position: int) -> Tensor:
    """`alone` of `random_text(seed)`."""
    return alone(random_text(seed), position)


@pytest.mark.parametrize(
    ("config", "dtype", "window"),
    [
        (SINGLE, torch.bfloat16, None),
        (SINGLE, torch.float16, 40),
        (SINGLE, torch.float32, None),
        (TILES, torch.bfloat16, 40),
        (TILES, torch.float32, None),
        (SPLITS, torch.bfloat16, None),
        (SPLITS, torch.float32, 40),
    ],
)
def test_chains_and_prompts_are_right(
    config: InvariantConfig, dtype: torch.dtype, window: int | None
) -> None:
    texts = [random_text(1, dtype), random_text(2, dtype)]
    for num_nodes, contexts in ((5, [70, 0]), (40, [500, 3])):
        got, expected = (
            attend(
                texts,
                contexts,
                num_nodes=num_nodes,
                config=config,
                window=window,
                torch_reference=reference,
            ).double()
            for reference in (False, True)
        )
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("config", "dtype", "window"),
    [
        (TILES, torch.bfloat16, None),
        (TILES, torch.float32, 40),
        (SPLITS, torch.bfloat16, 40),
        (SPLITS, torch.float16, None),
    ],
)
def test_trees_are_right(config: InvariantConfig, dtype: torch.dtype, window: int | None) -> None:
    rng = np.random.default_rng(3)
    texts = [random_text(1, dtype), random_text(2, dtype)]
    for contexts in ([126, 0], [60, 513]):
        parents = [random_parents(rng, 8, padded=padded) for padded in (0, 3)]
        got, expected = (
            attend(
                texts,
                contexts,
                num_nodes=9,
                parents=parents,
                on_path=[[0], [0]],
                config=config,
                window=window,
                torch_reference=reference,
            ).double()
            for reference in (False, True)
        )
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("config", [TILES, SPLITS])
@pytest.mark.parametrize("position", POSITIONS)
def test_launch_parameters_change_no_bit(position: int, config: InvariantConfig) -> None:
    text = random_text(position)
    got = attend([text], [position], num_nodes=1, config=config)[0, 0]
    assert torch.equal(got, row_alone(position, position))


@pytest.mark.parametrize("config", [SINGLE, TILES, SPLITS])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_row_has_the_same_bits_in_every_chain(position: int, config: InvariantConfig) -> None:
    text = random_text(position)
    expected = row_alone(position, position)
    for node, num_nodes in ((1, 3), (4, 5), (14, 16)):
        context = position - node
        if context >= 0 and context + num_nodes <= LONGEST:
            got = attend([text], [context], num_nodes=num_nodes, config=config, seed=node)
            assert torch.equal(got[0, node], expected), (context, node)


@pytest.mark.parametrize("config", [SINGLE, TILES, SPLITS])
@pytest.mark.parametrize("first", [0, 33, 490])
def test_rows_of_prompts_have_the_bits_of_decoding_rows(
    first: int, config: InvariantConfig
) -> None:
    text = random_text(first)
    got = attend([text], [first], num_nodes=32, config=config)[0]
    for row in (0, 7, 21, 30, 31):
        assert torch.equal(got[row], row_alone(first, first + row)), row


@pytest.mark.parametrize("config", [TILES, SPLITS])
@pytest.mark.parametrize("position", [1, 63, 64, 65, 511, 513, 700])
def test_a_row_has_the_same_bits_in_every_tree(position: int, config: InvariantConfig) -> None:
    """Whatever the siblings, and wherever the nodes of its path lie."""
    text, rng = random_text(position), np.random.default_rng(position)
    expected = row_alone(position, position)
    for _ in range(2):
        parents = random_parents(rng, 15)
        node = int(rng.integers(1, 16))
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0] - 1] + 1)
        context = position - (len(path) - 1)
        if context < 0:
            continue
        got = attend(
            [text], [context], num_nodes=16, parents=[parents], on_path=[path], config=config
        )
        assert torch.equal(got[0, node], expected), (context, path)


@pytest.mark.parametrize("batch", [2, 5])
def test_other_sessions_blocks_and_limits_change_no_bit(batch: int) -> None:
    positions = [513, 64, 0, 130, 700][:batch]
    texts = [random_text(seed) for seed in range(batch)]
    got = attend(texts, positions, num_nodes=1, block_tokens=64, spare_blocks=20, seed=9)
    for row, (text, position) in enumerate(zip(texts, positions, strict=True)):
        assert torch.equal(got[row, 0], alone(text, position))


@pytest.mark.parametrize("config", [SINGLE, TILES])
@pytest.mark.parametrize("position", [30, 100, 600])
def test_windows_keep_the_bits(position: int, config: InvariantConfig) -> None:
    text = random_text(position)
    got = attend([text], [position - 3], num_nodes=6, config=config, window=70)
    assert torch.equal(got[0, 3], alone(text, position, window=70))


@pytest.mark.parametrize(
    ("name", "length", "dtype"),
    [("TILE_SLOTS", 32, torch.bfloat16), ("SPLIT_TILES", 3, torch.float32)],
)
def test_parts_that_follow_the_load_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str, length: int, dtype: torch.dtype
) -> None:
    text = random_text(5, dtype)
    expected = alone(text, 700)
    monkeypatch.setattr(invariant_kernel, name, type(invariant_kernel.TILE_SLOTS)(length))
    assert not torch.equal(alone(text, 700), expected)


def test_many_rows_need_no_second_kernel_and_few_rows_share_a_context() -> None:
    shape = {"num_heads": 32, "num_kv_heads": 8, "max_len": 8192}
    many = choose_invariant_config(batch=64, num_nodes=5, tree=False, **shape)
    few = choose_invariant_config(batch=1, num_nodes=5, tree=False, **shape)
    trees = choose_invariant_config(batch=64, num_nodes=16, tree=True, **shape)
    assert many.programs == 0 and few.programs > 8 and trees.programs > 0


def test_inputs_that_do_not_fit_are_refused() -> None:
    cache = torch.zeros(KV_HEADS, 32, DIM)
    shared = {
        "tables": torch.zeros(1, 2, dtype=torch.int32),
        "slots": torch.zeros(1, dtype=torch.int32),
        "context": torch.zeros(1, dtype=torch.int32),
        "num_nodes": 2,
        "block_tokens": 16,
        "max_len": 32,
    }
    q, positions = torch.zeros(2, HEADS, DIM), torch.zeros(2, dtype=torch.int32)

    def check(message: str, q: Tensor = q, **changed: object) -> None:
        keywords = {"positions": positions, "paths": None, **shared, **changed}
        with pytest.raises(InvalidRequestError, match=message):
            invariant_attention(q, cache, cache, **keywords)  # type: ignore[arg-type]

    check("do not fit", q[:1])
    check("positions", positions=positions[:1])
    check("paths", paths=torch.zeros(1, 3, 2, dtype=torch.int32))
    check("scale", scale=0.0)
    check("into", out=torch.zeros(1, 1))
