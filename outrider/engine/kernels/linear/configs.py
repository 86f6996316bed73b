"""Launch configurations of the skinny matrix product, tuned for the shapes of Llama-3.1-8B.

A skinny product has few rows (up to 64). Shapes: M rows, N weight rows, K input features.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from outrider.engine.kernels.runtime import cdiv, next_power_of_2

WORKSPACE_FLOATS = 1 << 23
"""Size of the split-K workspace, as a number of float32 values (32 MiB). K is not split if the
partial sums need more."""
MAX_TILES = 1 << 12
"""Number of arrival counters of split-K products. K is not split if there are more tiles."""

_SHARED_BYTES = 96 << 10
"""Maximum shared memory of one program for shapes that are not tuned. Two such programs fit on a
Hopper SM (227 KiB)."""
_ASSUMED_SMS = 132


class LinearConfig(NamedTuple):
    """Launch configuration of one skinny product."""

    block_m: int
    """Number of rows of x in a tile: 16, 32 or 64."""
    block_n: int
    """Number of output columns of a tile. A gated tile reads twice as many weight rows."""
    block_k: int
    split_k: int
    """Number of programs that share a tile. Each one computes a part of K."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline, that is, the number of weight tiles of width block_k in
    flight."""
    swap: bool
    """Whether to compute weight @ x^T, so that the weight rows are on the 64-row side of wgmma."""

    def tile_rows(self, gated: bool) -> int:
        """Return the number of weight rows that one program reads."""
        return 2 * self.block_n if gated else self.block_n

    def workspace_floats(self, num_tiles: int, gated: bool) -> int:
        """Return the size of the workspace for the partial sums of `num_tiles` tiles, as a number
        of float32 values."""
        return self.split_k * num_tiles * self.block_m * self.tile_rows(gated)


# (N, K, gated, block_m): (block_n, block_k, split_k, num_warps, num_stages, swap)
TABLE: dict[tuple[int, int, bool, int], tuple[int, int, int, int, int, bool]] = {
    (6144, 4096, False, 16): (64, 256, 1, 4, 4, True),
    (6144, 4096, False, 32): (64, 128, 1, 4, 7, True),
    (6144, 4096, False, 64): (64, 64, 1, 4, 9, True),
    (4096, 4096, False, 16): (64, 128, 2, 4, 5, True),
    (4096, 4096, False, 32): (64, 128, 2, 4, 4, True),
    (4096, 4096, False, 64): (64, 64, 2, 4, 8, True),
    (28672, 4096, True, 16): (64, 128, 1, 4, 3, False),
    (28672, 4096, True, 32): (64, 64, 1, 4, 3, True),
    (28672, 4096, True, 64): (64, 64, 1, 4, 3, False),
    (4096, 14336, False, 16): (64, 128, 1, 4, 8, True),
    (4096, 14336, False, 32): (64, 256, 2, 4, 4, True),
    (4096, 14336, False, 64): (64, 64, 2, 4, 8, True),
    (128256, 4096, False, 16): (64, 128, 1, 4, 3, True),
    (128256, 4096, False, 32): (64, 128, 1, 4, 2, True),
    (128256, 4096, False, 64): (128, 64, 1, 4, 4, False),
    (4096, 12288, False, 16): (64, 256, 2, 4, 4, True),
    (4096, 12288, False, 32): (64, 256, 2, 4, 4, True),
    (4096, 12288, False, 64): (64, 64, 2, 4, 9, False),
    (6144, 8192, False, 16): (64, 256, 1, 4, 4, True),
    (6144, 8192, False, 32): (64, 128, 1, 4, 7, True),
    (6144, 8192, False, 64): (64, 128, 1, 4, 6, True),
    (32000, 4096, False, 16): (64, 128, 1, 4, 3, True),
    (32000, 4096, False, 32): (64, 128, 1, 4, 2, True),
    (32000, 4096, False, 64): (128, 64, 1, 4, 4, False),
}
"""Fastest configurations for 2-byte operands, measured on an H200 with torch 2.11 and triton 3.6 on
2026-11-21; see `outrider_bench.gpu.checks.tune_linear`. The entries with K = 12288 or 8192 are from
an earlier run; those with N = 32000 are copies of those with N = 128256."""


def choose_config(
    m: int, n: int, k: int, gated: bool, device: torch.device, element_size: int = 2
) -> LinearConfig:
    """Return the launch configuration of x [m, k] @ weight [n, k]^T with operands of `element_size`
    bytes.

    Tuned shapes use their entry of `TABLE`. For others, the configuration aims at two programs per
    SM. The choice depends only on the tile size (16, 32 or 64) into which m is rounded up, so all
    values of m with the same tile size give the same results bit for bit.
    """
    block_m = min(max(next_power_of_2(m), 16), 64)
    entry = TABLE.get((n, k, gated, block_m)) if element_size == 2 else None
    if entry is not None:
        return LinearConfig(block_m, *entry)
    return _fallback(block_m, n, k, gated, _num_sms(device), element_size)


@cache
def _fallback(
    block_m: int, n: int, k: int, gated: bool, num_sms: int, element_size: int
) -> LinearConfig:
    columns = n // 2 if gated else n
    rows = 128 if block_m == 64 and n >= 64 * num_sms else 64
    if element_size > 2:
        rows = 32
    block_n = rows // 2 if gated else rows
    block_k = 128 // max(element_size // 2, 1)
    if rows * block_k * element_size > 16 << 10:
        block_k //= 2
    block_k = min(block_k, max(next_power_of_2(k), 16))
    tiles = cdiv(columns, block_n)
    split_k = 1
    # Four blocks of K a program at least: fewer do not fill the pipeline.
    while tiles * split_k < 2 * num_sms and k // (2 * split_k * block_k) >= 4 and split_k < 8:
        split_k *= 2
    stage_bytes = (rows + block_m) * block_k * element_size
    num_stages = min(max(_SHARED_BYTES // stage_bytes, 2), 5)
    config = LinearConfig(block_m, block_n, block_k, split_k, 4, num_stages, swap=rows >= 64)
    fits = config.workspace_floats(tiles, gated) <= WORKSPACE_FLOATS and tiles <= MAX_TILES
    return config if fits else config._replace(split_k=1)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _ASSUMED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
