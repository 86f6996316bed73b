"""When pools of verifiers and drafters grow and shrink."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_ray.autoscale import (
    Action,
    AutoscaleConfig,
    Create,
    Drain,
    MemberLoad,
    Memories,
    PoolState,
    plan_scaling,
)
from outrider_ray.members import FleetMember, MemberRole, cells_of, member_of, members_of

CONFIG = AutoscaleConfig(
    max_verifiers=4, up_after_s=5.0, down_after_s=60.0, cool_down_s=30.0, queue_per_verifier=4.0
)


def pool(*loads: float, waiting: int = 0, least: int = 1, most: int = 4) -> PoolState:
    """Verifiers with these loads, of ten sessions each when full."""
    return PoolState(
        role=MemberRole.VERIFIER,
        min_members=least,
        max_members=most,
        members=tuple(
            MemberLoad(
                member=FleetMember(MemberRole.VERIFIER, n), sessions=round(10 * load), load=load
            )
            for n, load in enumerate(loads)
        ),
        waiting=waiting,
    )


class Watch:
    """Looks at one pool as the launcher does."""

    def __init__(self) -> None:
        self.memories = Memories()
        self.now = 1000.0

    def look(self, state: PoolState, after_s: float = 0.0) -> Action | None:
        """The action of a look that comes so much later."""
        self.now += after_s
        self.memories.note({state.role: state}, CONFIG, self.now)
        memory = self.memories.of[state.role]
        seen = replace(
            state,
            hot_since=memory.hot_since,
            cold_since=memory.cold_since,
            changed_at=memory.changed_at,
        )
        action = plan_scaling(seen, CONFIG, self.now)
        if action is not None:
            self.memories.changed(state.role, self.now)
        return action


def test_a_queue_that_lasts_brings_one_more() -> None:
    watch = Watch()
    assert watch.look(pool(0.5, waiting=4)) is None
    assert watch.look(pool(0.5, waiting=4), after_s=4.9) is None
    assert watch.look(pool(0.5, waiting=4), after_s=0.2) == Create(
        FleetMember(MemberRole.VERIFIER, 1)
    )


def test_full_members_bring_one_more_without_a_queue() -> None:
    watch = Watch()
    watch.look(pool(0.9, 0.9))
    assert watch.look(pool(0.9, 0.9), after_s=6.0) == Create(FleetMember(MemberRole.VERIFIER, 2))


def test_a_burst_that_is_over_brings_nobody() -> None:
    watch = Watch()
    watch.look(pool(0.5, waiting=40))
    watch.look(pool(0.5), after_s=4.0)
    assert watch.look(pool(0.5, waiting=40), after_s=4.0) is None


def test_nothing_grows_beyond_its_bound() -> None:
    watch = Watch()
    watch.look(pool(1.0, 1.0, waiting=99, most=2))
    assert watch.look(pool(1.0, 1.0, waiting=99, most=2), after_s=99.0) is None


def test_a_change_is_given_time_to_show_its_effect() -> None:
    watch = Watch()
    watch.look(pool(1.0))
    assert watch.look(pool(1.0), after_s=6.0) is not None
    watch.look(pool(1.0, 1.0), after_s=1.0)
    assert watch.look(pool(1.0, 1.0), after_s=28.0) is None
    assert watch.look(pool(1.0, 1.0), after_s=2.0) == Create(FleetMember(MemberRole.VERIFIER, 2))


@pytest.mark.parametrize("change", [{"ready": False}, {"leaving": True}])
def test_nothing_is_changed_while_a_change_is_under_way(change: dict[str, bool]) -> None:
    state = pool(1.0, 1.0, waiting=99)
    busy = (state.members[0], replace(state.members[1], **change))  # type: ignore[arg-type]
    watch = Watch()
    watch.look(replace(state, members=busy))
    assert watch.look(replace(state, members=busy), after_s=99.0) is None


def test_an_idle_pool_lets_go_whom_it_costs_least_and_never_the_first_ones() -> None:
    state = pool(0.0, 0.2, 0.1, least=1)
    watch = Watch()
    assert watch.look(state) is None
    assert watch.look(state, after_s=59.0) is None
    # The first one is idler, but part of the fleet as it was asked for.
    assert watch.look(state, after_s=2.0) == Drain(FleetMember(MemberRole.VERIFIER, 2))


def test_a_pool_at_its_least_shrinks_no_more() -> None:
    watch = Watch()
    watch.look(pool(0.0, 0.0, least=2))
    assert watch.look(pool(0.0, 0.0, least=2), after_s=999.0) is None


def test_nobody_is_let_go_whose_sessions_would_fill_the_others() -> None:
    watch = Watch()
    watch.look(pool(0.5, 0.5))
    assert watch.look(pool(0.5, 0.5), after_s=999.0) is None


def test_the_number_of_one_who_left_is_given_again() -> None:
    state = pool(0.9, 0.9, 0.9)
    gap = replace(state, members=(state.members[0], state.members[2]))
    watch = Watch()
    watch.look(gap)
    assert watch.look(gap, after_s=6.0) == Create(FleetMember(MemberRole.VERIFIER, 1))


@given(
    st.lists(st.tuples(st.floats(0.0, 1.2), st.integers(0, 50)), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_pools_stay_within_their_bounds_and_do_not_flap(
    looks: list[tuple[float, int]], least: int, more: int
) -> None:
    watch, numbers, changes = Watch(), list(range(least)), []
    for load, waiting in looks:
        members = tuple(
            MemberLoad(
                member=FleetMember(MemberRole.VERIFIER, n), sessions=round(10 * load), load=load
            )
            for n in numbers
        )
        state = replace(
            pool(load, waiting=waiting, least=least, most=least + more), members=members
        )
        action = watch.look(state, after_s=7.0)
        if isinstance(action, Create):
            numbers.append(action.member.index)
        elif isinstance(action, Drain):
            numbers.remove(action.member.index)
        if action is not None:
            changes.append(watch.now)
        assert least <= len(numbers) == len(set(numbers)) <= least + more
        assert set(range(least)) <= set(numbers)
    assert all(b - a >= CONFIG.cool_down_s for a, b in itertools.pairwise(changes))


@pytest.mark.parametrize(
    "values",
    [
        {"max_drafters": -1},
        {"queue_per_verifier": 0.0},
        {"low_load": 0.9},
        {"high_load": 1.5},
        {"look_s": 0.0},
    ],
)
def test_bounds_that_mean_nothing_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        AutoscaleConfig(**values)  # type: ignore[arg-type]


def test_drafters_are_dealt_to_the_cells_of_verifiers() -> None:
    names = [[member.name for member in cell] for cell in cells_of(2, 3)]
    assert names == [["verifier-0", "drafter-0", "drafter-2"], ["verifier-1", "drafter-1"]]
    assert [[m.name for m in cell] for cell in cells_of(2, 0)] == [["verifier-0"], ["verifier-1"]]


@pytest.mark.parametrize("name", ["supervisor", "verifier-", "verifier-01", "drafter--1", "x-1"])
def test_names_of_other_actors_are_no_members(name: str) -> None:
    assert member_of(name) is None


def test_members_are_known_by_their_names() -> None:
    members = members_of(2, 11)
    assert [member_of(member.name) for member in members] == list(members)
