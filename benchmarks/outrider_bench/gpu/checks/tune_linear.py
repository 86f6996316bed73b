"""Tune the weight-streaming matrix product for Llama-3.1-8B and its EAGLE-3 head.

Run `python -m outrider_bench.gpu.checks.tune_linear --out FILE [--quick]` on the device to tune
for. For every product and number of rows it times candidate configurations. A timing uses several
weights in turn, which together are larger than the L2 cache. It checks the best configurations
against float64, and then times all norms and products of whole forward passes. It prints lines for
`outrider.engine.kernels.linear.configs.TABLE` and writes everything to FILE as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from outrider_chaos.parent_watch import end_with_parent
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kernels.linear.configs import (
    MAX_TILES,
    WORKSPACE_FLOATS,
    LinearConfig,
    choose_config,
)
from outrider.engine.kernels.linear.fused import fused_linear_torch, fused_linear_triton
from outrider.engine.kernels.norm import rms_norm
from outrider.engine.kernels.runtime import cdiv

TUNED_ROWS = (8, 32, 64)  # for the row tiles 16, 32 and 64
TIMED_ROWS = (1, 8, 16, 32, 64)
NUM_LAYERS = 32
FLOOR_MS = 3.49  # the target's weights at the speed of a device copy (H200)
COPY_BYTES = 400e6
"""Total bytes of the weights that a timing uses in turn. They are larger than the L2 cache."""
_EPS = 1e-5
_SMS = 132
SM_SHARED_BYTES = 224 << 10
"""Bytes of a multiprocessor's shared memory that programs can use."""


class Product(NamedTuple):
    """One matrix product of a forward pass: an input [m, k] by the transpose of a weight [n, k]."""

    name: str
    n: int
    k: int
    residual: bool = False
    gated: bool = False
    float_out: bool = False

    @property
    def columns(self) -> int:
        """Number of columns of the result: `n`, or half of it if the product is gated."""
        return self.n // 2 if self.gated else self.n

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight in bfloat16."""
        return 2 * self.n * self.k


LAYER = (
    Product("qkv", 6144, 4096),
    Product("o_proj", 4096, 4096, residual=True),
    Product("gate_up", 28672, 4096, gated=True),
    Product("down", 4096, 14336, residual=True),
)
LM_HEAD = Product("lm_head", 128256, 4096, float_out=True)
DRAFT = (
    Product("draft_fc", 4096, 12288),
    Product("draft_qkv", 6144, 8192),
    Product("draft_lm_head", 32000, 4096, float_out=True),
)
PRODUCTS = (*LAYER, LM_HEAD, *DRAFT)


def candidates(product: Product, block_m: int, limit: int) -> list[LinearConfig]:
    """Return the configuration in use and up to `limit` others.

    The others are estimated to leave few multiprocessors idle in the last wave of programs. They
    are taken at equal distances from the `3 * limit` best ones by this estimate, so that they
    differ from each other.
    """
    found: dict[LinearConfig, float] = {}
    for rows in (32, 64, 128, 256):
        for block_k in (64, 128, 256):
            for residents in (1, 2, 3, 4):
                stage = (rows + block_m) * block_k * 2
                stages = min(SM_SHARED_BYTES // residents // stage, 8)
                if stages < 3 or not 4096 <= rows * block_k <= 16384:
                    continue
                for split_k in (1, 2, 4, 8):
                    loss = _loss(product, rows, block_k, split_k, residents)
                    for swap in (False, True):
                        config = _config(product, block_m, rows, block_k, split_k, stages, swap)
                        if config is not None and loss < 0.45:
                            found[config] = min(found.get(config, 1.0), loss)
    ordered = sorted(found, key=lambda config: found[config])[: 3 * limit]
    spread = [ordered[i * len(ordered) // limit] for i in range(min(limit, len(ordered)))]
    current = choose_config(block_m, product.n, product.k, product.gated, torch.device("cuda", 0))
    return list(dict.fromkeys([current, *spread]))


def neighbours(product: Product, config: LinearConfig) -> list[LinearConfig]:
    """Return the configurations that differ from `config` in one parameter by one step."""
    rows = config.tile_rows(product.gated)
    steps = [config._replace(num_stages=config.num_stages + step) for step in (-1, 1)]
    steps += [config._replace(num_warps=12 - config.num_warps), config._replace(swap=rows >= 64)]
    steps += [config._replace(swap=False)]
    steps += [config._replace(split_k=max(int(config.split_k * by), 1)) for by in (0.5, 2)]
    return [step for step in steps if _is_launchable(product, step)]


def _is_launchable(product: Product, config: LinearConfig) -> bool:
    stage = (config.tile_rows(product.gated) + config.block_m) * config.block_k * 2
    if not 2 <= config.num_stages <= SM_SHARED_BYTES // stage:
        return False
    tiles = cdiv(product.columns, config.block_n)
    fits = config.workspace_floats(tiles, product.gated) <= WORKSPACE_FLOATS
    return config.split_k == 1 or (fits and tiles <= MAX_TILES and config.split_k <= 8)


def _loss(product: Product, rows: int, block_k: int, split_k: int, residents: int) -> float:
    """Return an estimate of the share of the device left idle by uneven waves, plus penalties for
    other overheads."""
    programs = product.n // rows * split_k
    slots = _SMS * residents
    waves = programs / slots
    idle = 1 - waves / math.ceil(waves)
    if waves < 1:
        # Fewer, equal programs share the bandwidth as long as enough bytes are in flight.
        idle /= 2
    blocks = product.k / split_k / block_k
    needless = split_k > 1 and programs > 5 * _SMS
    return idle + 0.02 * (split_k - 1) + (0.3 if blocks < 4 else 0.0) + 0.5 * needless


def _config(
    product: Product,
    block_m: int,
    rows: int,
    block_k: int,
    split_k: int,
    stages: int,
    swap: bool,
) -> LinearConfig | None:
    if swap and rows < 64:
        return None
    block_n = rows // 2 if product.gated else rows
    warps = 8 if rows * block_m >= 128 * 64 and rows >= 128 else 4
    config = LinearConfig(block_m, block_n, block_k, split_k, warps, stages, swap)
    return config if _is_launchable(product, config) else None


def make_inputs(product: Product, m: int) -> tuple[Tensor, dict[str, Any]]:
    """Return a random input [m, K] and the keyword arguments of the product, with a random residual
    if it adds one."""
    device = torch.device("cuda", 0)
    options: dict[str, Any] = {"gated": product.gated}
    if product.residual:
        options["residual"] = torch.randn(m, product.n, device=device, dtype=torch.bfloat16)
    if product.float_out:
        options["out_dtype"] = torch.float32
    return torch.randn(m, product.k, device=device, dtype=torch.bfloat16), options


def make_weight(product: Product) -> Tensor:
    """Return a random bfloat16 weight that preserves the scale of its input."""
    weight = torch.randn(product.n, product.k, device="cuda", dtype=torch.bfloat16)
    return weight.mul_(product.k**-0.5)


def compile_all(jobs: Iterable[tuple[Product, LinearConfig]]) -> None:
    """Compile these pairs in many processes, so that Triton's disk cache contains their kernels. A
    pair that fails to compile is reported, and fails again when it is timed."""
    unique = list(dict.fromkeys((p._replace(name="", n=0, k=0), c) for p, c in jobs))
    workers = min(14, os.cpu_count() or 1)
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
        failed = [error for error in pool.map(_compile, unique, chunksize=4) if error]
    spent = f"{time.perf_counter() - started:.0f} s"
    print(f"compiled {len(unique)} variants in {spent}, {len(failed)} failed", flush=True)
    print("".join(f"  {error}\n" for error in failed[:3]), end="", flush=True)


def _compile(job: tuple[Product, LinearConfig]) -> str | None:
    product, config = job
    small = product._replace(n=4 * config.tile_rows(product.gated), k=4096)
    try:
        x, options = make_inputs(small, 16)
        fused_linear_triton(x, make_weight(small), config=config, **options)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{config}: {type(error).__name__} {str(error)[:200]}"
    return None


def seconds(launch: Callable[[int], object], launches: int, replays: int = 9) -> float:
    """Return the median seconds of one launch. A CUDA graph of launch(0), launch(1), ...,
    launch(launches - 1) is replayed `replays` times."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index)
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(2 + replays):
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:]) / launches


def time_config(
    config: LinearConfig, x: Tensor, weights: list[Tensor], options: dict[str, Any]
) -> float:
    """Return the seconds of one product with this configuration; inf if it fails. Successive
    products use the weights in turn."""

    def launch(index: int) -> object:
        return fused_linear_triton(x, weights[index % len(weights)], config=config, **options)

    try:
        return seconds(launch, max(16, len(weights)))
    except Exception as error:
        print(f"  skipped {config}: {type(error).__name__} {str(error)[:120]}", flush=True)
        return math.inf


def reference_error(
    config: LinearConfig, x: Tensor, weight: Tensor, options: dict[str, Any]
) -> float:
    """Return the largest absolute error against float64, divided by the largest absolute value."""
    wide: dict[str, Any] = {k: v.double() for k, v in options.items() if isinstance(v, Tensor)}
    wide = options | wide | {"out_dtype": torch.float64}
    expected = fused_linear_torch(x.double(), weight.double(), **wide)
    got = fused_linear_triton(x, weight, config=config, **options).double()
    return float((got - expected).abs().max() / expected.abs().max())


def _cublas(x: Tensor, weights: list[Tensor], index: int) -> Tensor:
    return F.linear(x, weights[index])


def tune(product: Product, jobs: dict[int, list[LinearConfig]]) -> dict[int, dict[str, Any]]:
    """Time the configurations in `jobs`, which are listed by number of rows.

    Returns by number of rows: the best configuration, its time, bandwidth and error, the time of
    cuBLAS, and all times in ascending order.
    """
    copies = max(8, math.ceil(COPY_BYTES / product.weight_bytes))
    weights = [make_weight(product) for _ in range(copies)]
    results = {}
    for m, configs in jobs.items():
        x, options = make_inputs(product, m)
        times = {config: time_config(config, x, weights, options) for config in configs}
        ranked = sorted(times, key=lambda config: times[config])
        best = ranked[0]
        plain = seconds(functools.partial(_cublas, x, weights), copies)
        results[m] = {
            "config": best,
            "us": times[best] * 1e6,
            "gb_per_s": product.weight_bytes / times[best] / 1e9,
            "cublas_us": plain * 1e6,
            "error": reference_error(best, x, weights[0], options),
            "ranked": [(config, times[config] * 1e6) for config in ranked],
        }
        line = results[m]
        print(
            f"{product.name:14} m={m:<3} {line['us']:7.2f} us {line['gb_per_s']:6.0f} GB/s "
            f"cuBLAS {line['cublas_us']:7.2f} us error {line['error']:.1e} {tuple(best)}",
            flush=True,
        )
    return results


def run_passes(products: tuple[Product, ...], quick: bool, out: Path) -> dict[str, Any]:
    """Time the configurations of `candidates`, then neighbours of the best ones, and write the
    results to `out` as JSON. Return {product: {rows: result}}. If `quick`, fewer configurations are
    timed, and only with the smallest number of rows."""
    rows = TUNED_ROWS[:1] if quick else TUNED_ROWS
    limit = 8 if quick else 20
    jobs = {p: {m: candidates(p, max(m, 16), limit) for m in rows} for p in products}
    best: dict[str, Any] = {p.name: {} for p in products}
    for label in ("wide", "near"):
        compile_all((p, c) for p, by_rows in jobs.items() for cs in by_rows.values() for c in cs)
        print(f"--- {label}", flush=True)
        for product in products:
            for m, result in tune(product, jobs[product]).items():
                _merge(best[product.name], m, result)
                ranked = [config for config, _ in best[product.name][m]["ranked"]]
                jobs[product][m] = _near(product, ranked)
            torch.cuda.empty_cache()
            out.write_text(json.dumps(best, indent=1) + "\n", encoding="utf-8")
    return best


def _merge(results: dict[int, dict[str, Any]], m: int, new: dict[str, Any]) -> None:
    """Replace the result for `m` rows if the new one is better, and keep the times of both."""
    old = results.get(m, new)
    ranked = dict(old["ranked"]) | dict(new["ranked"])
    results[m] = dict(min(old, new, key=lambda result: float(result["us"])))
    results[m]["ranked"] = sorted(ranked.items(), key=lambda item: item[1])


def _near(product: Product, ranked: list[LinearConfig]) -> list[LinearConfig]:
    """Return the best configuration, and those neighbours of the best two that were not timed
    yet."""
    near = [step for config in ranked[:2] for step in neighbours(product, config)]
    return [config for config in dict.fromkeys([ranked[0], *near]) if config not in ranked[1:]]


def print_table(products: tuple[Product, ...], best: dict[str, Any]) -> None:
    """Print the best configurations as lines of Python source, to be pasted into the dict `TABLE`
    of `outrider.engine.kernels.linear.configs`. `best`: the results of the tuning, by product name
    and number of rows."""
    for product in products:
        for m, result in best[product.name].items():
            key = (product.n, product.k, product.gated, max(m, 16))
            print(f"    {key}: {tuple(result['config'])[1:]},")


def summarise(best: dict[str, Any]) -> None:
    """Print the summed times of the products of a target forward and of a draft head's forward, for
    each tuned number of rows."""
    layer = [product.name for product in LAYER]
    target = [(name, NUM_LAYERS) for name in layer] + [("lm_head", 1)]
    draft = [(name, 1) for name in ("draft_fc", "draft_qkv", *layer[1:], "draft_lm_head")]
    for m in best["qkv"]:
        for label, names in (("target", target), ("draft head", draft)):
            fused, plain = (
                sum(count * best[name][m][key] for name, count in names) / 1e3
                for key in ("us", "cublas_us")
            )
            print(f"{label} m={m}: {fused:.3f} ms, cuBLAS alone {plain:.3f} ms", flush=True)
    print(f"floor of the target: {FLOOR_MS} ms", flush=True)


def _config_at(best: dict[str, Any], product: Product, m: int) -> LinearConfig:
    fitting = [rows for rows in best[product.name] if max(rows, 16) >= m]
    if fitting:
        return LinearConfig(*best[product.name][min(fitting)]["config"])
    return choose_config(m, product.n, product.k, product.gated, torch.device("cuda", 0))


def time_forwards(best: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a CUDA graph of all norms and products of a target forward, with
    the tuned kernel ("fused") and with cuBLAS, by name and number of rows."""
    layers = [[make_weight(product) for product in LAYER] for _ in range(NUM_LAYERS)]
    lm_head = make_weight(LM_HEAD)
    norm = torch.ones(LM_HEAD.k, device="cuda", dtype=torch.bfloat16)
    times: dict[str, float] = {}
    for m in TIMED_ROWS:
        for label in ("fused", "cublas"):
            steps = [_step(best, product, m, label) for product in (*LAYER, LM_HEAD)]
            first = make_inputs(LAYER[0], m)[0]
            forward = functools.partial(_forward, steps, layers, lm_head, norm, first)
            spent = times[f"{label} m={m}"] = seconds(forward, 1) * 1e3
            print(f"forward, {label} m={m}: {spent:.3f} ms", flush=True)
    return times


def _step(best: dict[str, Any], product: Product, m: int, label: str) -> Callable[..., Tensor]:
    if label == "cublas":
        return lambda x, weight, residual=None: F.linear(x, weight)
    config = _config_at(best, product, m)
    options: dict[str, Any] = make_inputs(product, m)[1] | {"config": config}
    return lambda x, weight, **extra: fused_linear_triton(x, weight, **(options | extra))


def _forward(
    steps: list[Callable[..., Tensor]],
    layers: list[list[Tensor]],
    lm_head: Tensor,
    norm: Tensor,
    x: Tensor,
    _: int,
) -> Tensor:
    """Run the norms and products of a forward pass. Queries replace the result of attention, and
    the gate replaces the activation that cuBLAS does not apply."""
    for weights in layers:
        qkv = steps[0](rms_norm(x, norm, _EPS), weights[0])
        x = steps[1](qkv[:, : LAYER[1].k], weights[1], residual=x)
        hidden = steps[2](rms_norm(x, norm, _EPS), weights[2])[:, : LAYER[3].k]
        x = steps[3](hidden, weights[3], residual=x)
    return steps[4](rms_norm(x, norm, _EPS), lm_head)


def main() -> None:
    """Tune the products and write the results to --out."""
    parser = argparse.ArgumentParser(description="Tune the weight-streaming matrix product.")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="8 candidates, up to 16 rows only")
    args = parser.parse_args()
    with torch.inference_mode():
        best = run_passes(PRODUCTS, args.quick, args.out)
        print_table(PRODUCTS, best)
        summarise(best)
        forwards = time_forwards(best)
    report = {"products": best, "forwards_ms": forwards}
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
