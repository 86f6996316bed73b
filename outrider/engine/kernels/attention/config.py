"""Launch parameters of the attention kernels by shape: tile sizes and splits of the context."""

from __future__ import annotations

from typing import NamedTuple

from outrider.engine.kernels.runtime import cdiv, next_power_of_2

SM_COUNT = 132
"""Multiprocessors to fill: an H100's or H200's."""
_MAX_SPLITS = 64
_ANY_SPLITS = 32
"""Up to so many parts need not be a power of two."""
_STEP_BYTES = 16384
"""Most bytes of keys that one step of a program reads."""


class AttentionConfig(NamedTuple):
    """Launch parameters of the kernels."""

    block_rows: int
    """Query rows of a program's tile: a power of two, at least 16."""
    block_slots: int
    """Cache slots of one step: a power of two, at least 16."""
    splits: int
    """Parts of the context; 1 writes the result without a second kernel."""
    num_warps: int
    num_stages: int


_BLOCK_SLOTS = 64
"""KV slots of a step, where they fit."""


class _Tuned(NamedTuple):
    max_tiles: int
    """Row tiles over all bucket rows and key/value heads that the entry is for, at most."""
    num_stages: int
    several: bool = False
    """Only for shapes of several row tiles a key/value head."""
    rounded: bool = True
    """Whether the number of parts is always a power of two: more even where each has several
    steps."""
    programs_per_sm: int = 1
    """How many programs the splits should make, in all, over the multiprocessors."""
    num_warps: int = 4
    step_bytes: int = _STEP_BYTES


_TUNED = (
    _Tuned(16, num_stages=2, rounded=False, programs_per_sm=2),
    _Tuned(320, num_stages=2, several=True, rounded=False),
    _Tuned(320, num_stages=3),
    _Tuned(1 << 31, num_stages=3, num_warps=2, step_bytes=_STEP_BYTES // 2),
)
"""The first entry that fits a shape is taken."""


_PROMPT_ROWS = 64
"""Query rows of a tile of prompts, where there are so many tiles that they fill the device. Tiles
of 128 rows read half as much and were slower on an H200."""
_PROMPT_TILES_PER_SM = 2


def num_splits(
    batch: int,
    kv_heads: int,
    tiles: int,
    max_len: int,
    *,
    block_slots: int = 64,
    programs_per_sm: int = 2,
    rounded: bool = True,
) -> int:
    """Parts to cut up to `max_len` slots into: about enough programs to fill the device.

    tiles: tiles of query rows per key/value head. At most one part per step. A power of two where
    `rounded` or where there are many: the parts are joined in a power of two of places.
    """
    wanted = cdiv(SM_COUNT * programs_per_sm, batch * kv_heads * tiles)
    splits = max(min(wanted, cdiv(max_len, block_slots), _MAX_SPLITS), 1)
    return 1 << (splits.bit_length() - 1) if rounded or splits > _ANY_SPLITS else splits


def joined_rows(num_rows: int, splits: int) -> int:
    """Return the rows that a program of the combine kernel takes, of `num_rows` token rows times
    heads.

    Few rows spread over the device; many share programs, so that enough loads are under way.
    """
    return max(1, min(8, 32 // next_power_of_2(splits))) if num_rows > 1024 else 1


def choose_config(
    *,
    batch: int,
    num_nodes: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    max_len: int,
    causal: bool = False,
) -> AttentionConfig:
    """Launch parameters for a shape; itemsize: bytes of a cache element; causal: rows of chains
    and prompts, without a mask."""
    rows = num_nodes * (num_heads // num_kv_heads)
    dims = next_power_of_2(head_dim)
    prompt_tiles = batch * num_kv_heads * cdiv(rows, _PROMPT_ROWS)
    many = prompt_tiles >= _PROMPT_TILES_PER_SM * SM_COUNT
    if causal and many and rows > 64 and itemsize <= 2 and dims <= 128:
        return AttentionConfig(
            block_rows=_PROMPT_ROWS,
            block_slots=_BLOCK_SLOTS,
            splits=1,
            num_warps=4,
            num_stages=3,
        )
    # float32 products have no matrix unit: a large tile would spill registers.
    max_rows = 64 if itemsize <= 2 else 16
    block_rows = min(max(next_power_of_2(rows), 16), max_rows)
    tiles = cdiv(rows, block_rows)
    all_tiles = batch * num_kv_heads * tiles
    tuned = next(t for t in _TUNED if all_tiles <= t.max_tiles and (tiles > 1 or not t.several))
    block_slots = max(min(_BLOCK_SLOTS, tuned.step_bytes // (dims * itemsize)), 16)
    return AttentionConfig(
        block_rows=block_rows,
        block_slots=block_slots,
        splits=num_splits(
            batch,
            num_kv_heads,
            tiles,
            max_len,
            block_slots=block_slots,
            programs_per_sm=tuned.programs_per_sm,
            rounded=tuned.rounded,
        ),
        num_warps=8 if block_rows * dims > 64 * 128 else tuned.num_warps,
        num_stages=tuned.num_stages,
    )
