"""In no cell of temperature, model, load and placement is speculation slower than plain decoding.

Costs are those measured on H200s; prompts arrive all the time, answers are short, and whole runs
count: two answers a client, the beginning and the end included, with a planner that knows nothing.
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
"""Draft accepted tokens, by temperature."""
TODAY, HOPED, OWN = (2.7, 3.2, 6.0, 8.6), (1.3, 1.5, 2.5, 3.0), (0.0, 0.0, 0.0, 0.0)
LARGE_S, SMALL_S = (4.0, 4.8, 5.7, 6.8), (1.0, 1.1, 1.4, 2.0)
LARGE = Costs(plain=LARGE_S, verify=(4.3, 5.0, 7.6, 11.4), exchange=TODAY, piece=0.6)
SMALL = Costs(plain=SMALL_S, verify=(1.1, 1.3, 2.0, 3.2), exchange=TODAY, piece=0.15, host=0.5)
LARGE_OWN = replace(LARGE, verify=(4.6, 5.2, 7.0, 9.6), exchange=OWN)
SMALL_OWN = replace(SMALL, verify=(1.5, 1.7, 2.4, 3.6), exchange=OWN)
BURST = Costs(
    plain=(4.0, 4.2, 4.4, 4.6),
    verify=(4.3, 4.7, 6.0, 7.0),
    exchange=(1.6, 2.2, 3.6, 5.5),
    piece=0.25,
    host=0.2,
    features=0.03,
    queued=0.7,
)
"""As LARGE, of another day; the drafter takes up one batch after the other."""
TREES_OWN = replace(SMALL_OWN, plain=(0.75, 0.8, 1.0, 1.2), host=0.05, own_host=1.2)
"""A small model's trees, of which the host has more to do than of plain rounds."""
CHAINS_OWN = replace(
    SMALL_OWN,
    plain=(0.9, 1.0, 1.5, 2.1),
    verify=(1.2, 1.3, 1.8, 2.9),
    host=0.7,
    own_host=-0.4,
    opening=1.0,
)
"""A small model's chains, whose rounds hide the host's share; each session takes it as long to
open as many of a verifier with hundreds of sessions."""
SEEDS = {1: 16, 8: 4, 32: 4, 64: 2}
"""A single session's whole run is two answers, of which one may have three tokens."""


def planner(costs: Costs, *, automatic: bool = True, tables: bool = True) -> SpeculationPolicy:
    if not tables:
        return SpeculationPolicy(automatic=automatic, ceiling_s=0.04)
    return SpeculationPolicy(
        automatic=automatic, ceiling_s=0.04, times=costs.times, chunk_tokens=PIECE
    )


def service(costs: Costs, sessions: int, temperature: float, *, waves: int = 2) -> Service:
    return Service(
        costs=costs,
        sessions=sessions,
        extra_tokens=EXTRA[temperature],
        policy=None,
        own=costs.exchange == OWN,
        waves=waves,
        temperature=temperature,
    )


@pytest.mark.parametrize("temperature", EXTRA)
@pytest.mark.parametrize("sessions", ROWS)
@pytest.mark.parametrize(
    ("costs", "floor"),
    [
        (LARGE, 0.97),
        # Its exchange lies between the other two's.
        thorough(replace(LARGE, exchange=HOPED), 0.97),
        (LARGE_OWN, 0.97),
        # Two answers take .2 s there, and to learn what an exchange takes takes three of them.
        (SMALL, 0.94),
        thorough(replace(SMALL, exchange=HOPED), 0.95),
        (SMALL_OWN, 0.95),
    ],
    ids=["8B", "8B-hoped", "8B-own", "135M", "135M-hoped", "135M-own"],
)
def test_whole_short_runs(costs: Costs, floor: float, sessions: int, temperature: float) -> None:
    run = service(costs, sessions, temperature)
    ratio = over_plain(lambda: planner(costs), run, seeds=SEEDS[sessions])
    assert ratio >= floor


@pytest.mark.parametrize("temperature", [1.5, 2.0])
@pytest.mark.parametrize("sessions", [8, 64])
def test_own_drafts_that_lose_by_what_the_host_has_to_do_are_given_up(
    sessions: int, temperature: float
) -> None:
    run = replace(service(TREES_OWN, sessions, temperature, waves=12), policy=planner(TREES_OWN))
    took_s = run.run()
    assert plain_s(TREES_OWN, sessions, 12, 0) / took_s >= 0.94
    assert run.paused > 0.9 * run.decoded


@pytest.mark.parametrize("extra", [0.4, 1.7, 3.0])
def test_own_drafts_are_made_at_the_loads_where_they_win_whatever_load_was_before(
    extra: float,
) -> None:
    costs = replace(TREES_OWN, verify=(1.2, 1.7, 2.6, 3.9), own_host=0.0)
    policy, now = planner(costs), 0.0
    for seed, sessions in enumerate((1, 64, 8, 64, 1)):
        run = replace(service(costs, sessions, 0.0, waves=4), extra_tokens=extra, seed=seed)
        always_s = replace(run, policy=planner(costs, automatic=False)).run()
        run = replace(run, policy=policy, now=now)
        assert run.run() < 1.06 * min(plain_s(costs, sessions, 4, seed), always_s)
        now = run.now + 0.05


@pytest.mark.parametrize("opening", [1.0, 2.0])
def test_own_drafts_that_win_are_not_charged_for_sessions_that_begin(opening: float) -> None:
    costs = replace(CHAINS_OWN, opening=opening)
    first = replace(service(costs, 64, 0.0, waves=4), extra_tokens=1.6, spread_s=0.003)
    policy = planner(costs)
    plain = replace(first, policy=policy, speculative=False)
    plain.run()
    now = plain.now
    for seed in range(3):
        run = replace(first, policy=policy, seed=seed, now=now + 0.6)
        always = replace(first, policy=planner(costs, automatic=False), seed=seed)
        assert run.run() < 1.06 * always.run()
        now = run.now
    assert plain_s(costs, 64, 4, 0) > 1.3 * always.now


@pytest.mark.parametrize("temperature", [thorough(1.5), 2.0])  # at 2 drafts lose most
@pytest.mark.parametrize("sessions", ROWS)
@pytest.mark.parametrize("costs", [LARGE, SMALL, LARGE_OWN], ids=["8B", "135M", "8B-own"])
def test_what_was_found_out_is_kept_for_the_sessions_that_follow(
    costs: Costs, sessions: int, temperature: float
) -> None:
    plain = drafts = 0.0
    for seed in range(min(SEEDS[sessions], 4)):
        policy = planner(costs)
        first = replace(service(costs, sessions, temperature), seed=seed, policy=policy)
        first.run()
        second = replace(first, seed=seed + 50, now=first.now + 0.1)
        drafts += second.run()
        plain += plain_s(costs, sessions, 2, seed + 50)
    assert plain / drafts >= 0.98


@pytest.mark.parametrize("sessions", [32, 64])
def test_drafts_that_have_become_good_are_found_though_many_sessions_come_back_slowly(
    sessions: int,
) -> None:
    # All have to be caught up with: until then rounds take twice as long, and some have no draft.
    costs = replace(BURST, reading=1.0)
    for seed in range(2):
        run = replace(service(costs, sessions, 2.0, waves=3), seed=seed, policy=planner(costs))
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
        run = replace(service(costs, 64, 0.0, waves=3), seed=seed, policy=planner(costs))
        run.ahead, run.stalls = Ahead(hits=0.3, stale=0.9, late=1.5), 0.02
        run.run()
        left += run.paused > 0.3 * run.decoded
    assert left <= 1


@pytest.mark.parametrize(("sessions", "waves"), [(1, 24), (8, 16), (32, 12), (64, 12)])
def test_who_decodes_plainly_does_not_pay_for_features(sessions: int, waves: int) -> None:
    costs = replace(SMALL, features=0.2)
    run = replace(service(costs, sessions, 1.5, waves=waves), policy=planner(costs))
    took_s = run.run()
    assert plain_s(SMALL, sessions, waves, 0) / took_s >= 0.98
    assert run.featured < 0.03 * run.rounds


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize(
    ("costs", "rounds"),
    [(replace(LARGE, features=0.02), 3000), (replace(SMALL, features=0.2), 12_000)],
    ids=["kept", "let-go"],
)
def test_drafts_that_have_become_good_are_found_whoever_keeps_features(
    costs: Costs, rounds: int, sessions: int
) -> None:
    policy, answer = planner(costs), 110
    bad = replace(service(costs, sessions, 2.0, waves=20), policy=policy)
    bad.run()
    assert bad.paused > 0.9 * bad.decoded
    assert (bad.featured > 0.8 * bad.rounds) is (costs.plain == LARGE_S)
    # To the planner the drafter is the same; now it answers at once and is mostly right.
    good = replace(
        bad,
        costs=replace(costs, exchange=(0.3, 0.4, 0.6, 0.8)),
        extra_tokens=3.0,
        waves=rounds // answer,
        now=bad.now + 0.1,
        seed=1,
    )
    good.run()
    then = replace(good, now=good.now + 0.1, seed=2, paused=0, decoded=0, waves=20)
    then.run()
    # At its end there are fewer sessions, where drafts are yet to be tried again.
    assert then.paused < 0.2 * then.decoded


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize(("sessions", "waves"), [(1, 16), (8, 8), (64, 5)])
def test_longer_runs_of_a_small_model(sessions: int, waves: int, temperature: float) -> None:
    run = service(SMALL, sessions, temperature, waves=waves)
    assert over_plain(lambda: planner(SMALL), run, seeds=4 if sessions == 1 else 3) >= 0.97


@pytest.mark.parametrize("costs", [LARGE, LARGE_OWN], ids=["8B", "8B-own"])
@pytest.mark.parametrize("sessions", [1, 8, 32])
def test_drafts_that_win_are_hardly_ever_left(costs: Costs, sessions: int) -> None:
    run, seeds = service(costs, sessions, 0.0), SEEDS[sessions]
    fixed = over_plain(lambda: planner(costs, automatic=False), run, seeds=seeds)
    assert fixed > 1.3
    assert over_plain(lambda: planner(costs), run, seeds=seeds) >= 0.93 * fixed


@pytest.mark.parametrize("sessions", ROWS)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_without_the_devices_times_plain_rounds_are_measured(
    sessions: int, temperature: float
) -> None:
    run = service(LARGE, sessions, temperature)
    ratio = over_plain(lambda: planner(LARGE, tables=False), run, seeds=SEEDS[sessions])
    assert ratio >= 0.96


@pytest.mark.parametrize("seed", range(4))
def test_a_losing_drafter_is_paused_within_24_rounds_while_prompts_arrive(seed: int) -> None:
    policy = planner(LARGE)
    run = replace(service(LARGE, 64, 1.5), seed=seed, policy=policy)
    run.run()
    # Rounds of nothing but the first prompts come before: nobody decodes yet.
    drafted = run.decoded - run.paused
    assert drafted <= 24 * 64
