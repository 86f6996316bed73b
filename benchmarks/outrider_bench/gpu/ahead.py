"""Cost of look-ahead drafting in a drafter's engine: a draft, then drafts for its outcomes.

Weights are random, because only the cost is measured. It is the wall time from a verdict until the
drafting thread has made the messages that answer it, including the wait for the device.
"""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Final

import numpy as np
import torch
from outrider_drafter.gpu.eagle import GpuEagleProposer
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state.session import VerdictLimits

from outrider.engine.heads import DraftHead
from outrider.ids import SessionId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import Proposals, SessionStart, TensorDtype, Verdict, WireTensor
from outrider.wire.rounds import Verdicts
from outrider_bench.gpu.support.benchmark_context import Bench, show

SHAPES: Final = {"chain 4": (4, 1), "chain 5": (5, 1), "tree 16": (16, 4), "tree 32": (32, 8)}
FAN_OUTS: Final = (16, 32, 64)
PROMPT: Final = 256
MAX_LEN: Final = 2048
STEPS: Final = ("draft", "score", "branch", "both")


class _Session:
    """One session of an engine, with methods that send it verdicts."""

    def __init__(self, engine: DraftEngine, width: int, plan: SpeculationPlan) -> None:
        self._engine, self._width = engine, width
        self._random = np.random.default_rng(0)
        self._length, self._digest = 0, EMPTY_DIGEST
        start = SessionStart(
            handle=0,
            session_id=SessionId("ahead"),
            epoch=0,
            plan=plan,
            sampling=SamplingParams(),
            max_len=MAX_LEN,
            prompt_len=PROMPT,
        )
        engine.handle_message(1, start)
        self.emit(self._random.integers(0, 300, PROMPT + 1))

    @property
    def is_over(self) -> bool:
        """Whether the session is too long for more rounds."""
        return self._length > MAX_LEN - 64

    def emit(self, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Send the engine a verdict with these tokens."""
        first = max(self._length - 1, 0)
        rows = self._length + len(tokens) - 1 - first
        features = self._random.integers(15000, 16000, (rows, self._width)).astype(np.uint16)
        for token in tokens.tolist():
            self._digest = extend_digest(self._digest, [token])
        verdict = Verdict(
            handle=0,
            start=self._length,
            tokens=tokens.astype(np.int32),
            prefix_digest=self._digest,
            feature_start=first,
            features=WireTensor(dtype=TensorDtype.BFLOAT16, data=features),
            draft_wanted=True,
        )
        self._length += len(tokens)
        self._engine.handle_message(1, Verdicts.of_verdicts([verdict]))

    def round(self) -> dict[str, float]:
        """Send a verdict that look-ahead has not drafted for, let the engine draft and then look
        ahead. Return the seconds of each step."""
        took: dict[str, float] = {}
        began = time.perf_counter()
        self.emit(self._random.integers(0, 300, 3))
        for _ in self._engine.draft_wanted():
            took["draft"] = time.perf_counter() - began
        began = last = time.perf_counter()
        for answers in self._engine.run_look_ahead():
            sent = [message for _, message in answers if isinstance(message, Proposals)]
            now = time.perf_counter()
            name = "branch" if sent else "score"
            took[name] = took.get(name, 0.0) + now - last
            last = now
        took["both"] = last - began
        self._engine.update_metrics()
        return took


def run(bench: Bench) -> dict[str, object]:
    """Measure every draft shape and fan-out with one session and return the result for the JSON
    file."""
    models = bench.random()
    head = models.head
    assert head is not None
    source = GpuEagleProposer(
        head,
        max_rows=8 * MAX_LEN,
        max_context=MAX_LEN,
        max_sessions=8,
        dtype=bench.dtype,
        device=bench.device,
        cuda_graphs=bench.args.graphs and bench.device.type == "cuda",
        bounded=True,
    )
    rows, table = [], {}
    with torch.inference_mode():
        for name, (nodes, top_k) in SHAPES.items():
            for fan_out in FAN_OUTS:
                found = _measure(source, head, nodes, top_k, fan_out, bench.repeats)
                table[f"{name}, {fan_out} outcomes"] = found
                rows.append((name, fan_out, *found.values()))
    show(f"look-ahead, {models.name}, one session, ms", ("shape", "outcomes", *STEPS), rows)
    return bench.result("ahead", models, by_shape=table)


def _measure(
    source: GpuEagleProposer, head: DraftHead, nodes: int, top_k: int, fan_out: int, repeats: int
) -> dict[str, float]:
    """Return the median milliseconds of each step."""
    engine = DraftEngine(
        [source],
        limits=VerdictLimits(
            vocab_size=head.config.vocab_size,
            feature_size=head.config.hidden_size,
            max_context=MAX_LEN,
        ),
        max_sessions=8,
        metrics=DrafterMetrics(),
    )
    plan = SpeculationPlan(
        method=DraftMethod.EAGLE3, draft_tokens=nodes, top_k=top_k, look_ahead=1, fan_out=fan_out
    )
    session = _Session(engine, head.config.hidden_size, plan)
    taken: dict[str, list[float]] = defaultdict(list)
    for count in range(repeats + 5):
        if session.is_over:
            break
        for name, seconds in session.round().items():
            if count >= 5:
                taken[name].append(seconds * 1000.0)
    return {name: round(median(taken[name]), 3) if taken[name] else 0.0 for name in STEPS}
