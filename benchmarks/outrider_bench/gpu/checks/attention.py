"""Check and time paged tree attention and the kernels around it at the shapes of Llama-3.1-8B.

`python -m outrider_bench.gpu.checks.attention [--out FILE]` runs on the device. First it measures
the errors of attention against float64. Then it times CUDA graphs of 32 layers, each with a KV
cache of its own, for launch parameters near those in use. Copy the configuration that is printed as
best into `outrider.engine.kernels.attention.config`.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from outrider_chaos.parent_watch import end_with_parent
from torch import Tensor

from outrider.engine.kernels.attention.compaction import compact_kv, gather_rows
from outrider.engine.kernels.attention.config import AttentionConfig, choose_config
from outrider.engine.kernels.attention.layout import RoundLayout, tree_layout
from outrider.engine.kernels.attention.rotary import rotary_table, rotary_write
from outrider.engine.kernels.attention.tree import tree_attention
from outrider_bench.gpu.checks.tune_linear import seconds

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 32, 32, 8, 128, 4096
BLOCK_TOKENS = 16
TABLE_WIDTH = 528
POOL_BLOCKS = 64 * 40
SHORT, LONG = 512, 8192
SLOT_BYTES = 2 * KV_HEADS * DIM * 2
"""Bytes of the keys and values of one token in one layer, in bfloat16."""
VARIANTS = (
    (32, 4, 2),
    (32, 4, 3),
    (32, 4, 5),
    (32, 2, 3),
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (64, 4, 5),
    (64, 8, 3),
    (128, 4, 2),
    (128, 4, 3),
    (128, 8, 3),
)
"""Values of (block_slots, num_warps, num_stages) that are timed."""
BOUND = 5e-3
"""Largest allowed relative error. Attention weights and results are bfloat16 values, which have 8
bits of precision."""


class AttentionShape(NamedTuple):
    """Number of sessions, nodes per session, and context length of each session."""

    batch: int
    nodes: int
    context: int = SHORT

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one layer must read."""
        return self.batch * (self.context + self.nodes) * SLOT_BYTES


WIDE_TREE = AttentionShape(1, 64)
"""Shape of a single large tree. For this shape the ten best configurations are printed."""
TIMED = (
    WIDE_TREE,
    *(AttentionShape(batch, nodes) for batch in (1, 8, 32, 64) for nodes in (1, 4, 6, 8)),
    *(AttentionShape(1, nodes, LONG) for nodes in (1, 6, 64)),
)
CHECKED = (
    AttentionShape(1, 1),
    AttentionShape(1, 8),
    AttentionShape(1, 64),
    AttentionShape(1, 6, LONG),
    AttentionShape(8, 4),
    AttentionShape(64, 6),
)
COMPANIONS = (AttentionShape(1, 1), AttentionShape(1, 8), AttentionShape(64, 6))


class AttentionBucket(NamedTuple):
    """Input tensors of the attention of one round."""

    tables: Tensor
    slots: Tensor
    context: Tensor
    parents: Tensor
    layout: RoundLayout
    qkv: Tensor


def make_bucket(shape: AttentionShape, *, tree: bool, num_blocks: int) -> AttentionBucket:
    """Return random inputs of sessions whose KV blocks are scattered over the pool. If `tree`, the
    nodes of a session form a tree in which the parent of node i is node (i - 1) // 2, else a
    chain."""
    device = torch.device("cuda", 0)
    needed = (shape.context + shape.nodes) // BLOCK_TOKENS + 1
    tables = torch.zeros((shape.batch + 1, TABLE_WIDTH), dtype=torch.int32, device=device)
    order = torch.randperm(num_blocks, device=device)
    repeats = order.repeat(-(-shape.batch * needed // num_blocks))
    tables[:-1, :needed] = repeats[: shape.batch * needed].view(shape.batch, needed)
    slots = torch.randperm(shape.batch, device=device).int()
    context = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    nodes = torch.arange(shape.nodes - 1, dtype=torch.int32, device=device)
    parents = ((nodes + 1) // 2 - 1).expand(shape.batch, -1).contiguous()
    layout = tree_layout(
        parents if tree else None,
        context,
        tables,
        slots,
        num_nodes=shape.nodes,
        block_tokens=BLOCK_TOKENS,
    )
    rows = shape.batch * shape.nodes
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
    return AttentionBucket(tables, slots, context, parents, layout, qkv)


def attend(
    storage: Tensor,
    bucket: AttentionBucket,
    config: AttentionConfig | None,
    shape: AttentionShape,
    layer: int,
) -> Tensor:
    """Run the attention of one layer. With `config` None the engine chooses the configuration."""
    layer %= storage.shape[1]
    return tree_attention(
        bucket.qkv[:, :HEADS],
        storage[0, layer],
        storage[1, layer],
        tables=bucket.tables,
        slots=bucket.slots,
        context=bucket.context,
        num_nodes=shape.nodes,
        mask=bucket.layout.mask,
        block_tokens=BLOCK_TOKENS,
        positions=None,
        max_len=TABLE_WIDTH * BLOCK_TOKENS,
        config=config,
    )


def default_config(shape: AttentionShape) -> AttentionConfig:
    """Return the configuration that the engine uses for this shape."""
    return choose_config(
        batch=shape.batch,
        num_nodes=shape.nodes,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        itemsize=2,
        max_len=TABLE_WIDTH * BLOCK_TOKENS,
    )


def candidates(shape: AttentionShape) -> list[AttentionConfig]:
    """Return the configurations to time: the default one, and those of VARIANTS with half to twice
    as many splits.

    For a single large tree, whose rows can also be split, they include every tile height and small
    numbers of splits.
    """
    default = default_config(shape)
    parts = {max(default.splits // 2, 1), default.splits, min(2 * default.splits, 64)}
    if shape.batch >= 32:
        parts |= {1, 2, 4}
    heights = {default.block_rows}
    if shape.batch == 1 and shape.nodes >= 32:
        parts |= {1, 2, 3, 4, 8}
        heights |= {16, 32, 64, 128}
    configs = [
        # As in choose_config: sums of 128 rows do not fit the registers of 4 warps.
        AttentionConfig(rows, slots, splits, 8 if rows > 64 else warps, stages)
        for slots, warps, stages in VARIANTS
        for splits in sorted(parts)
        for rows in sorted(heights)
    ]
    return list(dict.fromkeys([default, *configs]))


def reference(storage: Tensor, bucket: AttentionBucket, shape: AttentionShape) -> Tensor:
    """Return the attention of layer 0 computed in float64, [M, Q * d], with one row for each of M
    nodes and Q query heads."""
    index = torch.arange(shape.context + shape.nodes, device=storage.device)
    blocks = bucket.tables[bucket.slots.long()].long()
    pool = blocks[:, index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS
    mask = bucket.layout.mask
    if mask is None:
        ones = torch.ones(shape.nodes, shape.nodes, device=storage.device)
        mask = ones.tril().expand(shape.batch, -1, -1)
    hidden = torch.zeros(shape.batch, shape.nodes, len(index), device=storage.device)
    hidden[:, :, shape.context :] = mask == 0
    q = bucket.qkv[:, :HEADS].double().view(shape.batch, shape.nodes, KV_HEADS, -1, DIM)
    scores = torch.einsum("bnhgd,hbld->bhngl", q, storage[0, 0][:, pool].double()) * DIM**-0.5
    weights = scores.masked_fill(hidden[:, None, :, None].bool(), -torch.inf).softmax(-1)
    out = torch.einsum("bhngl,hbld->bnhgd", weights, storage[1, 0][:, pool].double())
    return out.reshape(shape.batch * shape.nodes, -1)


def check(storage: Tensor) -> dict[str, float]:
    """Return the relative error of each shape in CHECKED, by a description of the shape. Print each
    error, and whether it is too large."""
    errors: dict[str, float] = {}
    for shape in CHECKED:
        for tree in (False, True) if shape.nodes > 1 else (False,):
            bucket = make_bucket(shape, tree=tree, num_blocks=POOL_BLOCKS)
            expected = reference(storage, bucket, shape)
            got = attend(storage, bucket, None, shape, 0).double()
            name = f"B={shape.batch} N={shape.nodes} context={shape.context} tree={tree}"
            errors[name] = float((got - expected).norm() / expected.norm())
            verdict = "ok" if errors[name] < BOUND else "WRONG"
            print(f"error {name}: {errors[name]:.2e} {verdict}", flush=True)
    return errors


def compile_all(shapes: tuple[AttentionShape, ...]) -> None:
    """Compile the candidates of these shapes in many processes, so that Triton's disk cache
    contains them. Candidates that differ only in the number of splits mostly share a kernel, which
    is compiled once."""
    jobs: dict[tuple[object, ...], tuple[AttentionShape, AttentionConfig]] = {}
    for shape in shapes:
        for config in candidates(shape):
            # Triton specialises on integers that are 1 or multiples of 16.
            kind = 1 if shape.nodes == 1 else 16 if shape.nodes % 16 == 0 else 0
            parts = 1 if config.splits == 1 else 16 if config.splits % 16 == 0 else 0
            key = (kind, parts, config._replace(splits=0))
            jobs.setdefault(key, (AttentionShape(1, shape.nodes, 64), config))
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
        failed = [error for error in pool.map(_compile, jobs.values(), chunksize=2) if error]
    spent = time.perf_counter() - started
    print(f"compiled {len(jobs)} kernels in {spent:.0f} s, {len(failed)} failed", flush=True)
    for error in failed[:3]:
        print("  " + error, flush=True)


def _compile(job: tuple[AttentionShape, AttentionConfig]) -> str | None:
    shape, config = job
    try:
        bucket = make_bucket(shape, tree=False, num_blocks=16)
        attend(_make_storage(1, 16), bucket, config, shape, 0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{shape} {config}: {type(error).__name__} {str(error)[:160]}"
    return None


def _make_storage(layers: int, num_blocks: int) -> Tensor:
    """Return random values [2, layers, G, S, d]. It is filled layer by layer, because the generator
    works in float32."""
    size = (2, layers, KV_HEADS, num_blocks * BLOCK_TOKENS, DIM)
    storage = torch.empty(size, device="cuda", dtype=torch.bfloat16)
    for layer in range(layers):
        storage[:, layer].normal_()
    return storage


def time_config(
    storage: Tensor, bucket: AttentionBucket, config: AttentionConfig, shape: AttentionShape
) -> float | None:
    """Return the seconds per layer; None if the device cannot run the configuration."""
    launch = functools.partial(attend, storage, bucket, config, shape)
    try:
        return seconds(launch, LAYERS, replays=5)
    except Exception as error:
        print(f"  skipped {tuple(config)}: {type(error).__name__} {str(error)[:100]}", flush=True)
        return None


def sweep(storage: Tensor, budget_s: float) -> list[dict[str, Any]]:
    """Time every candidate of every shape in TIMED. Print the default and the best one of each
    shape, and return the results of each shape. Shapes that are left after `budget_s` seconds are
    not timed."""
    results = []
    started = time.perf_counter()
    print("config: block_rows, block_slots, splits, num_warps, num_stages", flush=True)
    for shape in TIMED:
        if time.perf_counter() - started > budget_s:
            print("the time for the sweep is over; shapes left out follow in TIMED", flush=True)
            break
        bucket = make_bucket(shape, tree=False, num_blocks=POOL_BLOCKS)
        configs = candidates(shape)
        timed = [(time_config(storage, bucket, config, shape), config) for config in configs]
        ranked = sorted((spent, config) for spent, config in timed if spent is not None)
        default = timed[0][0] or float("nan")
        best, config = ranked[0]
        tree = make_bucket(shape, tree=True, num_blocks=POOL_BLOCKS)
        masked = time_config(storage, tree, config, shape) or float("nan")
        print(
            f"B={shape.batch:<3} N={shape.nodes:<3} ctx={shape.context:<5} "
            f"{shape.kv_bytes / 1e6:6.1f} MB default {default * 1e6:6.1f} us "
            f"best {best * 1e6:6.1f} us {shape.kv_bytes / best / 1e9:5.0f} GB/s "
            f"tree {masked * 1e6:6.1f} us {tuple(config)}",
            flush=True,
        )
        if shape == WIDE_TREE:
            for spent, near in ranked[:10]:
                print(f"  {spent * 1e6:6.1f} us {tuple(near)}", flush=True)
        results.append(
            {
                "shape": shape._asdict(),
                "bytes": shape.kv_bytes,
                "default_us": default * 1e6,
                "best_us": best * 1e6,
                "tree_us": masked * 1e6,
                "ranked": [(tuple(config), spent * 1e6) for spent, config in ranked],
            }
        )
    return results


def _write(storage: Tensor, bucket: AttentionBucket, table: Tensor, layer: int) -> Tensor:
    return rotary_write(
        bucket.qkv,
        table,
        bucket.layout.write_slots,
        storage[0, layer % LAYERS],
        storage[1, layer % LAYERS],
        num_heads=HEADS,
        interleaved=True,
    )


def _companions(storage: Tensor, shape: AttentionShape) -> dict[str, Callable[[int], object]]:
    bucket = make_bucket(shape, tree=True, num_blocks=POOL_BLOCKS)
    where = (bucket.context, bucket.tables, bucket.slots)
    inv_freq = 5e5 ** -(torch.arange(0, DIM, 2, device="cuda") / DIM)
    table = rotary_table(bucket.layout.positions, inv_freq)
    hidden = torch.randn(shape.batch * shape.nodes, HIDDEN, device="cuda").bfloat16()
    # Half of the nodes are accepted, each one place after where it belongs.
    count, nodes = max(shape.nodes // 2, 1), shape.nodes
    rows = torch.arange(nodes, device="cuda", dtype=torch.int32).repeat(shape.batch, 1)
    rows[:, 1:count] += 1
    counts = torch.full_like(bucket.context, count)
    write = functools.partial(_write, storage, bucket, table)
    read = functools.partial(attend, storage, bucket, None, shape)
    return {
        "tree_layout": lambda _: tree_layout(
            bucket.parents, *where, num_nodes=nodes, block_tokens=BLOCK_TOKENS
        ),
        "rotary_table": lambda _: rotary_table(bucket.layout.positions, inv_freq),
        "gather_rows": lambda _: gather_rows(hidden, rows, num_nodes=nodes),
        "compact_kv": lambda _: compact_kv(
            storage, rows, counts, *where, block_tokens=BLOCK_TOKENS
        ),
        "rotary_write": write,
        "rotary + attention": lambda layer: (write(layer), read(layer)),
    }


def time_companions(storage: Tensor) -> dict[str, float]:
    """Return the microseconds of each kernel around attention, and of rotary embedding followed by
    attention, by kernel and shape."""
    results: dict[str, float] = {}
    for shape in COMPANIONS:
        name = f"B={shape.batch} N={shape.nodes}"
        steps = _companions(storage, shape)
        spent = {step: seconds(run, LAYERS, replays=5) * 1e6 for step, run in steps.items()}
        print(name, "us:", "; ".join(f"{k} {us:.2f}" for k, us in spent.items()), flush=True)
        results |= {f"{step} {name}": us for step, us in spent.items()}
    return results


def main() -> None:
    """Check, measure and print a report. The exit status is not 0 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--budget", type=float, default=50.0, help="seconds for the sweep")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        compile_all(TIMED)
        storage = _make_storage(LAYERS, POOL_BLOCKS)
        report: dict[str, Any] = {"errors": check(storage)}
        report["companions_us"] = time_companions(storage)
        report["attention"] = sweep(storage, args.budget)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = [name for name, error in report["errors"].items() if not error < BOUND]
    raise SystemExit(f"wrong: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
