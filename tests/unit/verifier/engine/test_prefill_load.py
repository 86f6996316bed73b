"""Prompts do not queue behind sessions that decode, and these go on all the same.

A closed loop of sessions in simulated time, three tokens a round; rounds last as long as an 8B
model's with drafts of five nodes.
"""

from __future__ import annotations

from itertools import cycle
from statistics import median
from typing import NamedTuple

import pytest
from outrider_verifier.engine.schedule_policy import plan_round
from outrider_verifier.model_runner.gpu_runner.round_times import MeasuredRoundTimes
from outrider_verifier.state.round_plan import RoundLimits, RowState

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import CHUNK_TOKENS
from outrider.ids import SessionId

NODES = 5
CHAT_PROMPTS = (60, 110, 90, 190, 130, 70, 240, 120)
CHAT_ROUNDS = 21
"""Rounds of an answer of 64 tokens."""
LONG_PROMPTS = (3300,)
LONG_ROUNDS = 47
"""Rounds of an answer of 128 tokens."""
BUDGET = 2048
"""The default of a CUDA device."""
FAMILY = ShapeFamily(
    max_rows=64,
    max_nodes=1,
    in_process_nodes=NODES,
    has_features=False,
    has_sampled_acceptance=False,
    max_prefill_tokens=BUDGET,
)
SECONDS = {shape: 5.3e-3 + 19e-6 * shape.token_rows for shape in FAMILY.all_shapes()}


class Load(NamedTuple):
    """What a steady service did."""

    decoding: float
    """Mean share of the sessions that decode."""
    first_token_s: float
    """Median time from a request to its first token."""
    requests_s: float
    """Requests finished a second."""


def serve(
    sessions: int, *, prompts: tuple[int, ...], rounds: int, budget: int = BUDGET, steps: int = 600
) -> Load:
    """Run a closed loop of so many sessions: each asks again once its answer is complete."""
    times = MeasuredRoundTimes(FAMILY)
    times.set_measurements(SECONDS)
    limits = RoundLimits(
        prefill_tokens=budget, chunk_tokens=CHUNK_TOKENS, decode_tokens=1024, batch_wait_s=0.005
    )
    lengths = cycle(prompts)
    left = {session: (next(lengths), rounds - session % rounds, 0.0) for session in range(sessions)}
    now, decoding, first, finished = 0.0, list[int](), list[float](), list[float]()
    for _ in range(steps):
        plan = plan_round([_row(name, *each) for name, each in left.items()], now, limits)
        chunks = sum(-(-chunk.num_tokens // CHUNK_TOKENS) for chunk in plan.prefill)
        took = times.plain_s(len(plan.decode), own_nodes=NODES, chunks=chunks)
        assert took is not None
        now += took
        decoding.append(len(plan.decode))
        for chunk in plan.prefill:
            prompt, answer, opened = left[int(chunk.session_id)]
            left[int(chunk.session_id)] = (prompt - chunk.num_tokens, answer, opened)
            if prompt == chunk.num_tokens:
                first.append(now - opened)
        for row in plan.decode:
            _, answer, opened = left.pop(int(row.session_id))
            # A client's next request takes the place of the last one, at the end of the line.
            left[int(row.session_id)] = (0, answer - 1, opened)
            if answer == 1:
                left[int(row.session_id)] = (next(lengths), rounds, now)
                finished.append(now)
    half = len(finished) // 2
    return Load(
        sum(decoding[steps // 3 :]) / len(decoding[steps // 3 :]) / sessions,
        median(first[len(first) // 2 :]),
        (len(finished) - half) / (finished[-1] - finished[half - 1]),
    )


def _row(session: int, prompt: int, rounds: int, opened: float) -> RowState:
    return RowState(
        session_id=SessionId(str(session)),
        prefill_left=prompt,
        nodes=None,
        root_known_at=opened,
        in_process_nodes=NODES - 1,
    )


@pytest.mark.parametrize("sessions", [8, 32, 64])
def test_with_short_prompts_most_sessions_decode(sessions: int) -> None:
    load = serve(sessions, prompts=CHAT_PROMPTS, rounds=CHAT_ROUNDS)
    assert load.decoding > 0.9


@pytest.mark.parametrize(("sessions", "rounds"), [(8, 3), (32, 5)])
def test_a_long_prompt_is_computed_within_a_few_rounds(sessions: int, rounds: int) -> None:
    load = serve(sessions, prompts=LONG_PROMPTS, rounds=LONG_ROUNDS)
    full_round_s = max(SECONDS.values())
    assert load.first_token_s < rounds * full_round_s
    assert load.decoding > 0.7


def test_a_smaller_budget_makes_first_tokens_slower() -> None:
    """The one setting by which first tokens and tokens after them are balanced."""
    loads = [
        serve(32, prompts=LONG_PROMPTS, rounds=LONG_ROUNDS, budget=budget, steps=2000)
        for budget in (512, 1024, BUDGET)
    ]
    first = [load.first_token_s for load in loads]
    assert first == sorted(first, reverse=True) and first[0] > 4 * first[-1]
    assert loads[-1].requests_s > loads[0].requests_s
