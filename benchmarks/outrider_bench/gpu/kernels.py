"""Kernel times compared with the memory traffic bound, in the random-weight model's shapes.

Each call uses another copy of the weights; all copies together are larger than the device's L2
cache. In the table, `share` is the time in which the device copies the same number of bytes,
divided by the measured time.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.kernels.attention.rotary import rotary_table, rotary_write
from outrider.engine.kernels.attention.tree import tree_attention
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.linear.fused import fused_linear
from outrider.engine.kernels.linear.qkv import rotary_qkv
from outrider.engine.kernels.norm import rms_norm
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.session_tensors import NUM_STREAMS, RULE_COUPLED, SamplingState
from outrider_bench.gpu.support.benchmark_context import Bench, show
from outrider_bench.gpu.support.machine import DEVICE_COPY_BYTES_S
from outrider_bench.gpu.support.random_model import SHAPES
from outrider_bench.gpu.support.steps import timed_ms

CACHE_BYTES = 256 << 20
"""Minimum total size of all copies of a kernel's operands, in bytes, so that they do not fit the
device's L2 cache."""
ROWS = (1, 8, 64, 256)
CONTEXTS = (512, 4096)
BLOCK_TOKENS = 16
TREE_NODES = {1: (1, 8, 64), 8: (1, 8), 64: (1, 8)}
"""Numbers of nodes per session to measure, by number of sessions."""

Case = tuple[str, str, int, list[Callable[[], object]]]
"""One kernel to time: its name, the shape, the bytes that one call moves, and calls with different
operands."""


def run(bench: Bench) -> dict[str, object]:
    """Time every kernel and return the result for the JSON file."""
    config = SHAPES[bench.args.shape]
    rows, found = [], []
    for make in (_products, _attention, _choosing, _small):
        for name, shape, size, calls in make(bench, config):
            us = _time_us(bench, calls)
            share = size / DEVICE_COPY_BYTES_S * 1e6 / us
            rows.append((name, shape, f"{size / 1e6:.2f}", us, f"{share:.2f}"))
            fact = {"kernel": name, "shape": shape, "bytes": size, "us": us}
            found.append({**fact, "share_of_copy_rate": round(share, 4)})
    show("kernels", ("kernel", "shape", "MB", "us", "share"), rows)
    return bench.result("kernels", None, shape=bench.args.shape, kernels=found)


def _time_us(bench: Bench, calls: list[Callable[[], object]]) -> float:
    def each() -> None:
        for call in calls:
            call()

    times = timed_ms(each, bench.device, repeats=bench.repeats, graphs=bench.args.graphs)
    return round(median(times) * 1000.0 / len(calls), 3)


def _copies(bench: Bench, size: int) -> int:
    return 1 if bench.device.type != "cuda" else max(2, -(-CACHE_BYTES // size))


def _normal(bench: Bench, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=bench.dtype, device=bench.device).normal_(std=0.5)


def _products(bench: Bench, config: ModelConfig) -> list[Case]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes = {
        "norm, qkv, rotary, KV write": (query + 2 * kv, hidden, "heads"),
        "o_proj + residual": (hidden, query, "residual"),
        "norm, gate-up, silu": (2 * inner, hidden, "gated"),
        "down + residual": (hidden, inner, "residual"),
    }
    cases: list[Case] = []
    for name, (out, width, kind) in shapes.items():
        size = out * width * bench.dtype.itemsize
        weights = [_normal(bench, out, width) for _ in range(_copies(bench, size))]
        for count in ROWS:
            calls = [_product(bench, config, weight, count, kind) for weight in weights]
            moved = size + count * (out + width) * bench.dtype.itemsize
            cases.append((f"linear: {name}", f"{count} x {width} -> {out}", moved, calls))
    return cases


def _product(
    bench: Bench, config: ModelConfig, weight: Tensor, count: int, kind: str
) -> Callable[[], object]:
    out, width = weight.shape
    x = _normal(bench, count, width)
    if kind == "heads":
        return _heads(bench, config, x, weight)
    extra: dict[str, Any] = {}
    if kind == "residual":
        extra["residual"] = _normal(bench, count, out)
    else:
        extra |= {"norm_weight": _normal(bench, width), "eps": 1e-5, "gated": True}
    return lambda: fused_linear(x, weight, **extra)


def _heads(bench: Bench, config: ModelConfig, x: Tensor, weight: Tensor) -> Callable[[], object]:
    norm = _normal(bench, x.shape[1])
    cache = _normal(bench, 2, config.num_kv_heads, max(ROWS), config.head_dim)
    positions = torch.arange(len(x), dtype=torch.int32, device=bench.device)
    table = rotary_table(positions, torch.ones(config.head_dim // 2, device=bench.device))
    write = positions.long()
    return lambda: rotary_qkv(
        rms_norm(x, norm, 1e-5),
        weight,
        table,
        write,
        cache[0],
        cache[1],
        num_heads=config.num_heads,
        interleaved=True,
    )


def _attention(bench: Bench, config: ModelConfig) -> list[Case]:
    groups, dim = config.num_kv_heads, config.head_dim
    cases: list[Case] = []
    for batch in (b for b in TREE_NODES if b <= max(bench.batches)):
        for context in CONTEXTS:
            blocks = -(-(context + max(TREE_NODES[batch])) // BLOCK_TOKENS)
            slots = batch * blocks * BLOCK_TOKENS
            size = 2 * batch * groups * context * dim * bench.dtype.itemsize
            if size > 4 << 30:
                continue
            copies = min(_copies(bench, size), 32)
            caches = [_normal(bench, 2, groups, slots, dim) for _ in range(copies)]
            tables = torch.randperm(batch * blocks).int().view(batch, blocks).to(bench.device)
            for nodes in TREE_NODES[batch]:
                calls = [_attend(config, cache, tables, context, nodes) for cache in caches]
                cases.append(("tree attention", f"{batch} x {nodes}, {context}", size, calls))
    return cases


def _attend(
    config: ModelConfig, cache: Tensor, tables: Tensor, context: int, nodes: int
) -> Callable[[], object]:
    batch, device = tables.shape[0], cache.device
    q = torch.randn(batch * nodes, config.num_heads, config.head_dim, device=device)
    q = q.to(cache.dtype)
    mask = torch.ones(batch, nodes, nodes, dtype=torch.uint8, device=device).tril()
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    return lambda: tree_attention(
        q,
        cache[0],
        cache[1],
        tables=tables,
        slots=slots,
        context=lengths,
        num_nodes=nodes,
        mask=mask,
        block_tokens=BLOCK_TOKENS,
        positions=None,
        max_len=tables.shape[1] * BLOCK_TOKENS,
    )


def _choosing(bench: Bench, config: ModelConfig) -> list[Case]:
    cases: list[Case] = []
    for count in (1, 8, 64):
        logits = torch.randn(count, config.vocab_size, device=bench.device)
        slots = torch.arange(count, dtype=torch.int32, device=bench.device)
        state = SamplingState(
            stream_keys=torch.arange(count * NUM_STREAMS, device=bench.device).view(count, -1),
            temperatures=torch.full((count,), 0.8, device=bench.device),
            rules=torch.full((count,), RULE_COUPLED, dtype=torch.int32, device=bench.device),
        )
        shape = f"{count} x {config.vocab_size}"
        for name, fn in _choosers(logits, state, slots).items():
            cases.append((name, shape, logits.nbytes, [fn]))
    return cases


def _choosers(
    logits: Tensor, state: SamplingState, slots: Tensor
) -> dict[str, Callable[[], object]]:
    greedy = state._replace(
        temperatures=torch.zeros_like(state.temperatures), rules=torch.zeros_like(state.rules)
    )

    def choose(how: SamplingState) -> Callable[[], object]:
        return lambda: choose_tokens(
            logits, how, slots, slots, rows_per_slot=1, side="target", ids=None
        )

    return {
        "argmax": choose(greedy),
        "perturb and argmax": choose(state),
        "log-softmax, top 8": lambda: log_softmax_topk(logits, 8, temperatures=None),
    }


def _small(bench: Bench, config: ModelConfig) -> list[Case]:
    cases: list[Case] = []
    heads, groups, dim = config.num_heads, config.num_kv_heads, config.head_dim
    frequencies = torch.ones(dim // 2, device=bench.device)
    for count in (1, 64):
        x, weight = _normal(bench, count, config.hidden_size), _normal(bench, config.hidden_size)
        qkv = _normal(bench, count, heads + 2 * groups, dim)
        cache = _normal(bench, 2, groups, 256, dim)
        positions = torch.arange(count, dtype=torch.int32, device=bench.device)
        table = rotary_table(positions, frequencies)
        write = positions.long()

        def norm(x: Tensor = x, weight: Tensor = weight) -> object:
            return rms_norm(x, weight, 1e-5)

        def rotary(
            qkv: Tensor = qkv, table: Tensor = table, write: Tensor = write, cache: Tensor = cache
        ) -> object:
            return rotary_write(
                qkv, table, write, cache[0], cache[1], num_heads=heads, interleaved=True
            )

        cases.append(("RMSNorm", f"{count} x {config.hidden_size}", 2 * x.nbytes, [norm]))
        cases.append(("rotary and KV write", f"{count} rows", 2 * qkv.nbytes, [rotary]))
    return cases
