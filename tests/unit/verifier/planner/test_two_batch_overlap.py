"""Drafted sessions take turns in two halves where that is shorter; their texts stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider_verifier.engine.schedule_policy import plan_other_half, plan_round
from outrider_verifier.planner.two_batch_overlap import TwoBatchOverlap
from outrider_verifier.state.round_plan import (
    DecodeRow,
    PrefillChunk,
    RoundLimits,
    RoundPlan,
    RowState,
)
from outrider_verifier.state.session import NO_LIMIT

from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from tests.fakes.model_runner import FakeRunner
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import good_chain, half_good_chain, make_spec, verifier

LIMITS = RoundLimits(prefill_tokens=64, decode_tokens=1000, batch_wait_s=0.005)
LONG = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=30_000)


def steep(rows: int, nodes: int) -> float:
    """Seconds of a forward: 1 ms for the weights, 50 us for a token."""
    return 0.001 + 50e-6 * rows * nodes


def row(number: int, *, nodes: int | None, since: float = 0.0, left: int = 0) -> RowState:
    return RowState(
        session_id=SessionId(f"s{number}"),
        prefill_left=left,
        nodes=nodes,
        awaits_proposal=nodes is None,
        root_known_at=since,
        proposal_at=since,
        proposal_timeout_s=1.0,
    )


def test_turns_are_taken_where_they_are_shorter() -> None:
    # Sharing: 17 + 6 ms. In turns: twice 9 ms, and the answer is hidden.
    assert TwoBatchOverlap(steep).max_rows_of_half(64, 5, 0.006) == 32
    assert TwoBatchOverlap(steep).max_rows_of_half(64, 5, 0.001) is None
    assert TwoBatchOverlap(steep).max_rows_of_half(9, 5, 0.006) == 5
    # Where rows cost nothing, a half takes as long as all.
    assert TwoBatchOverlap(lambda rows, nodes: 0.004).max_rows_of_half(64, 5, 0.006) is None


def test_few_rows_and_unknown_times_share() -> None:
    assert TwoBatchOverlap(steep).max_rows_of_half(3, 5, 1.0) is None
    assert TwoBatchOverlap(steep).max_rows_of_half(64, 5, 0.0) is None
    assert TwoBatchOverlap(lambda rows, nodes: None).max_rows_of_half(64, 5, 1.0) is None


def test_a_near_tie_changes_nothing() -> None:
    two_batch_overlap = TwoBatchOverlap(steep)
    assert two_batch_overlap.max_rows_of_half(64, 5, 0.0015) is None
    assert two_batch_overlap.max_rows_of_half(64, 5, 0.006) == 32
    assert two_batch_overlap.max_rows_of_half(64, 5, 0.0015) == 32
    assert two_batch_overlap.max_rows_of_half(64, 5, 0.0) is None
    assert two_batch_overlap.max_rows_of_half(64, 5, 0.0015) is None


def test_a_half_does_not_wait_for_the_other_one() -> None:
    rows = [row(n, nodes=4) for n in range(4)] + [row(n, nodes=None) for n in range(4, 8)]
    assert plan_round(rows, 0.001, LIMITS).wait_until == pytest.approx(0.005)
    plan = plan_round(rows, 0.001, LIMITS, max_rows=4)
    assert plan.session_ids == ["s0", "s1", "s2", "s3"]


def test_no_round_has_more_rows_than_a_half_and_the_oldest_go_first() -> None:
    rows = [row(n, nodes=4, since=float(-n)) for n in range(6)]
    plan = plan_round(rows, 1.0, LIMITS, max_rows=4)
    assert plan.session_ids == ["s5", "s4", "s3", "s2"]


def test_the_other_half_is_submitted_behind_the_one_in_flight() -> None:
    in_flight = RoundPlan(decode=tuple(DecodeRow(SessionId(f"s{n}")) for n in range(4)))
    stale = [row(n, nodes=None) for n in range(4)]
    ready = [row(n, nodes=4) for n in range(4, 8)]
    prompt = row(9, nodes=None, left=10)
    plan = plan_other_half([*stale, *ready, prompt], 0.001, in_flight, LIMITS, max_rows=4)
    assert [entry.session_id for entry in plan.decode] == ["s4", "s5", "s6", "s7"]
    assert plan.prefill == (PrefillChunk(session_id=SessionId("s9"), num_tokens=10),)


def test_a_few_rows_wait_for_more_of_their_half_or_for_the_round_in_flight() -> None:
    in_flight = RoundPlan(decode=tuple(DecodeRow(SessionId(f"s{n}")) for n in range(4)))
    others = [row(4, nodes=4), *(row(n, nodes=None) for n in range(5, 8))]
    plan = plan_other_half(others, 0.001, in_flight, LIMITS, max_rows=4)
    assert plan.is_empty
    assert plan.wait_until == 1.0
    alone = plan_other_half(others[:1], 0.001, in_flight, LIMITS, max_rows=4)
    assert alone.is_empty
    assert alone.wait_until is None


@pytest.mark.parametrize("lands_late", [False, True])
async def test_sessions_in_turns_say_what_they_would_alone(lands_late: bool) -> None:
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target, drafts=0)
    runner.verify_times = steep
    asked = iter(range(10**9))
    async with verifier(target=target, runner=runner, planner="automatic") as rig:
        core = rig.service.core
        # What the planner makes of this machine's times is not asked.
        core.policy.slowest_response_s = lambda: 0.006  # type: ignore[method-assign]
        core.policy.should_pause = lambda session: False  # type: ignore[method-assign]
        core.policy.draft_limit = lambda session: NO_LIMIT  # type: ignore[method-assign]
        core.policy.proposal_timeout_s = lambda session: 30.0  # type: ignore[method-assign]

        def lands() -> bool:
            """A round takes as long as the answers to the one before it, whatever those take."""
            in_flight = {row.session.ticket for flight in runner.in_flight for row in flight.verify}
            others = [s for s in core.sessions.values() if s.ticket not in in_flight]
            awaiting = [s.handle for s in others if s.awaits_proposal]
            if not all(nodes >= 0 for nodes in core.inbox.num_nodes(awaiting)):
                return False
            return not lands_late or next(asked) % 7 == 6

        runner.lands = lands
        await rig.attach(half_good_chain(target))
        specs = [make_spec(f"s{i}", max_new_tokens=60 + 7 * i, plan=LONG) for i in range(9)]
        results = await rig.run_all(specs)
        for spec, result in zip(specs, results, strict=True):
            assert result.tokens == rig.reference(spec)
        stats = [result.last.stats for result in results]
        assert all(s.accepted > 0 for s in stats)
        sizes = [len(flight.verify) for flight in runner.flights]
        assert max(sizes[len(sizes) // 4 :]) <= 5
        behind = sum(flight.ahead for flight in runner.flights)
        assert behind > len(runner.flights) // 4
        assert runner.most_in_flight == 2
        await rig.idle()


async def test_sessions_leave_and_come_while_others_take_turns() -> None:
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target, drafts=0)
    runner.verify_times = steep
    async with verifier(target=target, runner=runner, planner="automatic") as rig:
        rig.service.core.policy.slowest_response_s = lambda: 0.006  # type: ignore[method-assign]
        await rig.attach(good_chain(target))
        for wave in range(3):
            specs = [
                make_spec(f"w{wave}-{i}", max_new_tokens=5 + 11 * (i % 4), plan=LONG)
                for i in range(12)
            ]
            mixed = [replace(s, drafter_id=None) if i % 3 == 0 else s for i, s in enumerate(specs)]
            for spec, result in zip(mixed, await rig.run_all(mixed), strict=True):
                assert result.error is None
                assert result.tokens == rig.reference(spec)
        await rig.idle()
