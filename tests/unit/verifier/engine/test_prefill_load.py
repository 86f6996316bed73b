"""Prompts that come in faster than short rounds take them: sessions do not wait for them for good.

A closed loop of sessions with short answers, three tokens a round, in simulated time; rounds last
as long as an 8B model's with drafts of five nodes.
"""

from __future__ import annotations

from itertools import cycle

import pytest
from outrider_verifier.engine.schedule_policy import plan_round
from outrider_verifier.model_runner.gpu_runner.round_times import MeasuredRoundTimes
from outrider_verifier.state.round_plan import RoundLimits, RowState

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import CHUNK_BUCKETS, CHUNK_TOKENS
from outrider.ids import SessionId

NODES = 5
ROUNDS_OF_AN_ANSWER = 21
"""Of answers of 64 tokens."""
FEW_ROUNDS = 14
"""Of answers of 42."""
PROMPTS = (60, 110, 90, 190, 130, 70, 240, 120)
FAMILY = ShapeFamily(
    max_rows=64,
    max_nodes=1,
    in_process_nodes=NODES,
    has_features=False,
    has_sampled_acceptance=False,
)
SECONDS = {shape: 5.3e-3 + 19e-6 * shape.token_rows for shape in FAMILY.all_shapes()}


def shares(
    sessions: int, *, rounds_of_one: int = ROUNDS_OF_AN_ANSWER, crowds: bool = True
) -> tuple[float, float]:
    """Of a steady service: the mean share of the sessions that decode, and the longest round over
    the median one."""
    known = MeasuredRoundTimes(FAMILY, drafts_itself=True, max_prefill_slowdown=2.0)
    known.set_measurements(SECONDS)
    limits = RoundLimits(
        prefill_tokens=CHUNK_BUCKETS[-1] * CHUNK_TOKENS,
        prefill_limit=lambda rows, crowded: known.prompt_tokens_beside(rows, crowds and crowded),
        chunk_tokens=CHUNK_TOKENS,
        decode_tokens=1024,
        batch_wait_s=0.005,
    )
    prompts, left = cycle(PROMPTS), dict[int, tuple[int, int]]()
    now, lasted, decoding = 0.0, list[float](), list[int]()
    for session in range(sessions):
        left[session] = (next(prompts), rounds_of_one - session % rounds_of_one)
    for _ in range(600):
        rows = [_row(session, *each) for session, each in left.items()]
        plan = plan_round(rows, now, limits)
        chunks = sum(-(-chunk.num_tokens // CHUNK_TOKENS) for chunk in plan.prefill)
        took = known.plain_s(len(plan.decode), own=True, chunks=chunks)
        assert took is not None
        now += took
        lasted.append(took)
        decoding.append(len(plan.decode))
        for chunk in plan.prefill:
            prompt, rounds = left[int(chunk.session_id)]
            left[int(chunk.session_id)] = (prompt - chunk.num_tokens, rounds)
        for row in plan.decode:
            _, rounds = left.pop(int(row.session_id))
            # A client's next request takes the place of the last one, at the end of the line.
            left[int(row.session_id)] = (0, rounds - 1)
            if rounds == 1:
                left[int(row.session_id)] = (next(prompts), rounds_of_one)
    steady = sorted(lasted[200:])
    return sum(decoding[200:]) / 400 / sessions, steady[-5] / steady[len(steady) // 2]


def _row(session: int, prompt: int, rounds: int) -> RowState:
    return RowState(
        session_id=SessionId(str(session)),
        prefill_left=prompt,
        nodes=None,
        root_known_at=0.0,
        in_process_nodes=NODES - 1,
    )


@pytest.mark.parametrize("sessions", [8, 32, 64])
def test_most_sessions_decode(sessions: int) -> None:
    decode, _ = shares(sessions)
    assert decode > 0.85


def test_without_a_look_at_who_waits_more_than_a_third_would_wait() -> None:
    (with_one, _), (without, _) = (
        shares(64, rounds_of_one=FEW_ROUNDS, crowds=crowds) for crowds in (True, False)
    )
    assert without < 0.65 < 0.75 < with_one


@pytest.mark.parametrize("sessions", [8, 32, 64])
def test_rounds_last_no_longer_than_the_bound_on_gaps(sessions: int) -> None:
    """2.5 medians, which have the prompts in them where these come all the time."""
    _, longest = shares(sessions)
    assert longest <= 2.5
