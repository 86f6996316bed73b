"""A seed is a schedule, always the same one; seeds go through every fault in every phase."""

from __future__ import annotations

import itertools

from outrider.chaos.faults import (
    CELLS,
    FAULTS_BY_ROLE,
    FRAME_FAULTS,
    FaultKind,
    FaultPhase,
    FaultRole,
)
from outrider.chaos.schedule import FaultSchedule
from outrider.chaos.shrink import shrink_schedule

SEEDS = range(len(CELLS))


def test_a_seed_is_always_the_same_schedule() -> None:
    for seed in range(50):
        assert FaultSchedule.from_seed(seed) == FaultSchedule.from_seed(seed)
        assert str(FaultSchedule.from_seed(seed)) == str(FaultSchedule.from_seed(seed))
    assert FaultSchedule.from_seed(1) != FaultSchedule.from_seed(2)


def test_as_many_seeds_as_there_are_cells_hit_every_role_with_every_fault_in_every_phase() -> None:
    first = {
        (fault.kind, fault.role, fault.phase)
        for fault in (FaultSchedule.from_seed(seed).faults[0] for seed in SEEDS)
    }
    assert first == set(CELLS)
    assert {role for _, role, _ in first} == set(FaultRole)
    assert {phase for _, _, phase in first} == set(FaultPhase)


def test_faults_fit_those_they_hit() -> None:
    for seed in SEEDS:
        schedule = FaultSchedule.from_seed(seed)
        for fault in schedule.faults:
            assert fault.kind in FAULTS_BY_ROLE[fault.role]
            assert fault.index < schedule.fleet.count(fault.role, len(schedule.asks))
            # Memory that two processes share is no link: nothing changes its frames.
            assert not (schedule.fleet.shm_channels and fault.kind in FRAME_FAULTS)


def test_shrinking_keeps_what_fails_and_nothing_else() -> None:
    def fails(schedule: FaultSchedule) -> bool:
        return any(fault.kind is culprit.kind for fault in schedule.faults)

    schedule = next(
        s for s in map(FaultSchedule.from_seed, SEEDS) if len(s.faults) == 3 and len(s.asks) > 3
    )
    culprit = schedule.faults[1]
    least = shrink_schedule(schedule, fails)
    assert [fault.kind for fault in least.faults] == [culprit.kind]
    assert len(least.asks) == 1


def test_faults_of_clients_follow_their_requests() -> None:
    schedule = next(
        s
        for s in map(FaultSchedule.from_seed, itertools.count())
        if s.faults[0].role is FaultRole.CLIENT and s.faults[0].index == 2 and len(s.faults) == 1
    )
    assert schedule.without_ask(0).faults[0].index == 1
    assert schedule.without_ask(2).faults == ()
    assert schedule.without_ask(len(schedule.asks) - 1 if len(schedule.asks) > 3 else 0).faults


def test_every_kind_of_fault_says_what_it_is() -> None:
    said = {
        str(fault).split()[0] for seed in SEEDS for fault in FaultSchedule.from_seed(seed).faults
    }
    assert said == {kind.value for kind in FaultKind}
