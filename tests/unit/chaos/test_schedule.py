"""A seed is a schedule, always the same one; seeds go through every fault in every phase."""

from __future__ import annotations

import itertools

from outrider.chaos.faults import CELLS, KINDS, MANGLING, Kind, Phase, Role
from outrider.chaos.schedule import Schedule
from outrider.chaos.shrink import shrink

SEEDS = range(len(CELLS))


def test_a_seed_is_always_the_same_schedule() -> None:
    for seed in range(50):
        assert Schedule.of(seed) == Schedule.of(seed)
        assert str(Schedule.of(seed)) == str(Schedule.of(seed))
    assert Schedule.of(1) != Schedule.of(2)


def test_as_many_seeds_as_there_are_cells_hit_every_role_with_every_fault_in_every_phase() -> None:
    first = {
        (fault.kind, fault.role, fault.phase)
        for fault in (Schedule.of(seed).faults[0] for seed in SEEDS)
    }
    assert first == set(CELLS)
    assert {role for _, role, _ in first} == set(Role)
    assert {phase for _, _, phase in first} == set(Phase)


def test_faults_fit_those_they_hit() -> None:
    for seed in SEEDS:
        schedule = Schedule.of(seed)
        for fault in schedule.faults:
            assert fault.kind in KINDS[fault.role]
            assert fault.index < schedule.fleet.count(fault.role, len(schedule.asks))
            # Memory that two processes share is no link: nothing changes its frames.
            assert not (schedule.fleet.lanes and fault.kind in MANGLING)


def test_shrinking_keeps_what_fails_and_nothing_else() -> None:
    def fails(schedule: Schedule) -> bool:
        return any(fault.kind is culprit.kind for fault in schedule.faults)

    schedule = next(s for s in map(Schedule.of, SEEDS) if len(s.faults) == 3 and len(s.asks) > 3)
    culprit = schedule.faults[1]
    least = shrink(schedule, fails)
    assert [fault.kind for fault in least.faults] == [culprit.kind]
    assert len(least.asks) == 1


def test_faults_of_clients_follow_their_requests() -> None:
    schedule = next(
        s
        for s in map(Schedule.of, itertools.count())
        if s.faults[0].role is Role.CLIENT and s.faults[0].index == 2 and len(s.faults) == 1
    )
    assert schedule.without_ask(0).faults[0].index == 1
    assert schedule.without_ask(2).faults == ()
    assert schedule.without_ask(len(schedule.asks) - 1 if len(schedule.asks) > 3 else 0).faults


def test_every_kind_of_fault_says_what_it_is() -> None:
    said = {str(fault).split()[0] for seed in SEEDS for fault in Schedule.of(seed).faults}
    assert said == {kind.value for kind in Kind}
