"""Who gets KV, who loses it for whom, and that everybody gets to an end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_verifier.kv.preemption import (
    PRIOR_TOKENS,
    Action,
    AdmitSession,
    KVPoolState,
    OutputLengthStats,
    Preempt,
    PreemptionLimits,
    SessionClaim,
    admit_all,
    can_all_run,
    choose_mode,
    plan_preemption,
)
from outrider_verifier.state.preemption_mode import PreemptionMode

from outrider.ids import SessionId

BOUNDS = PreemptionLimits(
    max_running=8, max_preemptions=2, watermark=0.0, aging_s=10.0, guard_blocks=2
)


def claim(name: str, **facts: Any) -> SessionClaim:
    """A session that needs four blocks now and eight in all, and expects no more than it needs."""
    defaults: dict[str, Any] = {
        "priority": 0,
        "opened_at": float(ord(name[0])),
        "blocks": 0,
        "next_blocks": 4,
        "max_blocks": 8,
        "expected_blocks": 4,
    }
    return SessionClaim(SessionId(name), **(defaults | facts))


def running(name: str, **facts: Any) -> SessionClaim:
    """One that has the blocks that it needs now."""
    return claim(name, **{"blocks": 4, "tokens": 10, **facts})


def planned(
    free: int, run: list[SessionClaim], wait: list[SessionClaim], bounds: PreemptionLimits = BOUNDS
) -> list[Action]:
    """What is done in a pool of so many free blocks beside those held."""
    total = free + sum(each.blocks for each in run)
    return plan_preemption(
        KVPoolState(free_blocks=free, total_blocks=total, running=run, waiting=wait), bounds
    )


def let_in(*names: str) -> list[Action]:
    """Four blocks for each."""
    return [AdmitSession(SessionId(name), 4) for name in names]


def preempt(*names: str) -> list[Action]:
    """These, in this order."""
    return [Preempt(SessionId(name)) for name in names]


def test_who_waits_is_let_in_by_priority_then_in_order_of_opening() -> None:
    waiting = [claim("b"), claim("a"), claim("c", priority=1)]
    assert planned(40, [], waiting) == let_in("c", "a", "b")


def test_waiting_raises_a_claim_above_later_ones_of_a_higher_priority() -> None:
    waiting = [claim("a", waited_s=21.0), claim("b", priority=1)]
    assert planned(40, [], waiting) == let_in("a", "b")


def test_nobody_passes_the_first_in_line() -> None:
    waiting = [claim("a", next_blocks=9, max_blocks=9), claim("b", next_blocks=1)]
    assert planned(6, [running("r")], waiting) == []


def test_nobody_is_let_in_below_a_block_for_each_that_runs() -> None:
    run = [running("r"), running("s")]
    assert planned(6, run, [claim("a")]) == []
    assert planned(7, run, [claim("a")]) == let_in("a")


def test_nobody_is_let_in_below_the_watermark() -> None:
    bounds = replace(BOUNDS, watermark=0.25)
    assert planned(8, [running("r")], [claim("a")]) == let_in("a")
    assert planned(6, [running("r", blocks=14)], [claim("a")], bounds) == []


def test_one_alone_is_let_in_whatever_the_watermark_says() -> None:
    assert planned(4, [], [claim("a", max_blocks=4)]) == let_in("a")


def test_nobody_is_let_in_where_those_that_run_are_expected_to_need_it() -> None:
    run = [running("r", expected_blocks=40, max_blocks=40)]
    assert planned(36, run, [claim("a", expected_blocks=11)]) == []
    assert planned(36, run, [claim("a", expected_blocks=10)]) == let_in("a")


@st.composite
def roomy(draw: st.DrawFn) -> tuple[KVPoolState, PreemptionLimits]:
    """Sessions of any kind, and a pool that may hold them all."""

    def some(name: str, held: bool) -> SessionClaim:
        most = draw(st.integers(4, 12))
        needs = draw(st.integers(1, most))
        return claim(
            name,
            priority=draw(st.integers(0, 2)),
            blocks=draw(st.integers(1, needs)) if held else 0,
            next_blocks=needs,
            max_blocks=most,
            expected_blocks=draw(st.integers(needs, most)),
            preemptions=draw(st.integers(0, 2)),
            waited_s=draw(st.sampled_from([0.0, 5.0, 25.0])),
        )

    run = [some(chr(97 + i), True) for i in range(draw(st.integers(0, 5)))]
    wait = [some(chr(107 + i), False) for i in range(draw(st.integers(1, 5)))]
    total = sum(each.max_blocks for each in (*run, *wait)) + draw(st.integers(-4, 24))
    held = sum(each.blocks for each in run)
    bounds = replace(
        BOUNDS,
        watermark=draw(st.sampled_from([0.0, 0.1])),
        max_running=draw(st.integers(max(1, len(run)), 10)),
    )
    state = KVPoolState(
        free_blocks=max(0, total - held), total_blocks=max(total, held), running=run, waiting=wait
    )
    return state, bounds


@given(roomy())
def test_where_nobody_will_want_for_a_block_who_runs_need_not_be_looked_at(
    case: tuple[KVPoolState, PreemptionLimits],
) -> None:
    state, bounds = case
    everybody = (*state.running, *state.waiting)
    most = sum(each.max_blocks for each in everybody)
    found = can_all_run(
        max_blocks=most,
        sessions=len(everybody),
        total_blocks=state.total_blocks,
        bounds=bounds,
    )
    spare = state.total_blocks - most
    enough = spare >= max(int(bounds.watermark * state.total_blocks), len(everybody) + 1)
    assert found == (enough and len(everybody) <= bounds.max_running)
    if found:
        assert admit_all(state.waiting, bounds) == plan_preemption(state, bounds)
        assert len(plan_preemption(state, bounds)) == len(state.waiting)


def test_no_more_run_than_may() -> None:
    bounds = replace(BOUNDS, max_running=1)
    assert planned(40, [running("r")], [claim("a")], bounds) == []


def test_who_must_grow_takes_from_the_lowest_then_from_who_loses_least() -> None:
    grows = running("a", next_blocks=5, priority=1, tokens=30)
    others = [running("b", tokens=5, priority=1), running("c", tokens=20), running("d", tokens=9)]
    assert planned(0, [grows, *others], []) == preempt("d")
    assert planned(0, [grows, *others[:1]], []) == preempt("b")


def test_among_equals_the_latest_goes() -> None:
    run = [running("a", next_blocks=5), running("b"), running("c")]
    assert planned(0, run, []) == preempt("c")


def test_who_needs_the_blocks_may_be_the_one_to_go() -> None:
    assert planned(0, [running("a", tokens=50), running("b", next_blocks=5)], []) == preempt("b")


def test_who_was_resumed_lately_goes_last_of_its_priority() -> None:
    run = [running("a", next_blocks=5, tokens=50), running("b", is_protected=True), running("c")]
    assert planned(0, run, []) == preempt("c")
    assert planned(0, run[:2], []) == preempt("a")


def test_at_its_bound_a_session_is_never_preempted_again() -> None:
    bound = running("b", preemptions=2, tokens=1)
    assert planned(0, [running("a", next_blocks=5), bound], []) == preempt("a")
    assert planned(0, [bound], [claim("h", priority=9)]) == []


def test_at_its_bound_a_session_is_let_in_with_all_that_it_may_ever_need() -> None:
    waiting = [claim("a", preemptions=2)]
    assert planned(9, [running("r")], waiting) == []
    assert planned(10, [running("r")], waiting) == [AdmitSession(SessionId("a"), 8)]


def test_a_preempted_session_is_not_resumed_to_be_the_next_to_go() -> None:
    waiting = [claim("a", preemptions=1)]
    bounds = replace(BOUNDS, guard_blocks=4)
    assert planned(7, [running("r")], waiting, bounds) == []
    assert planned(8, [running("r")], waiting, bounds) == let_in("a")


def test_a_higher_priority_takes_blocks_from_lower_ones() -> None:
    run = [running("r"), running("s", tokens=3)]
    actions = planned(2, run, [claim("h", priority=1)])
    assert actions == [*preempt("s"), *let_in("h")]


def test_a_higher_priority_takes_a_place() -> None:
    bounds = replace(BOUNDS, max_running=2)
    run = [running("r"), running("s", tokens=3)]
    actions = planned(40, run, [claim("h", priority=1)], bounds)
    assert actions == [*preempt("s"), *let_in("h")]


def test_a_higher_priority_preempts_nobody_in_vain() -> None:
    run = [running("r"), running("s", priority=5)]
    assert planned(0, run, [claim("h", priority=1, next_blocks=6)]) == []


def test_a_higher_priority_preempts_nobody_beyond_what_it_needs() -> None:
    run = [running("r", blocks=2, next_blocks=2, tokens=1), running("s", blocks=9, next_blocks=9)]
    run.append(running("t", priority=9))
    actions = planned(0, run, [claim("h", priority=1)])
    assert actions == [*preempt("s"), *let_in("h")]


def test_an_equal_claim_takes_nothing() -> None:
    assert planned(0, [running("r")], [claim("a")]) == []
    assert planned(0, [running("r", waited_s=30.0)], [claim("h", priority=2)]) == []
    assert planned(0, [running("r")], [claim("a", waited_s=500.0)]) == []


def test_a_session_that_was_just_resumed_is_not_preempted_for_a_higher_priority() -> None:
    assert planned(0, [running("r", is_protected=True)], [claim("h", priority=2)]) == []


@pytest.mark.parametrize(
    ("swap_s", "recompute_s", "wanted", "way"),
    [
        (1e-6, 2e-6, None, PreemptionMode.SWAP),
        (2e-6, 1e-6, None, PreemptionMode.RECOMPUTE),
        (None, 1.0, None, PreemptionMode.RECOMPUTE),
        (None, 1.0, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE),
        (2e-6, 1e-6, PreemptionMode.SWAP, PreemptionMode.SWAP),
        (1e-6, 2e-6, PreemptionMode.RECOMPUTE, PreemptionMode.RECOMPUTE),
        (5.0, 0.0, None, PreemptionMode.SWAP),
    ],
)
def test_the_way_back_is_the_cheaper_one_that_there_is(
    swap_s: float | None, recompute_s: float, wanted: PreemptionMode | None, way: PreemptionMode
) -> None:
    assert choose_mode(swap_s=swap_s, recompute_s=recompute_s, wanted=wanted) is way


def test_expected_lengths_follow_what_ended() -> None:
    lengths = OutputLengthStats()
    assert lengths.expected_len(0, 2048) == PRIOR_TOKENS
    for _ in range(200):
        lengths.observe(150)
    assert lengths.mean == pytest.approx(150.0, abs=10.0)
    assert lengths.expected_len(10, 2048) == pytest.approx(150, abs=10)
    assert lengths.expected_len(1000, 2048) == 1250
    assert lengths.expected_len(2000, 2048) == 2048
    assert lengths.expected_len(0, 20) == 20


# ---- everybody gets to an end --------------------------------------------------------------------

BLOCK = 4
POOL = 24
SLACK = 6
FEW = PreemptionLimits(
    max_running=5, max_preemptions=2, watermark=0.02, aging_s=20.0, guard_blocks=2
)


@dataclass
class Served:
    """A session of the simulation; lengths in tokens, times in rounds."""

    name: SessionId
    priority: int
    arrives: float
    prompt: int
    output: int
    per_round: int
    emitted: int = 0
    blocks: int = 0
    preemptions: int = 0
    waited: float = 0.0
    waits_since: float | None = None
    resumed: int = -1
    log: list[str] = field(default_factory=list)

    def claim(self, now: float, lengths: OutputLengthStats) -> SessionClaim:
        """What the policy is told of it."""
        length = self.prompt + self.emitted
        expected = self.prompt + lengths.expected_len(self.emitted, 40)
        since = self.waits_since
        return SessionClaim(
            self.name,
            self.priority,
            self.arrives,
            self.blocks,
            -(-(length + SLACK) // BLOCK),
            -(-(self.prompt + 40 + SLACK) // BLOCK),
            -(-(expected + SLACK) // BLOCK),
            0 if since is not None else length - 1,
            self.preemptions,
            self.waited + (0.0 if since is None else now - since),
            0 <= self.emitted - self.resumed < 4 and self.preemptions > 0,
        )


served = st.builds(
    lambda priority, arrives, prompt, output, per_round: (
        priority,
        float(arrives),
        prompt,
        output,
        per_round,
    ),
    st.integers(-2, 2),
    st.integers(0, 60),
    st.integers(1, 48),
    st.integers(1, 40),
    st.integers(1, 3),
)


@settings(max_examples=150)
@given(st.lists(served, min_size=1, max_size=24))
def test_everybody_ends_and_nobody_is_preempted_more_often_than_the_bound(
    rows: list[tuple[int, float, int, int, int]],
) -> None:
    sessions = [Served(SessionId(f"s{i}"), *row) for i, row in enumerate(rows)]
    by_name = {each.name: each for each in sessions}
    left, present, lengths = (
        sorted(sessions, key=lambda s: s.arrives),
        list[Served](),
        OutputLengthStats(),
    )
    now, rounds = 0.0, 0
    work = sum(each.output for each in sessions) * (1 + FEW.max_preemptions)
    while left or present:
        rounds += 1
        assert rounds < 200 + work, "somebody starves"
        now += 1.0
        while left and left[0].arrives <= now:
            left[0].waits_since = now
            present.append(left.pop(0))
        _act(present, by_name, now, lengths)
        running = [each for each in present if each.waits_since is None]
        assert running or not present
        assert len(running) <= FEW.max_running
        for each in running:
            # Whoever decodes next finds its blocks.
            each.blocks = max(each.blocks, each.claim(now, lengths).next_blocks)
            each.emitted = min(each.output, each.emitted + each.per_round)
            if each.emitted == each.output:
                lengths.observe(each.emitted)
                present.remove(each)
        assert sum(each.blocks for each in present) <= POOL
    assert max(each.preemptions for each in sessions) <= FEW.max_preemptions


def _act(
    present: list[Served], by_name: dict[SessionId, Served], now: float, lengths: OutputLengthStats
) -> None:
    """Plan, and do what the plan says."""
    free = POOL - sum(each.blocks for each in present)
    claims = {each.name: each.claim(now, lengths) for each in present}
    state = KVPoolState(
        free_blocks=free,
        total_blocks=POOL,
        running=[claims[each.name] for each in present if each.waits_since is None],
        waiting=[claims[each.name] for each in present if each.waits_since is not None],
    )
    for action in plan_preemption(state, FEW):
        each = by_name[action.session_id]
        match action:
            case Preempt():
                assert each.waits_since is None
                free += each.blocks
                each.blocks, each.waits_since = 0, now
                each.preemptions += 1
            case AdmitSession(blocks=blocks):
                assert each.waits_since is not None
                free -= blocks
                assert free >= 0, "blocks were given out that nobody had given back"
                each.waited += now - each.waits_since
                each.blocks, each.waits_since, each.resumed = blocks, None, each.emitted


def test_blocks_that_several_hold_are_free_once_the_last_of_them_is_gone() -> None:
    shared = tuple(range(8))
    both = [
        running(name, blocks=8, next_blocks=8, tokens=tokens, shared=shared)
        for name, tokens in (("a", 20), ("b", 10))
    ]
    urgent = claim("w", priority=1, next_blocks=5, max_blocks=6)
    state = KVPoolState(free_blocks=2, total_blocks=10, running=both, waiting=[urgent])
    assert plan_preemption(state, BOUNDS) == [*preempt("b", "a"), AdmitSession(SessionId("w"), 5)]
    # One of them alone would free none.
    alone = replace(state, running=both, waiting=[urgent._replace(priority=0)])
    assert plan_preemption(alone, BOUNDS) == []


def test_nobody_goes_for_blocks_that_the_last_of_their_holders_has_left() -> None:
    shared = tuple(range(6))
    pair = [running(name, blocks=6, next_blocks=7, tokens=5, shared=shared) for name in ("a", "b")]
    third = running("c", priority=1, blocks=4, next_blocks=6, tokens=60)
    state = KVPoolState(free_blocks=0, total_blocks=10, running=[*pair, third], waiting=[])
    assert plan_preemption(state, BOUNDS) == preempt("b", "a")
