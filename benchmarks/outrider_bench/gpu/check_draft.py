"""Drafting by itself: steps, catch-ups and trees of an 8B-shaped EAGLE-3 head.

`python -m outrider_bench.gpu.check_draft [--out FILE]` on the device. Weights are random and larger
than the L2, the context is 512 rows a session, every figure is the mean of a burst of replays of
one CUDA graph. Floors are the bytes of weights over the rate of a device copy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from outrider.engine.device import draft as draft_module
from outrider.engine.device.draft import DraftProgram, NewRows
from outrider.engine.device.graphs import GraphCache
from outrider.engine.device.head_weights import HeadWeights
from outrider.engine.heads import HeadConfig
from outrider.engine.kernels.state import SamplingState
from outrider_bench.gpu.random_model import LLAMA_8B, head_shape, random_head
from outrider_bench.report import say, table

COPY_BYTES_S: Final = 4.3e12
CONTEXT: Final = 512
BLOCK: Final = 16
BATCHES: Final = (1, 8, 32, 64)
VOCABULARIES: Final = (32_000, 128_256)
DEAD_LENGTHS: Final = (3, 5, 7)
TREE_NODES: Final = 60
TREE_TOP_K: Final = 10
TREE_DEPTH: Final = 6
_REPLAYS: Final = 30


class SoftmaxProgram(DraftProgram):
    """Drafts from probabilities: what a chain would cost without the bare argmax."""

    def logits(self, x: Tensor) -> Tensor:
        """softmax of the logits, float32."""
        return super().logits(x).float().softmax(dim=-1)


class Setting:
    """A head and sessions of CONTEXT rows with random K/V."""

    def __init__(self, config: HeadConfig, device: torch.device) -> None:
        self.device, self.config = device, config
        shape = (config.vocab_size, config.hidden_size)
        embedding = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
        head, _ = random_head(config, embedding)
        self.weights = HeadWeights.from_head(head)
        blocks, most = CONTEXT // BLOCK + 8, max(BATCHES)
        storage = torch.randn(
            (2, 1, config.num_kv_heads, (most * blocks + 1) * BLOCK, config.head_dim),
            device=device,
            dtype=torch.bfloat16,
        )
        tables = torch.randperm(most * blocks, device=device).view(most, blocks)
        self.tables = torch.nn.functional.pad(tables, (0, 0, 0, 1), value=most * blocks).int()
        self.programs: dict[type[DraftProgram], DraftProgram] = {
            kind: kind(self.weights, storage=storage, block_tokens=BLOCK, max_len=blocks * BLOCK)
            for kind in (DraftProgram, SoftmaxProgram)
        }
        self.state = SamplingState(
            seeds=torch.zeros(most + 1, dtype=torch.int64, device=device),
            temperatures=torch.zeros(most + 1, device=device),
            rules=torch.zeros(most + 1, dtype=torch.int32, device=device),
        )

    def rows(self, batch: int, new: int) -> NewRows:
        """`new` rows a session, so that the live one is the context's last."""
        generator = torch.Generator(self.device).manual_seed(batch * 100 + new)

        def full(value: int) -> Tensor:
            return torch.full((batch,), value, dtype=torch.int32, device=self.device)

        shape, device = (batch, new), self.device
        return NewRows(
            slots=torch.arange(batch, dtype=torch.int32, device=device),
            tables=self.tables,
            tokens=torch.randint(
                self.config.vocab_size, shape, device=device, generator=generator
            ).int(),
            features=torch.randn(
                (*shape, self.config.hidden_size),
                device=device,
                generator=generator,
                dtype=torch.bfloat16,
            ),
            counts=full(new),
            starts=full(CONTEXT - new),
        )

    def chain(
        self,
        rows: NewRows,
        length: int,
        *,
        prune: bool = True,
        kind: type[DraftProgram] = DraftProgram,
    ) -> Tensor:
        """Tokens of chains."""
        program = self.programs[kind]
        return program.chain(*rows, state=self.state, length=length, prune=prune).tokens

    def tree(self, rows: NewRows) -> tuple[Tensor, ...]:
        """Trees of the size that EAGLE-3 uses."""
        return self.programs[DraftProgram].tree(
            *rows,
            state=self.state,
            num_nodes=TREE_NODES,
            top_k=TREE_TOP_K,
            depth=TREE_DEPTH,
        )

    @property
    def step_bytes(self) -> int:
        """Weights that one draft step reads."""
        w = self.weights
        return sum(t.nbytes for t in (w.qkv, w.o_proj, w.gate_up, w.down, w.lm_head))


def replay_ms(run: Callable[[], object]) -> float:
    """Mean milliseconds of a replay of `run` as one graph."""
    graphs = GraphCache(torch.device("cuda"))
    graphs.run(0, run)
    graphs.run(0, run)
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(_REPLAYS):
        graphs.run(0, run)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / _REPLAYS


def num_kernels(run: Callable[[], object]) -> int:
    """Kernels that `run` launches, by the profiler."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(str(event.device_type).endswith("CUDA") for event in profile.events() or ())


def steps(setting: Setting) -> list[dict[str, Any]]:
    """A step, and a catch-up on six rows with a chain of five, by sessions."""
    floor = setting.step_bytes / COPY_BYTES_S * 1e3
    found = []
    for batch in BATCHES:
        rows = setting.rows(batch, 6)
        one, five, nine = (replay_ms(partial(setting.chain, rows, length)) for length in (1, 5, 9))
        step = (nine - one) / 8
        found.append(
            {
                "sessions": batch,
                "step_ms": round(step, 4),
                "x_floor": round(step / floor, 2),
                "catch_up_chain1_ms": round(one, 4),
                "catch_up_chain5_ms": round(five, 4),
                "x_floor_5": round(five / (5 * floor), 2),
            }
        )
    return found


def dead_rows(setting: Setting) -> list[dict[str, Any]]:
    """Idea 3: catch-ups whose dead rows stop after their K/V write, or do not."""
    program, found = setting.programs[DraftProgram], []
    for length in DEAD_LENGTHS:
        for batch in (1, 8, 64):
            rows = setting.rows(batch, length + 1)
            whole, pruned = (
                replay_ms(partial(program.catch_up, *rows, prune=prune)) for prune in (False, True)
            )
            drafts = [setting.chain(rows, length, prune=prune) for prune in (False, True)]
            same = (drafts[0] == drafts[1]).all(dim=1).float().mean()
            found.append(
                {
                    "drafts": length,
                    "sessions": batch,
                    "whole_ms": round(whole, 4),
                    "pruned_ms": round(pruned, 4),
                    "ratio": round(whole / pruned, 3),
                    "equal_chains": round(float(same), 3),
                }
            )
    return found


def argmax(setting: Setting) -> list[dict[str, Any]]:
    """Idea 2: steps and chains of five that choose by a bare argmax, or after a softmax."""
    found = []
    for batch in (1, 8, 64):
        rows = setting.rows(batch, 6)
        figures: dict[str, Any] = {
            "draft_vocab": setting.config.draft_vocab_size,
            "sessions": batch,
        }
        for name, kind in (("softmax", SoftmaxProgram), ("argmax", DraftProgram)):
            one, five = (
                replay_ms(partial(setting.chain, rows, length, kind=kind)) for length in (1, 5)
            )
            figures[f"{name}_step_ms"] = round((five - one) / 4, 4)
            figures[f"{name}_chain5_ms"] = round(five, 4)
            figures[f"{name}_kernels"] = num_kernels(partial(setting.chain, rows, 5, kind=kind))
        found.append(figures)
    return found


def _products(logits: Tensor, k: int, *, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Candidates by probability; what their products mean does not matter for the time."""
    best = logits.float().softmax(dim=-1).topk(k)
    return best.values, best.indices.int()


def trees(setting: Setting) -> list[dict[str, Any]]:
    """Idea 1: trees by sums of log-probs, or by products of probabilities."""
    found = []
    for batch in (1, 8):
        rows = setting.rows(batch, 6)
        sums = replay_ms(partial(setting.tree, rows))
        sum_kernels = num_kernels(partial(setting.tree, rows))
        with mock.patch.object(draft_module, "log_softmax_topk", _products):
            products = replay_ms(partial(setting.tree, rows))
            kernels = num_kernels(partial(setting.tree, rows))
        found.append(
            {
                "sessions": batch,
                "sums_ms": round(sums, 4),
                "products_ms": round(products, 4),
                "sums_kernels": sum_kernels,
                "products_kernels": kernels,
            }
        )
    return found


def report(title: str, rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    say(f"\n{title}\n" + table(tuple(rows[0]), [tuple(row.values()) for row in rows]))


@torch.inference_mode()
def measure() -> dict[str, Any]:
    """Everything."""
    device = torch.device("cuda", torch.cuda.current_device())
    results: dict[str, Any] = {}
    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    arguments: list[dict[str, Any]] = []
    for vocabulary in VOCABULARIES:
        setting = Setting(head_shape(LLAMA_8B, vocabulary), device)
        floor = setting.step_bytes / COPY_BYTES_S * 1e3
        say(f"draft vocabulary {vocabulary}: {setting.step_bytes / 1e6:.0f} MB, {floor:.3f} ms")
        results[f"floor_ms_{vocabulary}"] = round(floor, 4)
        if vocabulary == VOCABULARIES[0]:
            for title, part in (("steps", steps), ("dead rows", dead_rows), ("trees", trees)):
                results[title] = part(setting)
                report(title, results[title])
        arguments += argmax(setting)
        del setting
        torch.cuda.empty_cache()
    results["argmax"] = arguments
    report("argmax", arguments)
    return results


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Time an EAGLE-3 head's drafting.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    out: Path | None = parser.parse_args().out
    results = measure()
    if out is not None:
        out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
