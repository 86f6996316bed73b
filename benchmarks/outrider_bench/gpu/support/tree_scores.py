"""Draft trees ranked by bfloat16 products of probabilities, compared with sums of log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from outrider_drafter.proposers import tree_growth as drafter_growth
from outrider_drafter.proposers.tree_growth import BeamGrowth

from outrider.process_tuning import run_event_loop as run_loop
from outrider.spec.tree import ROOT
from outrider_bench.gpu.plain import sized
from outrider_bench.gpu.support.benchmark_context import Bench
from outrider_bench.gpu.support.load_driver import drive_sessions
from outrider_bench.gpu.support.services import INPROC, ServingSetup, serve_models
from outrider_bench.prompts import is_loop

CERTAIN = 0.9985
"""Probability of each node of a test chain. It is less than 1 but is 1 when rounded to bfloat16,
whose step below 1 is 1/256."""
DEPTH = 12
NODES, TOP_K = 16, 4
PROMPTS = 12
MAX_TOKENS = 64


def torn_tree(sums: bool) -> dict[str, int]:
    """Return two counts for a chain of nearly certain nodes of which the better half is kept: how
    many scores are distinct (`distinct`), and how many kept nodes lack an ancestor (`torn`).

    Scores are sums of log-probs in float32 if `sums` is set, else products of probabilities in
    bfloat16. Nodes with equal scores may be kept in any order. The worst order, deepest first, is
    assumed.
    """
    if sums:
        step = torch.log(torch.tensor(CERTAIN, dtype=torch.float32))
        scores = torch.cumsum(step.expand(DEPTH), 0)
    else:
        step = torch.tensor(CERTAIN, dtype=torch.bfloat16)
        scores = torch.cumprod(step.expand(DEPTH), 0, dtype=torch.bfloat16)
    order = sorted(range(DEPTH), key=lambda node: (-float(scores[node]), -node))
    kept = set(order[: DEPTH // 2])
    torn = sum(any(above not in kept for above in range(node)) for node in kept)
    return {"distinct": len(set(scores.tolist())), "torn": torn}


class ProductGrowth(BeamGrowth):
    """Tree growth that ranks nodes by bfloat16 products of probabilities. Of nodes with equal
    products the parent comes before the child, so that trees stay connected."""

    def __init__(self, *, num_nodes: int, top_k: int, depth: int) -> None:
        super().__init__(num_nodes=num_nodes, top_k=top_k, depth=depth)
        self.products: list[float] = []
        """Product of probabilities of each candidate, in the order of the candidates."""

    def _best(self) -> list[int]:
        for node in range(len(self.products), len(self._scores)):
            parent = int(self._parents[node])
            above, below = (0.0, 1.0) if parent == ROOT else self._at(parent)
            own = _bfloat16(float(np.exp(self._scores[node] - above)))
            self.products.append(_bfloat16(below * own))
        order = np.argsort(-np.asarray(self.products), kind="stable")[: self._num_nodes]
        return [int(i) for i in order if self.products[i] > 0.0]

    def _at(self, node: int) -> tuple[float, float]:
        return float(self._scores[node]), self.products[node]


def _bfloat16(value: float) -> float:
    return float(torch.tensor(value).to(torch.bfloat16))


def tree_acceptance(bench: Bench) -> dict[str, dict[str, object]]:
    """Return the tokens per round of the real model with greedy trees that are ranked by "products"
    and by "sums". Answers that loop are left out."""
    models = bench.real()
    setup = sized(bench, ServingSetup(placement=INPROC, draft_length=NODES, top_k=TOP_K))
    prompts = bench.prompts()[:PROMPTS]

    async def measure() -> dict[str, object]:
        limit = min(4, setup.max_sessions)
        async with serve_models(models, replace(setup, max_sessions=limit)) as running:
            wave = await drive_sessions(
                running,
                prompts,
                min(MAX_TOKENS, bench.output_tokens),
                stop_ids=bench.stop_ids,
                concurrency=limit,
            )
        clean = [stream for stream in wave.streams if not is_loop(stream.tokens)]
        rounds = sum(stream.stats.rounds for stream in clean)
        emitted = sum(stream.stats.emitted for stream in clean)
        mean = round(emitted / rounds, 4) if rounds else None
        return {"emitted_per_round": mean, "answers": len(clean)}

    with _growth(ProductGrowth):
        products = run_loop(measure())
    return {"products": products, "sums": run_loop(measure())}


@contextmanager
def _growth(kind: type[BeamGrowth]) -> Iterator[None]:
    """Make drafters of this process grow trees by `kind`."""
    original = drafter_growth.BeamGrowth
    drafter_growth.BeamGrowth = kind  # type: ignore[misc]
    try:
        yield
    finally:
        drafter_growth.BeamGrowth = original  # type: ignore[misc]
