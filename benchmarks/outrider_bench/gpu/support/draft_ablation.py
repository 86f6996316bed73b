"""Ablation of whole drafts: product-ranked trees, and chains chosen after a softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider_bench.gpu.support.benchmark_context import Bench, show
from outrider_bench.gpu.support.machine import DEVICE_COPY_BYTES_S
from outrider_bench.gpu.support.random_model import head_shape, random_head
from outrider_bench.gpu.support.services import LoadedModels
from outrider_bench.gpu.support.steps import DraftBench, kernel_names

CHAIN: Final = 5
NEW_ROWS: Final = CHAIN + 1
CHAIN_SESSIONS: Final = (1, 8, 64)
TREE_SESSIONS: Final = (1, 8)
TREE: Final = {"num_nodes": 60, "top_k": 10, "depth": 6}
"""Tree size that EAGLE-3 uses."""


def chains_by_choice(bench: Bench) -> list[dict[str, Any]]:
    """Measure draft steps and chains of five draft tokens. Each token is chosen by argmax, with or
    without a softmax before it.

    Returns a dict of figures for each head and number of sessions. One head has the usual draft
    vocabulary, the other one the target's vocabulary. The time of a step is computed as in
    `outrider_bench.gpu.draft`.
    """
    found = [*_chains(bench, bench.random()), *_chains(bench, _whole_vocabulary(bench.random()))]
    title = f"idea 2: a catch-up on {NEW_ROWS} rows, a chain of {CHAIN}"
    show(title, tuple(found[0]), [tuple(row.values()) for row in found])
    return found


def trees_by_score(bench: Bench) -> list[dict[str, Any]]:
    """Time a draft head that reads newly accepted tokens (the catch-up) and then drafts a tree. It
    chooses the nodes of the tree with the highest scores. Two scores are compared: the sum of the
    log-probs on the path from the root, and the product of the probabilities.

    Returns a dict of figures for each number of sessions."""
    sessions = _at_most(bench, TREE_SESSIONS)
    found = []
    with closing(DraftBench(bench, bench.random(), max_rows=max(sessions))) as draft:
        for count in sessions:
            facts: dict[str, Any] = {"sessions": count}
            run = draft.tree(count, new_rows=NEW_ROWS, **TREE)
            for name in ("sums", "products"):
                with scores_by(name):
                    facts[f"{name}_ms"] = round(draft.median_ms(run), 4)
                    facts[f"{name}_kernels"] = len(kernel_names(run, bench.device))
            found.append(facts)
    title = "idea 1: a catch-up on {} rows, a tree of {num_nodes} nodes, depth {depth}"
    show(title.format(NEW_ROWS, **TREE), tuple(found[0]), [tuple(row.values()) for row in found])
    return found


def _chains(bench: Bench, models: LoadedModels) -> list[dict[str, Any]]:
    assert models.head is not None
    sessions = _at_most(bench, CHAIN_SESSIONS)
    found = []
    with closing(DraftBench(bench, models, max_rows=max(sessions))) as draft:
        weights = draft.weights
        read = (weights.qkv, weights.o_proj, weights.gate_up, weights.down, weights.lm_head)
        floor = sum(tensor.nbytes for tensor in read) / DEVICE_COPY_BYTES_S * 1e3
        for count in sessions:
            facts: dict[str, Any] = {
                "draft_vocab": models.head.config.draft_vocab_size,
                "sessions": count,
                "floor_ms": round(floor, 4),
            }
            for name in ("softmax", "argmax"):
                with choices_by(draft, name):
                    facts |= _chain_facts(bench, draft, count, name)
            found.append(facts)
    return found


def _chain_facts(bench: Bench, draft: DraftBench, count: int, name: str) -> dict[str, Any]:
    one = draft.median_ms(draft.chain(count, 1, new_rows=NEW_ROWS))
    run = draft.chain(count, CHAIN, new_rows=NEW_ROWS)
    whole = draft.median_ms(run)
    return {
        f"{name}_step_ms": round((whole - one) / (CHAIN - 1), 4),
        f"{name}_chain5_ms": round(whole, 4),
        f"{name}_kernels": len(kernel_names(run, bench.device)),
    }


def _whole_vocabulary(models: LoadedModels) -> LoadedModels:
    """Return the same target with a random head whose draft vocabulary is the target's
    vocabulary."""
    target = models.target
    with torch.inference_mode():
        shape = head_shape(target.config, target.config.vocab_size)
        head, projection = random_head(shape, target.embedding)
    return replace(models, head=head, projection=projection)


@contextmanager
def choices_by(draft: DraftBench, name: str) -> Iterator[None]:
    """Context in which drafts choose tokens from softmax probabilities if `name` is "softmax". For
    other names they choose from logits as usual."""
    logits: Callable[[Tensor], Tensor] = draft.program.forward.logits

    def probabilities(x: Tensor) -> Tensor:
        return logits(x).float().softmax(dim=-1)

    chosen = probabilities if name == "softmax" else logits
    with mock.patch.object(draft.program.forward, "logits", chosen):
        yield


@contextmanager
def scores_by(name: str) -> Iterator[None]:
    """Context in which trees score candidates by probability if `name` is "products". For other
    names they use log-probs as usual.

    Trees still add the scores up. This is wrong for probabilities, but does not affect the time.
    """

    def products(logits: Tensor, k: int, *, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        best = logits.float().softmax(dim=-1).topk(k)
        return best.values, best.indices.int()

    chosen = products if name == "products" else log_softmax_topk
    with mock.patch("outrider.engine.device.drafting.draft_program.log_softmax_topk", chosen):
        yield


def _at_most(bench: Bench, sessions: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count for count in sessions if count <= max(bench.batches))
