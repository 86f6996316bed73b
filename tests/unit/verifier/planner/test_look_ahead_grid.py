"""Look-ahead is in force where it wins and is left where it loses, at little cost either way.

The service of `test_planner_grid`; whole runs from a planner that knows nothing, compared with the
better of lock-step and look-ahead, each carried out all the time, and with plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from outrider_verifier.planner.speculation_policy import SpeculationPolicy

from outrider.ids import DrafterId
from tests.fakes.simulated_service import PIECE, Ahead, Costs, Service, plain_s
from tests.grids import thorough
from tests.unit.verifier.planner.test_planner_grid import HOPED, MESSAGES, ON_CPUS

NEAR = replace(MESSAGES, exchange=HOPED)
SLOW_LINK = replace(MESSAGES, exchange=(12.7, 13.2, 16.0, 18.6))
WAVES = {1: 36, 8: 40, 32: 12}
SEEDS = {1: 4, 8: 1, 32: 1}


@dataclass(frozen=True)
class Found:
    """Speed over plain decoding, the shares of session rounds under look-ahead and paused."""

    lockstep: float
    ahead: float
    planned: float
    looked: float
    paused: float


def found(
    costs: Costs,
    ahead: Ahead,
    sessions: int,
    tokens: float,
    *,
    on_cpus: bool = False,
    texts: float = 0.0,
    drift: float = 0.0,
    waves: int | None = None,
) -> Found:
    """One world: lock-step always, look-ahead always, and what the planner made of it. `texts`,
    `drift`: see `Service`; `waves`: other than `WAVES`."""
    waves = waves or WAVES[sessions]
    plain = lockstep = always = planned = 0.0
    looked = paused = decoded = 0
    for seed in range(SEEDS[sessions]):
        run = Service(
            costs=costs,
            sessions=sessions,
            extra_tokens=tokens,
            policy=None,
            waves=waves,
            seed=seed,
            texts=texts,
            drift=drift,
        )
        plain += plain_s(costs, sessions, waves, seed)
        lockstep += replace(run, policy=SpeculationPolicy(automatic=False, ceiling_s=0.04)).run()
        always += replace(
            run, policy=SpeculationPolicy(automatic=False, ceiling_s=0.04), ahead=ahead
        ).run()
        policy = SpeculationPolicy(
            automatic=True,
            ceiling_s=0.04,
            times=costs.times,
            chunk_tokens=PIECE,
            shares_cores=on_cpus,
        )
        mine = replace(run, policy=policy, ahead=ahead)
        planned += mine.run()
        looked, paused = looked + mine.looked, paused + mine.paused
        decoded += mine.decoded
    return Found(
        plain / lockstep, plain / always, plain / planned, looked / decoded, paused / decoded
    )


@pytest.mark.parametrize("sessions", [1, thorough(8), 32])  # eight lie between them
@pytest.mark.parametrize("hits", [0.7, thorough(0.8)])  # more hits win by more
def test_look_ahead_that_wins_is_kept(sessions: int, hits: float) -> None:
    world = found(MESSAGES, Ahead(hits=hits), sessions, 2.2)
    assert world.ahead > 1.05 * world.lockstep
    assert world.planned >= (0.97 if sessions < 32 else 0.96) * world.ahead
    assert world.looked > 0.85


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("tokens", [2.2, 1.6])
def test_look_ahead_that_delays_misses_is_left(sessions: int, tokens: float) -> None:
    world = found(MESSAGES, Ahead(hits=0.2, late=2.5), sessions, tokens)
    assert world.ahead < 0.9 * world.lockstep
    assert world.planned >= 0.97 * world.lockstep
    assert world.looked < 0.15
    assert world.paused < 0.1


@pytest.mark.parametrize(
    ("sessions", "texts", "drift"),
    # .8 differs most; fewer lie between it and texts that are alike.
    [*(thorough(1, each, 0.0) for each in (0.3, 0.5)), (1, 0.8, 0.0), (1, 0.5, 0.4), (8, 0.5, 0.4)],
)
def test_texts_that_differ_are_no_reason_to_leave_look_ahead(
    sessions: int, texts: float, drift: float
) -> None:
    waves = 18 if sessions == 1 else WAVES[sessions]
    world = found(MESSAGES, Ahead(hits=0.7), sessions, 2.2, texts=texts, drift=drift, waves=waves)
    assert world.ahead > 1.2 * world.lockstep
    assert world.planned >= 0.97 * world.ahead
    assert world.looked > 0.93


def test_nor_are_they_one_to_keep_it() -> None:
    world = found(MESSAGES, Ahead(hits=0.2, late=2.5), 8, 2.2, texts=0.5)
    assert world.ahead < 0.9 * world.lockstep
    assert world.planned >= 0.97 * world.lockstep
    assert world.looked < 0.05


@pytest.mark.parametrize(
    ("tokens", "texts", "drift"),
    # The first differs most; the others lie between it and texts that are alike.
    [(2.2, 0.8, 0.4), *(thorough(*w) for w in ((1.6, 0.8, 0.4), (2.2, 0.5, 0.4), (1.6, 0.5, 0.0)))],
)
def test_nor_are_they_one_to_leave_speculation(tokens: float, texts: float, drift: float) -> None:
    world = found(MESSAGES, Ahead(hits=0.2, late=2.5), 1, tokens, texts=texts, drift=drift)
    assert world.lockstep > 1.15
    assert world.planned >= 0.965 * world.lockstep
    assert world.paused < 0.6


def test_texts_that_are_bad_for_drafts_cost_nothing_in_the_mean() -> None:
    world = found(MESSAGES, Ahead(hits=0.2, late=2.5), 1, 1.1, texts=0.8, drift=0.4)
    assert world.lockstep < 1.07
    assert world.planned > 1.0
    assert world.looked < 0.05


def test_a_service_of_twelve_answers_loses_little_by_finding_out() -> None:
    world = found(MESSAGES, Ahead(hits=0.7), 1, 2.2, texts=0.5, waves=12)
    assert world.planned >= 0.97 * world.ahead


@pytest.mark.parametrize("sessions", [8, 32])
def test_stale_drafts_that_hardly_stand_are_left(sessions: int) -> None:
    world = found(NEAR, Ahead(hits=0.5, stale=0.5, late=0.5), sessions, 2.2)
    assert world.ahead < 0.9 * world.lockstep
    assert world.planned >= 0.96 * world.lockstep
    assert world.looked < 0.25


@pytest.mark.parametrize("sessions", [1, thorough(8), 32])  # eight lie between them
def test_on_shared_cores_look_ahead_costs_next_to_nothing(sessions: int) -> None:
    world = found(ON_CPUS, Ahead(hits=0.6, stretch=1.4), sessions, 2.2, on_cpus=True)
    assert world.ahead < 0.95 * world.lockstep
    assert world.planned >= 0.97 * world.lockstep
    assert world.looked < 0.15


def test_on_cpus_look_ahead_that_wins_is_found_in_the_end() -> None:
    world = found(ON_CPUS, Ahead(hits=0.7), 1, 2.2, on_cpus=True)
    assert world.ahead > 1.2 * world.lockstep
    assert world.planned > 1.1 * world.lockstep


@pytest.mark.parametrize("sessions", [1, thorough(8), 32])  # eight lie between them
@pytest.mark.parametrize(
    ("costs", "ahead"),
    [
        (SLOW_LINK, Ahead(hits=0.7)),
        (MESSAGES, Ahead(hits=0.2, late=2.5)),
        (MESSAGES, Ahead(hits=0.3, late=5.0)),
        (MESSAGES, Ahead(hits=0.6, late=0.5)),
    ],
    ids=["slow link", "late", "later", "hits"],
)
def test_it_is_never_below_plain_decoding(costs: Costs, ahead: Ahead, sessions: int) -> None:
    world = found(costs, ahead, sessions, 1.1)
    assert world.planned >= 0.97
    assert world.planned >= 0.94 * max(world.lockstep, world.ahead)


@pytest.mark.parametrize("sessions", [1, thorough(8), 32])  # eight lie between them
def test_over_a_slow_link_look_ahead_makes_drafts_pay(sessions: int) -> None:
    world = found(SLOW_LINK, Ahead(hits=0.7), sessions, 2.2)
    assert world.lockstep < 1.0
    assert world.planned >= 0.94 * world.ahead > 1.15


def test_plans_are_carried_out_as_they_are_where_nothing_is_decided() -> None:
    run = Service(costs=MESSAGES, sessions=1, extra_tokens=2.2, policy=None, ahead=Ahead(hits=0.1))
    policy = SpeculationPolicy(automatic=False, ceiling_s=0.04)
    mine = replace(run, policy=policy)
    mine.run()
    assert mine.looked == mine.decoded
    assert policy.drafter_response_s(DrafterId("drafter")) > 0.0, "misses tell how long it takes"
    lockstep = replace(run, ahead=None, policy=SpeculationPolicy(automatic=False, ceiling_s=0.04))
    lockstep.run()
    assert lockstep.looked == 0
