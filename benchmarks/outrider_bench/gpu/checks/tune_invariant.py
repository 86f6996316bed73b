"""Tune the batch-invariant matrix product for Llama-3.1-8B.

Run `python -m outrider_bench.gpu.checks.tune_invariant --out FILE` on the device to tune for. For
each product of a forward pass and each number of rows, it times the batch-invariant kernel, and
cuBLAS restricted to algorithms that do not split K. A timing uses several weights in turn, which
together are larger than the L2 cache. The results of both are also compared bit by bit. For up to
SKINNY_ROWS rows other tile sizes are timed, too. It prints a line for each product and number of
rows, and writes everything to FILE as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, Final

import torch

from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.fused import SKINNY_ROWS, fused_linear_wide
from outrider.engine.kernels.linear.invariant import (
    forbid_split_k,
    invariant_config,
    invariant_linear_triton,
)
from outrider.engine.kernels.runtime import next_power_of_2
from outrider_bench.gpu.checks.tune_linear import (
    COPY_BYTES,
    LAYER,
    LM_HEAD,
    SM_SHARED_BYTES,
    Product,
    compile_all,
    make_inputs,
    make_weight,
    seconds,
    time_config,
)

ROWS: Final = (8, 32, 64, 160, 320, 1024)
PRODUCTS: Final = (*LAYER, LM_HEAD)


def candidates(product: Product, rows: int) -> list[LinearConfig]:
    """Return the configurations to time: those whose tiles fit a multiprocessor's shared memory and
    registers. For more than SKINNY_ROWS rows there are none."""
    if rows > SKINNY_ROWS:
        return []
    block_m = max(next_power_of_2(rows), 16)
    return [
        config
        for tile_rows in (32, 64, 128, 256)
        for block_k in (64, 128, 256)
        for config in _staged(product, block_m, tile_rows, block_k)
    ]


def _staged(product: Product, block_m: int, tile_rows: int, block_k: int) -> list[LinearConfig]:
    block_n = tile_rows // 2 if product.gated else tile_rows
    values = block_m * tile_rows
    stages = min(SM_SHARED_BYTES // (2 * (block_m + tile_rows) * block_k), 8)
    if stages < 3 or values > 128 * 256 or 2 * (block_m + tile_rows) * block_k < 8 << 10:
        return []
    warps = (8,) if values >= 128 * 128 else (4, 8)
    swaps = [swap for swap in (False, True) if (tile_rows if swap else block_m) >= 64 or not swap]
    return [
        LinearConfig(block_m, block_n, block_k, 1, num_warps, stages, swap)
        for num_warps in warps
        for swap in swaps
    ]


def tune(product: Product, rows: int) -> dict[str, Any]:
    """Time the candidates, the configuration in use and cuBLAS. Return the times in microseconds,
    and whether the last two give the same bits."""
    copies = max(4, math.ceil(COPY_BYTES / product.weight_bytes))
    weights = [make_weight(product) for _ in range(copies)]
    x, options = make_inputs(product, rows)
    present = invariant_config(x, weights[0], gated=product.gated)
    streamed = invariant_linear_triton(x, weights[0], **options)
    is_equal = torch.equal(fused_linear_wide(x, weights[0], **options), streamed)

    def multiply_wide(index: int) -> object:
        return fused_linear_wide(x, weights[index % copies], **options)

    wide_s = seconds(multiply_wide, copies)
    times = {
        config: time_config(config, x, weights, options | {"rounded": True})
        for config in dict.fromkeys([present, *candidates(product, rows)])
    }
    ranked = sorted(times, key=lambda config: times[config])
    result = {
        "present_us": times[present] * 1e6,
        "cublas_us": wide_s * 1e6,
        "cublas_is_equal": is_equal,
        "best_us": times[ranked[0]] * 1e6,
        "ranked": [(config, times[config] * 1e6) for config in ranked[:8]],
    }
    print(
        f"{product.name:8} m={rows:<5} cuBLAS {result['cublas_us']:8.2f} us "
        f"{'equal' if is_equal else 'DIFFERS'}, present {result['present_us']:8.2f} us, best "
        f"{result['best_us']:8.2f} us {tuple(ranked[0])}",
        flush=True,
    )
    return result


def main() -> None:
    """Tune the products that the flags select and write the results to --out."""
    parser = argparse.ArgumentParser(description="Tune the batch-invariant matrix product.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows")
    parser.add_argument("--products", default=",".join(product.name for product in PRODUCTS))
    args = parser.parse_args()
    forbid_split_k()
    names = args.products.split(",")
    jobs = [
        (product, int(rows))
        for product in PRODUCTS
        if product.name in names
        for rows in args.rows.split(",")
    ]
    results: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        compile_all((p, config) for p, rows in jobs for config in candidates(p, rows))
        for product, rows in jobs:
            results.setdefault(product.name, {})[str(rows)] = tune(product, rows)
            torch.cuda.empty_cache()
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
