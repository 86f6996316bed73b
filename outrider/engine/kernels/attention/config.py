"""Launch parameters of the attention kernels by shape: tile sizes and splits of the context."""

from __future__ import annotations

from typing import NamedTuple

from outrider.engine.kernels.runtime import cdiv, next_power_of_2

SM_COUNT = 132
"""Number of streaming multiprocessors (SMs) of an H100 or H200, which a launch should fill."""
_MAX_SPLITS = 64
_ANY_SPLITS = 32
"""Largest number of parts that need not be a power of two."""
_STEP_BYTES = 16384
"""Maximum bytes of keys that a program reads in one step."""


class AttentionConfig(NamedTuple):
    """Launch parameters of `attention_kernel`."""

    block_rows: int
    """Number of query rows of a program's tile: a power of two, at least 16."""
    block_slots: int
    """Number of KV slots that a program reads in one step of its loop: a power of two, at least
    16."""
    splits: int
    """Number of parts into which the context is split. One part needs no second kernel."""
    num_warps: int
    num_stages: int


_BLOCK_SLOTS = 64
"""Number of KV slots of a step, unless their keys need more than the maximum bytes of a step."""


class _Tuned(NamedTuple):
    max_tiles: int
    """Maximum number of row tiles, over all sessions and key/value heads, for which the entry is
    used."""
    num_stages: int
    several: bool = False
    """Whether the entry is only for shapes with several row tiles per key/value head."""
    rounded: bool = True
    """Whether the number of parts of the context is always a power of two."""
    programs_per_sm: int = 1
    """Number of programs per SM that the splitting of the context aims at."""
    num_warps: int = 4
    step_bytes: int = _STEP_BYTES


_TUNED = (
    _Tuned(16, num_stages=2, rounded=False, programs_per_sm=2),
    _Tuned(320, num_stages=2, several=True, rounded=False),
    _Tuned(320, num_stages=3),
    _Tuned(1 << 31, num_stages=3, num_warps=2, step_bytes=_STEP_BYTES // 2),
)
"""Tuned parameters. The first entry that fits the shape is used."""


_PROMPT_ROWS = 64
"""Number of query rows of a tile for prompts, if there are enough tiles to fill the device. Tiles
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
    """Return the number of parts into which to split a context of up to `max_len` slots, so that
    there are about enough programs to fill the device.

    tiles: number of tiles of query rows per key/value head. block_slots: minimum size of a part.
    The result is a power of two if `rounded` is set or if there are more than 32 parts, because
    the combine kernel has space for a power of two.
    """
    wanted = cdiv(SM_COUNT * programs_per_sm, batch * kv_heads * tiles)
    splits = max(min(wanted, cdiv(max_len, block_slots), _MAX_SPLITS), 1)
    return 1 << (splits.bit_length() - 1) if rounded or splits > _ANY_SPLITS else splits


def joined_rows(num_rows: int, splits: int) -> int:
    """Return the number of rows that one program of `combine_kernel` processes. `num_rows`: token
    rows times query heads.

    If there are few rows, each one has its own program, to use the whole device. If there are many,
    a program processes several, to have more loads in flight.
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
    """Return the launch parameters for a shape.

    itemsize: bytes of an element of the KV cache. causal: whether the rows are chains or prompts,
    which need no mask tensor.
    """
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
