"""How the work of attention is cut for a shape."""

from __future__ import annotations

from itertools import product

import pytest

from outrider.engine.kernels.attention.config import AttentionConfig, choose_config, num_splits


@pytest.mark.parametrize("batch", [1, 3, 64, 512])
@pytest.mark.parametrize("max_len", [1, 520, 131_072])
def test_splits_fill_the_device_and_no_part_is_shorter_than_a_step(
    batch: int, max_len: int
) -> None:
    splits, steps = num_splits(batch, 8, 1, max_len, block_slots=64), -(-max_len // 64)
    assert 1 <= splits <= steps and splits & (splits - 1) == 0
    # Twice as many programs would be over 264, or too short, or more parts than are joined.
    assert 2 * splits * batch * 8 > 264 or 2 * splits > steps or splits == 64


def _llama(batch: int, num_nodes: int, max_len: int) -> AttentionConfig:
    return choose_config(
        batch=batch,
        num_nodes=num_nodes,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        itemsize=2,
        max_len=max_len,
    )


def test_a_large_tree_takes_as_many_parts_as_fill_the_device() -> None:
    assert _llama(1, 64, 640).splits == 5
    # No part is shorter than a step of 64 slots.
    assert _llama(1, 64, 200).splits == 4
    # One tile a head, and several sessions: a power of two.
    assert [_llama(batch, 4, 8192).splits for batch in (1, 3, 5, 8)] == [32, 4, 4, 2]


def _prompts(chunks: int, *, kv_heads: int = 8, itemsize: int = 2) -> AttentionConfig:
    return choose_config(
        batch=chunks,
        num_nodes=32,
        num_heads=32,
        num_kv_heads=kv_heads,
        head_dim=128,
        itemsize=itemsize,
        max_len=8192,
        causal=True,
    )


def test_prompts_of_many_chunks_have_launch_parameters_of_their_own() -> None:
    many = _prompts(64)
    assert (many.block_rows, many.block_slots, many.splits, many.num_warps) == (64, 64, 1, 4)
    # Few chunks need all the tiles that there are to fill the device.
    assert _prompts(8).block_rows == 64
    # Without groups a chunk is no larger tile; float32 has no matrix unit.
    assert _prompts(64, kv_heads=32).block_rows == 32
    assert _prompts(64, itemsize=4).block_rows == 16


def test_trees_keep_the_tiles_that_they_were_tuned_with() -> None:
    assert _llama(64, 33, 8192).block_rows == 64


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [6, 64, 80, 256])
@pytest.mark.parametrize("num_nodes", [1, 8, 65])
def test_launch_parameters_are_ones_the_kernel_can_take(
    itemsize: int, head_dim: int, num_nodes: int
) -> None:
    for batch, max_len, causal in product((1, 64, 128), (32, 8192), (False, True)):
        config = choose_config(
            batch=batch,
            num_nodes=num_nodes,
            num_heads=9,
            num_kv_heads=3,
            head_dim=head_dim,
            itemsize=itemsize,
            max_len=max_len,
            causal=causal,
        )
        for value in (config.block_rows, config.block_slots):
            assert 16 <= value <= 128 and value & (value - 1) == 0
        assert 1 <= config.splits <= 64
        # Keys and values of a step in every stage fit the shared memory of a multiprocessor.
        step = config.block_slots * max(head_dim, 16) * 2 * itemsize
        assert step * config.num_stages < 200_000
