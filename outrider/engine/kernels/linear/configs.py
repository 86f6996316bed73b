"""Launch configurations of the skinny matrix product, tuned for the shapes of Llama-3.1-8B.

M rows, N weight rows, K input features.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from outrider.engine.kernels.runtime import cdiv, next_power_of_2

WORKSPACE_FLOATS = 1 << 23
"""float32 values of the split-K workspace (32 MiB): a split that needs more is not made."""
MAX_TILES = 1 << 12
"""Arrival counters: a product of more tiles is not split."""

_SHARED_BYTES = 96 << 10
"""Shared memory that one program of the fallback may take: two fit on a Hopper SM (227 KiB)."""
_ASSUMED_SMS = 132


class LinearConfig(NamedTuple):
    """Launch configuration of one skinny product."""

    block_m: int
    """Rows of x in a tile: 16, 32 or 64."""
    block_n: int
    """Output columns of a tile; a gated tile reads twice as many weight rows."""
    block_k: int
    split_k: int
    """Programs that share a tile, each with a part of K."""
    num_warps: int
    num_stages: int
    """Depth of the software pipeline: block_k-wide weight tiles in flight."""
    swap: bool
    """Multiply weight @ x^T, so that the weight rows take the 64-row side of wgmma."""

    def tile_rows(self, gated: bool) -> int:
        """Weight rows that one program reads."""
        return 2 * self.block_n if gated else self.block_n

    def workspace_floats(self, num_tiles: int, gated: bool) -> int:
        """Return float32 values of workspace that `num_tiles` tiles need: their partial sums."""
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
"""Measured on an H200, torch 2.11, triton 3.6, 2026-11-21, 2-byte operands; see
`outrider_bench.gpu.checks.tune_linear`. K = 12288 and 8192 keep the entries of an earlier run, and
N = 32000 takes those of 128256."""


def choose_config(
    m: int, n: int, k: int, gated: bool, device: torch.device, element_size: int = 2
) -> LinearConfig:
    """Configuration of x [m, k] @ weight [n, k]^T with operands of `element_size` bytes.

    Tuned shapes come from `TABLE`; others get enough programs to fill the device's SMs twice.
    The choice depends on m by its tile (16, 32 or 64) only, so that rows keep their bits when
    others join them.
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
