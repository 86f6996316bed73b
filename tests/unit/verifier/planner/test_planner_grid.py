"""In no cell of temperature, load and placement is speculation slower than plain decoding.

Costs are those of an 8B model measured on H200s, and of a small model on two cores; prompts arrive
all the time, answers are short, and whole runs count: the beginning and the end included, with a
policy that knows nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from outrider_verifier.planner.speculation_policy import SpeculationPolicy

from tests.fakes.simulated_service import (
    PIECE,
    ROWS,
    Ahead,
    Costs,
    Service,
    over_plain,
    plain_s,
)
from tests.grids import thorough

EXTRA = {0.0: 2.2, 0.7: 1.6, 1.0: 1.1, 1.5: 0.4, 2.0: 0.02}
"""Accepted draft tokens of a round, by temperature."""
TODAY, HOPED, NONE = (2.7, 3.2, 6.0, 8.6), (1.3, 1.5, 2.5, 3.0), (0.0, 0.0, 0.0, 0.0)
MESSAGES = Costs(
    plain=(4.0, 4.8, 5.7, 6.8), verify=(4.3, 5.0, 7.6, 11.4), exchange=TODAY, piece=0.6
)
IN_PROCESS = replace(MESSAGES, verify=(4.6, 5.2, 7.0, 9.6), exchange=NONE)
BURST = Costs(
    plain=(4.0, 4.2, 4.4, 4.6),
    verify=(4.3, 4.7, 6.0, 7.0),
    exchange=(1.6, 2.2, 3.6, 5.5),
    piece=0.25,
    host=0.2,
    queued=0.7,
)
"""As MESSAGES, of another day; the drafter takes up one batch after the other."""
ON_CPUS = Costs(
    plain=(30.0, 60.0, 150.0, 280.0),
    verify=(36.0, 90.0, 300.0, 560.0),
    exchange=(20.0, 40.0, 120.0, 240.0),
    piece=20.0,
)
SEEDS = {1: 16, 8: 4, 32: 4, 64: 2}
"""A single session's whole run is two answers, of which one may have three tokens."""


def policy_for(costs: Costs, *, automatic: bool = True, tables: bool = True) -> SpeculationPolicy:
    if not tables:
        return SpeculationPolicy(automatic=automatic, ceiling_s=0.04, shares_cores=True)
    return SpeculationPolicy(
        automatic=automatic,
        ceiling_s=0.04,
        times=costs.times,
        draft_shapes=costs.draft_shapes if costs.exchange == NONE else lambda _: (),
        chunk_tokens=PIECE,
    )


def service(costs: Costs, sessions: int, temperature: float, *, waves: int = 2) -> Service:
    return Service(
        costs=costs,
        sessions=sessions,
        extra_tokens=EXTRA[temperature],
        policy=None,
        own=costs.exchange == NONE,
        waves=waves,
        temperature=temperature,
    )


@pytest.mark.parametrize("temperature", EXTRA)
@pytest.mark.parametrize("sessions", ROWS)
@pytest.mark.parametrize(
    "costs",
    # The exchange of the second one lies between the other two's.
    [MESSAGES, thorough(replace(MESSAGES, exchange=HOPED)), IN_PROCESS],
    ids=["messages", "messages-hoped", "in-process"],
)
def test_whole_short_runs(costs: Costs, sessions: int, temperature: float) -> None:
    run = service(costs, sessions, temperature)
    ratio = over_plain(lambda: policy_for(costs), run, seeds=SEEDS[sessions])
    assert ratio >= 0.94


@pytest.mark.parametrize("temperature", EXTRA)
@pytest.mark.parametrize("sessions", [1, 8, 32])
def test_runs_without_the_devices_times(sessions: int, temperature: float) -> None:
    run = service(ON_CPUS, sessions, temperature, waves=4)
    ratio = over_plain(lambda: policy_for(ON_CPUS, tables=False), run, seeds=2)
    assert ratio >= 0.95


@pytest.mark.parametrize("temperature", [thorough(1.5), 2.0])  # at 2 drafts lose most
@pytest.mark.parametrize("sessions", ROWS)
@pytest.mark.parametrize("costs", [MESSAGES, IN_PROCESS], ids=["messages", "in-process"])
def test_what_was_found_out_is_kept_for_the_sessions_that_follow(
    costs: Costs, sessions: int, temperature: float
) -> None:
    plain = drafts = 0.0
    for seed in range(min(SEEDS[sessions], 4)):
        policy = policy_for(costs)
        first = replace(service(costs, sessions, temperature), seed=seed, policy=policy)
        first.run()
        second = replace(first, seed=seed + 50, now=first.now + 0.1)
        drafts += second.run()
        plain += plain_s(costs, sessions, 2, seed + 50)
    assert plain / drafts >= 0.97


@pytest.mark.parametrize("costs", [MESSAGES, IN_PROCESS], ids=["messages", "in-process"])
@pytest.mark.parametrize("sessions", [1, 8, 32])
def test_drafts_that_win_are_hardly_ever_left(costs: Costs, sessions: int) -> None:
    run, seeds = service(costs, sessions, 0.0), SEEDS[sessions]
    fixed = over_plain(lambda: policy_for(costs, automatic=False), run, seeds=seeds)
    assert fixed > 1.3
    assert over_plain(lambda: policy_for(costs), run, seeds=seeds) >= 0.95 * fixed


@pytest.mark.parametrize(
    ("extra", "slack"),
    # At 1.7 drafts are worth next to nothing at 64 sessions, and rounds of both kinds cost most.
    [(0.4, 1.08), (1.7, 1.35), (3.0, 1.08)],
)
def test_in_process_drafts_are_made_at_the_loads_where_they_win_whatever_load_was_before(
    extra: float, slack: float
) -> None:
    costs = replace(
        IN_PROCESS, plain=(0.75, 0.8, 1.0, 1.2), verify=(1.2, 1.7, 2.6, 3.9), piece=0.15
    )
    policy, now = policy_for(costs), 0.0
    for seed, sessions in enumerate((1, 64, 8, 64, 1)):
        run = replace(service(costs, sessions, 0.0, waves=4), extra_tokens=extra, seed=seed)
        always_s = replace(run, policy=policy_for(costs, automatic=False)).run()
        run = replace(run, policy=policy, now=now)
        assert run.run() < slack * min(plain_s(costs, sessions, 4, seed), always_s)
        now = run.now + 0.5


@pytest.mark.parametrize("sessions", [32, 64])
def test_drafts_that_have_become_good_are_found_though_many_sessions_come_back_slowly(
    sessions: int,
) -> None:
    # The drafter has to catch up with all: until then rounds take twice as long, and some have no
    # draft.
    costs = replace(BURST, reading=1.0)
    for seed in range(2):
        run = replace(service(costs, sessions, 2.0, waves=3), seed=seed, policy=policy_for(costs))
        run.run()
        assert run.paused > 0.5 * run.decoded
        run = replace(run, extra_tokens=EXTRA[0.0], waves=4)
        for wave in range(5):
            run = replace(run, now=run.now + 0.1, seed=seed + 100 + wave, paused=0, decoded=0)
            run.run()
        assert run.paused < 0.5 * run.decoded


@pytest.mark.parametrize("reading", [0.5, 1.5])
def test_drafts_that_win_survive_stalls_and_the_burst_in_which_64_sessions_begin(
    reading: float,
) -> None:
    costs = replace(BURST, reading=reading)
    left = 0
    for seed in range(10):
        run = replace(service(costs, 64, 0.0, waves=3), seed=seed, policy=policy_for(costs))
        run.ahead, run.stalls = Ahead(hits=0.3, stale=0.9, late=1.5), 0.02
        run.run()
        left += run.paused > 0.3 * run.decoded
    assert left <= 1


@pytest.mark.parametrize("seed", range(4))
def test_a_losing_drafter_is_left_within_24_rounds_while_prompts_arrive(seed: int) -> None:
    policy = policy_for(MESSAGES)
    run = replace(service(MESSAGES, 64, 1.5), seed=seed, policy=policy)
    run.run()
    # Rounds of nothing but the first prompts come before: nobody decodes yet.
    drafted = run.decoded - run.paused
    assert drafted <= 24 * 64


@pytest.mark.parametrize(
    ("sessions", "has_trees"), [(1, True), (8, True), (12, False), (64, False)]
)
def test_the_shape_of_in_process_drafts_is_the_faster_one(sessions: int, has_trees: bool) -> None:
    # Trees are faster up to ten sessions or so, and not to be had beyond sixteen.
    costs = replace(IN_PROCESS, trees=(4.9, 6.2, 16.0, 30.0))
    waves = 16 if sessions == 1 else 6
    run = replace(service(costs, sessions, 0.0, waves=waves), policy=policy_for(costs))
    took_s = run.run()
    chains = replace(run, costs=IN_PROCESS, policy=policy_for(IN_PROCESS))
    trees = run.trees / run.rounds
    assert trees > 0.6 if has_trees else trees < 0.3
    assert took_s <= 1.02 * chains.run()
