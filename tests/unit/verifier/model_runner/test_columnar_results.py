"""Rows that go on with nothing but tokens are committed and told in columns, as if one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from outrider_verifier.model_runner.batch import VerifyDraft, VerifyRow
from outrider_verifier.model_runner.interface import DecodeOutput, RowOutput
from outrider_verifier.model_runner.results import NO_ROWS, commit_rows
from outrider_verifier.planner.in_process_planner import in_process_rows
from outrider_verifier.state.effects import EventBatch, SessionEventRow
from outrider_verifier.state.session import Session

from outrider.engine.logprobs import PathLogprobs
from outrider.spec.plan import SpeculationPlan
from tests.fakes.scripted_drafter import make_tree
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import CHAIN, make_spec

STOP, PLAIN = 9, SpeculationPlan()
KINDS = ["plain", "paused", "own", "lost", "waits", "drafted", "flagged", "ended"]
"""`lost`: nobody drafts for it; `waits`: it has one, which sent nothing."""
ALIKE = {"plain", "paused", "own", "lost"}


def session_of(number: int, kind: str, budget: int) -> Session:
    """A session that has emitted one token of `budget`."""
    plan = PLAIN if kind == "plain" else CHAIN
    spec = make_spec(f"s{number}", plan=plan, stop_token_ids=(STOP,), max_new_tokens=budget)
    kv = FakeTarget(num_blocks=8).pool.allocate(32)
    made = Session.create(spec, ticket=number, kv=kv, now=0.0, keeps_features=False)
    made.is_speculation_off, made.in_process_draft_length = (
        kind == "paused",
        3 if kind == "own" else 0,
    )
    made.link_id = 1 if kind in ("waits", "drafted") else None
    made.kv.advance(made.length)
    made.commit_tokens((7,), 0.0)
    if kind == "ended":
        made.mark_ended()
    return made


def row_of(session: Session, kind: str) -> VerifyRow:
    if kind == "drafted":
        draft = VerifyDraft(tree=make_tree([1]), distribution=None)
        return VerifyRow(session, draft=draft)
    return VerifyRow(session, in_process_depth=session.in_process_depth)


def state(session: Session) -> list[Any]:
    """What committing changes."""
    text = session.tokens[: session.length].tolist()
    return [
        text,
        session.emitted,
        session.written_positions,
        session.round_id,
        session.root_known_at,
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_committed_once_as_if_alone(seed: int) -> None:
    rng = random.Random(seed)
    workload_classes = [rng.choice(KINDS) for _ in range(rng.randrange(1, 12))]
    budgets = [rng.choice((2, 3, 16)) for _ in workload_classes]
    outcomes = [
        RowOutput(
            tuple(rng.choice((1, 2, 3, 4, STOP)) for _ in range(rng.randrange(1, 5))),
            None,
            3 if kind == "own" else 0,
            is_target_only=kind == "flagged",
        )
        for kind in workload_classes
    ]
    made = [
        session_of(i, *each) for i, each in enumerate(zip(workload_classes, budgets, strict=True))
    ]
    rows = [row_of(session, kind) for session, kind in zip(made, workload_classes, strict=True)]
    committed = commit_rows(rows, DecodeOutput.of_rows(outcomes), 5.0)
    alike, apart = committed.plain, committed.special

    twins = [
        session_of(i, *each) for i, each in enumerate(zip(workload_classes, budgets, strict=True))
    ]
    for number, (twin, kind, outcome) in enumerate(
        zip(twins, workload_classes, outcomes, strict=True)
    ):
        if kind != "ended":
            # What the others of its round are does not matter.
            one = DecodeOutput.of_rows([outcome._replace(is_target_only=True)])
            (alone,) = commit_rows([row_of(twin, kind)], one, 5.0).special
            goes_on = kind in ALIKE and alone.reason is None
            assert (number in alike.numbers) is goes_on
            assert any(row.session is made[number] for row in apart) is not goes_on
        assert state(made[number]) == state(twin)
    tokens = iter(alike.tokens)
    for session, count, number in zip(alike.sessions, alike.counts, alike.numbers, strict=True):
        assert session is made[number]
        assert tuple(next(tokens) for _ in range(count)) == outcomes[number].tokens
    assert next(tokens, None) is None


def test_a_row_that_misses_its_own_draft_stands_apart() -> None:
    session = session_of(0, "own", 16)
    (row,) = commit_rows(
        [row_of(session, "own")], DecodeOutput.of_rows([RowOutput((1,), None)]), 1.0
    ).special
    assert row.session is session and row.result.draft_nodes == 0


def test_events_leave_in_the_order_in_which_they_were_added() -> None:
    emits = EventBatch()
    emits.add_event(SessionEventRow(1, 0, 2, 0, 0, 0, 0), (5, 6))
    block = np.array([[2, 3], [7, 8], [1, 2], [0, 0], [4, 4], [0, 3], [0, 1]])
    emits.add_events(block, [10, 11, 12])
    told = PathLogprobs(np.zeros((1, 1), np.float32), np.zeros((1, 0), np.int32))
    emits.add_event(SessionEventRow(4, 0, 1, 1, 0, 0, 0), (13,), told)
    emits.add_events(block[:, :1], [14])
    assert len(emits) == 5
    assert [event.ticket for event in emits.iter_events()] == [1, 2, 3, 4, 2]
    assert emits.iter_events()[2] == SessionEventRow(3, 8, 2, 0, 4, 3, 1)
    assert emits.tokens == [5, 6, 10, 11, 12, 13, 14]
    assert list(emits.logprobs) == [3]
    # Asking changes nothing.
    assert emits.columns().tolist() == emits.columns().tolist()
    assert EventBatch().iter_events() == []


def test_in_process_drafts_count_wherever_their_rows_are() -> None:
    for apart in (False, True):
        made = [session_of(i, "own", 16) for i in range(3)]
        outcomes = [RowOutput((1,) * (1 + i), None, 3, is_target_only=apart) for i in range(3)]
        rows = [row_of(session, "own") for session in made]
        committed = commit_rows(rows, DecodeOutput.of_rows(outcomes), 1.0)
        assert len(committed.special) == (3 if apart else 0)
        assert in_process_rows(committed.special, committed.plain) == ([1, 2, 3], 3)
    assert in_process_rows([], NO_ROWS) == ([], 0)
