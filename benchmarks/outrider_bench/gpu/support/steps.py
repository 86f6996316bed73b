"""Device times of single parts of a round: the verify graph and the draft graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.draft_program import ChainDraft, DraftProgram
from outrider.engine.device.drafting.eagle_weights import HeadWeights
from outrider.engine.device.drafting.in_process_drafter import InProcessDrafter
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.graphs.shapes import AcceptanceMode, DraftKind
from outrider.engine.device.inputs.round_rows import RoundRow, RoundRows
from outrider.engine.kernels.drafts.tree_rank import TreeDraft
from outrider.engine.kv_cache import KVSequence
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import ROOT, DraftTree
from outrider_bench.gpu.support.benchmark_context import Bench
from outrider_bench.gpu.support.services import (
    COLOCATED,
    PLAIN,
    LoadedModels,
    ServingSetup,
    make_runner,
    release_runner,
    verifier_config,
)

_ROOM = 80
"""KV slots beyond the longest prefix, for the largest tree and for tokens that repeats emit."""
_CHAIN_NODES = 8
"""Maximum number of nodes of a row that verifies a chain; larger rows verify a tree."""
_LONGEST_CHAIN = 8
"""Maximum number of draft tokens of a session."""


def timed_ms(
    fn: Callable[[], object], device: torch.device, *, repeats: int, graphs: bool = True
) -> list[float]:
    """Return the milliseconds of each of `repeats` runs of `fn`.

    On a CUDA device they are measured with events, and `fn` is replayed from a CUDA graph if
    `graphs` is set. Otherwise they are wall times of plain calls.
    """
    cache = GraphCache(device, enabled=graphs)

    def body() -> tuple[()]:
        fn()
        return ()

    def once() -> None:
        cache.run_graph("timed", body)

    with torch.inference_mode():
        for _ in range(3):
            once()
        if device.type != "cuda":
            return [_wall_ms(once) for _ in range(repeats)]
        torch.cuda.synchronize()
        event: Any = torch.cuda.Event
        events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
        for start, end in events:
            start.record()
            once()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]


def kernel_names(fn: Callable[[], object], device: torch.device) -> list[str]:
    """Return the names of the kernels that one call launches, without copies; an empty list without
    a CUDA device."""
    if device.type != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        fn()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            fn()
            torch.cuda.synchronize()
    return [
        str(event.name)
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA" and not str(event.name).startswith(("Memcpy", "Memset"))
    ]


def _wall_ms(fn: Callable[[], None]) -> float:
    began = time.perf_counter()
    fn()
    return (time.perf_counter() - began) * 1000.0


class VerifyBench:
    """Times verification rounds, including LM head and acceptance, of sessions with a given context
    length."""

    def __init__(
        self, models: LoadedModels, *, max_rows: int, max_tokens: int, graphs: bool
    ) -> None:
        self._models = models
        setup = ServingSetup(
            placement=PLAIN,
            max_sessions=max_rows,
            max_tokens=max_tokens,
            cuda_graphs=graphs,
            record=True,
        )
        config = verifier_config(models, setup)
        self._max_tokens = max_tokens
        self._runner: Any
        self._runner, self._recorder = make_runner(models, setup, config)
        self._random = np.random.default_rng(0)

    def time_ms(self, rows: int, nodes: int, context: int, *, repeats: int) -> list[float]:
        """Return the milliseconds of each of `repeats` verification rounds of `rows` sessions with
        `nodes` nodes (the root and draft tokens) and `context` tokens each.

        The context grows by the tokens that a round emits, which is nearly always one.
        """
        slots, rounds, pool = self._runner._slots, self._runner.rounds, self._models.target.pool
        length = self._max_tokens + _ROOM
        sequences: list[KVSequence] = [pool.allocate(length) for _ in range(rows)]
        places = [slots.open_slot(sequence) for sequence in sequences]
        try:
            for place, sequence in zip(places, sequences, strict=True):
                slots.begin_session(place, sequence, SamplingParams(), length=context + 1, root=5)
            slots.upload_changes()
            inputs = RoundRows.of_rows([RoundRow(place, self._tree(nodes)) for place in places])
            drafts = DraftKind.NONE if nodes == 1 else DraftKind.CHAIN
            if nodes > _CHAIN_NODES:
                drafts = DraftKind.TREE

            def launch() -> None:
                rounds.launch_round(
                    inputs, drafts=drafts, judge=AcceptanceMode.MATCH, features=False
                )

            launch()
            launch()
            self._recorder.take_spans()
            if self._models.target.device.type != "cuda":
                return [_wall_ms(launch) for _ in range(repeats)]
            for _ in range(repeats):
                launch()
            return [span.end_ms - span.start_ms for span in self._recorder.take_spans()]
        finally:
            for place, sequence in zip(places, sequences, strict=True):
                slots.close_slot(place)
                sequence.release()

    def close(self) -> None:
        """Free the graphs and the pool's blocks."""
        runner, self._runner = self._runner, None
        release_runner(runner)

    def _tree(self, nodes: int) -> DraftTree | None:
        if nodes == 1:
            return None
        count = nodes - 1
        tokens = self._random.integers(0, self._models.target.vocab_size, count)
        parents = np.arange(-1, count - 1)
        if nodes > _CHAIN_NODES:
            parents = np.array([ROOT if i < 4 else (i - 4) // 2 for i in range(count)])
        logprobs = np.full(count, -0.5)
        return DraftTree(
            tokens.astype(np.int32), parents.astype(np.int32), logprobs.astype(np.float32)
        )


class DraftBench:
    """Times a draft head on sessions with contexts of one length: its catch-up, in which it reads
    newly accepted tokens, and the drafting of chains and trees.

    `chain`, `tree` and `catch_up` return functions to time. Each call of them replaces the
    sessions, so functions that were returned earlier must not be called any more.
    """

    def __init__(self, bench: Bench, models: LoadedModels, *, max_rows: int) -> None:
        assert models.head is not None
        self._models, self._graphs = models, bool(bench.args.graphs)
        self._context, self._repeats = bench.prompt_tokens, bench.repeats
        setup = ServingSetup(
            placement=COLOCATED,
            draft_length=_LONGEST_CHAIN,
            max_sessions=max_rows,
            max_tokens=bench.max_tokens,
            cuda_graphs=self._graphs,
        )
        self._runner: Any
        self._runner, _ = make_runner(models, setup, verifier_config(models, setup))
        self._max_tokens = bench.max_tokens
        self._sequences: list[KVSequence] = []

    @property
    def program(self) -> DraftProgram:
        """`DraftProgram` that runs the head."""
        return self._in_process_drafter.program

    @property
    def weights(self) -> HeadWeights:
        """Weights of the head."""
        return self._in_process_drafter.weights

    @property
    def _in_process_drafter(self) -> InProcessDrafter:
        own: InProcessDrafter = self._runner.in_process_drafter
        return own

    def chain(
        self, rows: int, length: int, *, new_rows: int, prune: bool = True
    ) -> Callable[[], ChainDraft]:
        """Return a function that runs a catch-up on `new_rows` new tokens of each of `rows`
        sessions and drafts a chain of `length` tokens. `prune` has the same meaning as for
        `catch_up`."""
        inputs, state = self._inputs(rows, new_rows), self._runner._slots.sampling
        return partial(self.program.draft_chain, inputs, length=length, state=state, prune=prune)

    def tree(
        self, rows: int, *, new_rows: int, num_nodes: int, top_k: int, depth: int
    ) -> Callable[[], TreeDraft]:
        """Return a function that runs a catch-up on `new_rows` new tokens of each of `rows`
        sessions and drafts a tree."""
        inputs, state = self._inputs(rows, new_rows), self._runner._slots.sampling
        return partial(
            self.program.draft_tree,
            inputs,
            state=state,
            num_nodes=num_nodes,
            top_k=top_k,
            depth=depth,
        )

    def catch_up(self, rows: int, *, new_rows: int, prune: bool) -> Callable[[], Tensor]:
        """Return a function that only runs a catch-up. If `prune`, rows whose output is not needed
        stop after they have written their KV."""
        return partial(self.program.catch_up, self._inputs(rows, new_rows), prune=prune)

    def median_ms(self, fn: Callable[[], object]) -> float:
        """Return the median milliseconds of a function that this class has returned."""
        device = self._models.target.device
        return median(timed_ms(fn, device, repeats=self._repeats, graphs=self._graphs))

    def close(self) -> None:
        """Free the graphs and the pool's blocks."""
        self._release()
        runner, self._runner = self._runner, None
        release_runner(runner)

    def _inputs(self, rows: int, new_rows: int) -> NewRows:
        self._release()
        target, slots, context = self._models.target, self._runner._slots, self._context
        assert self._models.head is not None
        self._sequences = [target.pool.allocate(self._max_tokens) for _ in range(rows)]
        for place, sequence in enumerate(self._sequences):
            slots.begin_session(
                place, sequence, SamplingParams(), length=context + new_rows + 1, root=5
            )
        slots.upload_changes()
        generator = torch.Generator(target.device).manual_seed(0)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(
                low, high, shape, generator=generator, device=target.device, dtype=torch.int32
            )

        width = self._models.head.config.hidden_size
        features = torch.randn(rows, new_rows, width, generator=generator, device=target.device).to(
            target.dtype
        )
        return NewRows(
            slots=torch.arange(rows, dtype=torch.int32, device=target.device),
            tables=slots.sequence.tables,
            tokens=integers(0, target.vocab_size, rows, new_rows),
            features=features,
            counts=integers(new_rows, new_rows + 1, rows),
            starts=integers(context, context + 1, rows),
        )

    def _release(self) -> None:
        for sequence in self._sequences:
            sequence.release()
        self._sequences = []
