"""Whatever drafts cost and however many stand, a speculation controller never ends far below plain
decoding."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.spec.decoding_mode import DecodingMode, DecodingModeReason
from outrider.speculation.measurements import RoundObservation
from outrider.speculation.speculation_controller import SpeculationController
from tests.grids import thorough

PLAIN_S = 0.001
ROUNDS = 2000
DRAFT = 4


class World:
    """Rounds of one session: what they take and emit."""

    def __init__(self, cost: float, rate: float, *, noise: float = 0.08, seed: int = 0) -> None:
        """A round with drafts takes `cost` plain ones; a draft token stands with P = `rate`."""
        self.cost, self.rate, self.noise = cost, rate, noise
        self.rng = np.random.default_rng(seed)
        self.tokens = 0
        self.seconds = 0.0
        self.drafted = 0
        self.before: DecodingMode | None = None

    def round(self, contest: SpeculationController) -> DecodingMode:
        """One round in the mode in force. A change of mode costs four more."""
        mode = contest.current_mode
        drafts = mode is DecodingMode.SPECULATE
        stood = self.rng.random(DRAFT) < self.rate
        tokens = 1 + (int(np.argmin(stood)) if not stood.all() else DRAFT) * drafts
        seconds = PLAIN_S * (self.cost if drafts else 1.0)
        seconds *= math.exp(self.rng.normal(0.0, self.noise))
        settled = mode is self.before
        if not settled and self.before is not None:
            seconds += 4.0 * PLAIN_S
        contest.observe_round(mode, seen(tokens, seconds, settled=settled))
        self.before = mode
        self.tokens += tokens
        self.seconds += seconds
        self.drafted += drafts
        return mode

    @property
    def over_plain(self) -> float:
        """Speed relative to plain decoding, whose rounds are as noisy."""
        return self.tokens * PLAIN_S * math.exp(self.noise**2 / 2.0) / self.seconds

    @property
    def gain(self) -> float:
        """What speculation is worth when it settled."""
        emitted = sum(self.rate**d for d in range(DRAFT + 1))
        return emitted / self.cost


def seen(
    tokens: int, seconds: float, *, settled: bool = True, timed: bool = True
) -> RoundObservation:
    """A round of a single session."""
    return RoundObservation(
        rows=1,
        tokens=tokens,
        squares=tokens * tokens,
        seconds=seconds,
        sessions=1,
        is_load_steady=settled,
        is_timed=timed,
    )


def told() -> SpeculationController:
    """A speculation controller that was told what plain rounds take."""
    return SpeculationController(expected_plain_s=PLAIN_S)


START = 64
"""Rounds after which a speculation controller has found out: what drafts cost until then is bounded
by rounds."""


@pytest.mark.parametrize("cost", [1.05, 1.5, 2.5, 5.0, 12.0, 40.0])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("make", [SpeculationController, told])
# What would fall below by bad luck falls in one of the 72 cells: two worlds of each are enough.
@pytest.mark.parametrize("seeds", [range(2), thorough(range(2, 4))], ids=["few", "rest"])
def test_no_cell_falls_below_plain_and_gains_are_had(
    make: Callable[[], SpeculationController], cost: float, rate: float, seeds: range
) -> None:
    for seed in seeds:
        world, contest = World(cost, rate, seed=seed), make()
        for _ in range(START):
            world.round(contest)
        if world.gain < 0.7:
            assert world.drafted < 30
        world.tokens, world.seconds, world.drafted = 0, 0.0, 0
        for _ in range(ROUNDS):
            world.round(contest)
        assert world.over_plain >= 0.97, (seed, world.drafted)
        if world.gain > 1.4:
            assert world.over_plain >= 0.97 * world.gain, (seed, world.drafted)
        if world.gain < 0.7:
            assert world.drafted < 0.05 * ROUNDS


@pytest.mark.parametrize(
    ("cost", "rate", "mode"), [(1.2, 0.8, DecodingMode.SPECULATE), (10, 0.2, DecodingMode.PLAIN)]
)
def test_it_begins_with_speculation_and_settles_within_a_few_rounds(
    cost: float, rate: float, mode: DecodingMode
) -> None:
    contest, world = SpeculationController(), World(cost, rate)
    for _ in range(8):
        assert contest.current_mode is DecodingMode.SPECULATE
        assert contest.decision_reason is DecodingModeReason.MEASURING
        world.round(contest)
    for _ in range(24):
        world.round(contest)
    assert contest.current_mode is mode
    assert contest.decision_reason is DecodingModeReason.FASTER


@pytest.mark.parametrize("cost", [3.0, 6.0, 40.0])
def test_hopeless_drafts_cost_little_time_where_it_is_known_what_plain_rounds_take(
    cost: float,
) -> None:
    contest, world = told(), World(cost, 0.0)
    while contest.current_mode is DecodingMode.SPECULATE:
        world.round(contest)
    # As many rounds as lose so much, but two at least behind the first: one may have been a stall.
    assert world.drafted <= 3 + 6.0 / (cost - 1.0)
    for _ in range(18):
        world.round(contest)
    assert contest.current_mode is DecodingMode.PLAIN
    assert contest.decision_reason is DecodingModeReason.FASTER


def test_one_stalled_round_ends_nothing() -> None:
    contest = told()
    for seconds in (0.0012, 1.0, *[0.0012] * 30, 1.0, *[0.0012] * 200):
        if contest.current_mode is DecodingMode.PLAIN:
            contest.observe_round(DecodingMode.PLAIN, seen(1, PLAIN_S))
        else:
            contest.observe_round(DecodingMode.SPECULATE, seen(2, seconds))
        assert contest.active_mode is DecodingMode.SPECULATE


@pytest.mark.parametrize("begun", [8, 40])
def test_a_stall_that_sessions_meet_in_two_halves_ends_nothing(begun: int) -> None:
    # Three tokens in 2.5 plain rounds: 1.2 of plain decoding, nothing to be proud of yet.
    contest = told()
    for seconds in (*[0.0025] * begun, 0.04, 0.03, *[0.0025] * 60):
        if contest.current_mode is DecodingMode.PLAIN:
            contest.observe_round(DecodingMode.PLAIN, seen(1, PLAIN_S))
        for _ in range(2):
            half = RoundObservation(
                rows=32, tokens=96, squares=288, seconds=32 * seconds, sessions=64
            )
            contest.observe_round(DecodingMode.SPECULATE, half)
        assert contest.active_mode is DecodingMode.SPECULATE


def test_rounds_that_have_become_long_are_no_stall() -> None:
    contest, long = told(), 0
    for seconds in (*[0.0025] * 60, *[0.01] * 60):
        drafts = contest.current_mode is DecodingMode.SPECULATE
        contest.observe_round(
            contest.current_mode, seen(3, seconds) if drafts else seen(1, PLAIN_S)
        )
        long += drafts and seconds > 0.0025
    assert contest.active_mode is DecodingMode.PLAIN
    assert long <= 6


def test_an_expectation_that_is_wrong_costs_one_comparison() -> None:
    # Plain rounds take twice as long as the tables say, so drafts win after all.
    world, contest = World(1.5, 0.7), SpeculationController(expected_plain_s=PLAIN_S / 2.5)
    plain = [world.round(contest) is DecodingMode.PLAIN for _ in range(150)]
    assert sum(plain) <= 20
    assert contest.current_mode is DecodingMode.SPECULATE
    assert contest.plain_round_s == pytest.approx(PLAIN_S, rel=0.5)


@pytest.mark.parametrize("wrong", [1.5, 2.0, 2.6, 4.0])
def test_drafts_that_win_only_by_an_expectation_that_is_too_long_are_soon_left(
    wrong: float,
) -> None:
    # Costs and tokens of 8 sessions of a small model with a drafter outside.
    world, contest = World(4.3, 0.6), SpeculationController(expected_plain_s=wrong * PLAIN_S)
    assert world.gain < 0.6
    for _ in range(150):
        world.round(contest)
    assert contest.active_mode is DecodingMode.PLAIN
    assert world.drafted <= (40 if wrong < 3.0 else 110)


@pytest.mark.parametrize("cost", [0.97, 1.0, 1.03])
def test_drafts_of_which_nothing_stands_are_left_however_cheap(cost: float) -> None:
    world, contest = World(cost, 0.0), told()
    modes = [world.round(contest) for _ in range(3000)]
    assert modes.index(DecodingMode.PLAIN) < 200
    assert modes[300:].count(DecodingMode.SPECULATE) < 0.1 * len(modes)
    # Once they stand, that is found.
    world.rate = 0.6
    modes = [world.round(contest) for _ in range(2500)]
    assert modes[-100:].count(DecodingMode.SPECULATE) > 90


def test_plain_rounds_are_hardly_measured_where_drafts_win_by_far() -> None:
    world, contest = World(1.1, 0.8), told()
    assert world.gain > 2.0
    modes = [world.round(contest) for _ in range(200)]
    assert modes.index(DecodingMode.PLAIN) > 60
    assert modes.count(DecodingMode.PLAIN) <= 8


def test_rounds_whose_time_tells_nothing_still_tell_of_tokens() -> None:
    contest = told()
    for _ in range(40):
        contest.observe_round(DecodingMode.SPECULATE, seen(2, 1.0, timed=False))
    assert contest.current_mode is DecodingMode.SPECULATE
    for _ in range(3):
        contest.observe_round(DecodingMode.SPECULATE, seen(1, 0.009))
    assert contest.current_mode is DecodingMode.PLAIN


# Sixteen times 6,000 rounds find with 95 % what happens once in 32,000.
@pytest.mark.parametrize("seed", [*range(16), *map(thorough, range(16, 40))])
def test_speculation_that_wins_clearly_is_never_left_but_for_probes(seed: int) -> None:
    # Drafts that win 2.2 times, noisy rounds, and stalls of up to a second.
    world, contest = World(1.2, 0.66, noise=0.3, seed=seed), SpeculationController()
    paused = longest = 0
    for _ in range(3 * ROUNDS):
        if world.rng.random() < 0.002:
            contest.observe_round(contest.current_mode, seen(1, world.rng.uniform(0.01, 1.0)))
        plain = world.round(contest) is DecodingMode.PLAIN
        longest = longest + 1 if plain else 0
        assert longest <= 17
        paused += plain
    assert paused < 0.02 * 3 * ROUNDS


def test_speculation_that_recovers_is_used_again_and_one_that_fails_is_left() -> None:
    contest, world = SpeculationController(), World(1.3, 0.0)
    for _ in range(300):
        world.round(contest)
    assert (
        contest.current_mode is DecodingMode.PLAIN
        or contest.decision_reason is DecodingModeReason.PROBE
    )
    world.rate = 0.9
    assert _rounds_until(contest, world, DecodingMode.SPECULATE) < 3000
    world.rate = 0.0
    assert _rounds_until(contest, world, DecodingMode.PLAIN) < 120


def _rounds_until(contest: SpeculationController, world: World, mode: DecodingMode) -> int:
    for count in range(5000):
        world.round(contest)
        if contest.current_mode is mode and contest.decision_reason is DecodingModeReason.FASTER:
            return count
    return 5000


def test_a_load_begins_with_what_the_nearest_one_found() -> None:
    world, contest = World(1.2, 0.8), told()
    for _ in range(200):
        world.round(contest)
    higher = SpeculationController.from_other_load(contest, -1)
    assert (higher.current_mode, higher.decision_reason) == (
        DecodingMode.SPECULATE,
        DecodingModeReason.FASTER,
    )
    losing = World(4.0, 0.1)
    for _ in range(200):
        losing.round(contest)
    for halvings in (0, 1, -1):
        assert (
            SpeculationController.from_other_load(contest, halvings).current_mode
            is DecodingMode.PLAIN
        )


@pytest.mark.parametrize(
    ("tokens", "cost", "mode"),
    [(3, 3.2, DecodingMode.SPECULATE), (1, 1.1, DecodingMode.PLAIN), (3, 9, DecodingMode.PLAIN)],
)
def test_drafts_that_lose_by_little_are_tried_where_there_is_less_to_do(
    tokens: int, cost: float, mode: DecodingMode
) -> None:
    contest, rows = told(), 64
    while (
        contest.current_mode is DecodingMode.SPECULATE
        or contest.decision_reason is not DecodingModeReason.FASTER
    ):
        drafts = contest.current_mode is DecodingMode.SPECULATE
        stood = tokens if drafts else 1
        took = rows * PLAIN_S * (cost if drafts else 1.0)
        many = RoundObservation(
            rows=rows, tokens=rows * stood, squares=rows * stood**2, seconds=took, sessions=rows
        )
        contest.observe_round(contest.current_mode, many)
    assert SpeculationController.from_other_load(contest, 3).current_mode is mode
    assert (
        SpeculationController.from_other_load(
            SpeculationController.from_other_load(contest, 1), 2
        ).current_mode
        is mode
    )
    for halvings in (0, -1):
        assert (
            SpeculationController.from_other_load(contest, halvings).current_mode
            is DecodingMode.PLAIN
        )


def test_drafts_that_lost_by_far_are_not_tried_before_their_probe_is_paid_for() -> None:
    contest, world = told(), World(30.0, 0.0)
    for _ in range(3000):
        world.round(contest)
    assert world.drafted < 8


def _plain_rounds_before_a_try(contest: SpeculationController, sessions: int) -> int:
    plain = RoundObservation(
        rows=sessions,
        tokens=sessions,
        squares=sessions,
        seconds=0.005 * sessions,
        sessions=sessions,
    )
    rounds = 0
    while not contest.is_probing:
        contest.observe_round(DecodingMode.PLAIN, plain)
        rounds += 1
    return rounds


def test_a_first_try_is_the_dearer_the_more_sessions_have_to_come_back_for_it() -> None:
    one, many = (
        _plain_rounds_before_a_try(SpeculationController(active_mode=DecodingMode.PLAIN), sessions)
        for sessions in (1, 64)
    )
    assert one < 500 < 2000 < many


def test_what_a_try_has_lost_is_known_at_the_next_load_too() -> None:
    contest = SpeculationController(active_mode=DecodingMode.PLAIN)
    _plain_rounds_before_a_try(contest, 64)
    while contest.is_probing:
        contest.observe_round(
            DecodingMode.SPECULATE,
            RoundObservation(rows=64, tokens=64.0, squares=64.0, seconds=64 * 0.2, sessions=64),
        )
    halved = SpeculationController.from_other_load(contest, 1)
    assert _plain_rounds_before_a_try(halved, 32) > 5000
    assert (
        _plain_rounds_before_a_try(SpeculationController(active_mode=DecodingMode.PLAIN), 32) < 2000
    )


@pytest.mark.parametrize(("cost", "rate"), [(1.2, 0.8), (4.0, 0.3), (1.05, 0.0)])
def test_what_another_load_found_is_only_a_beginning(cost: float, rate: float) -> None:
    world, other = World(cost, rate), told()
    for _ in range(200):
        World(1.2, 0.8).round(other)
    contest = SpeculationController.from_other_load(other)
    contest.expected_plain_s = PLAIN_S
    for _ in range(600):
        world.round(contest)
    world.tokens, world.seconds = 0, 0.0
    for _ in range(ROUNDS):
        world.round(contest)
    assert world.over_plain >= max(0.97, 0.95 * world.gain)


def test_a_session_that_ended_speculation_does_not_speak_for_the_next_one() -> None:
    world, contest = World(1.5, 0.8), told()
    for _ in range(200):
        world.round(contest)
    world.rate, left = 0.0, world.drafted
    for _ in range(12):
        contest.begin_session()
        for _ in range(110):
            world.round(contest)
    # What was won is spent on the next texts, and not on all that follow.
    assert 20 < world.drafted - left < 200
    contest.begin_session()
    assert contest.current_mode is DecodingMode.PLAIN


@pytest.mark.parametrize("seed", [*range(4), *map(thorough, range(4, 12))])
def test_texts_that_are_bad_for_drafts_are_left_and_the_others_are_not(seed: int) -> None:
    world, contest = World(1.75, 0.0, seed=seed), told()
    drafted = {rate: 0 for rate in (0.1, 0.8)}
    for text in range(60):
        world.rate = 0.8 if text % 3 == 0 else 0.1
        before = world.drafted
        contest.begin_session()
        for _ in range(110):
            world.round(contest)
        drafted[world.rate] += (text >= 6) * (world.drafted - before)
    assert drafted[0.8] > 0.7 * 18 * 110
    assert drafted[0.1] < 0.4 * 36 * 110
    # Plain decoding is 1.0, drafts always .63 x 2 / 3 + 1.92 / 3 = 1.06.
    assert world.over_plain > 1.1


# Lost by much they are left sooner, by little they cost little.
@pytest.mark.parametrize("cost", [1.75, *map(thorough, (1.3, 4.0))])
@pytest.mark.parametrize("length", [3, 30, thorough(300)])
def test_however_many_texts_begin_hopeless_drafts_cost_little(cost: float, length: int) -> None:
    world, contest = World(cost, 0.0), told()
    for _ in range(6000 // length):
        contest.begin_session()
        for _ in range(length):
            world.round(contest)
    assert world.over_plain >= 0.97


def test_observations_without_time_are_ignored() -> None:
    contest = SpeculationController()
    for rows, seconds in ((0, 1.0), (1, 0.0), (1, math.nan)):
        nothing = RoundObservation(rows=rows, tokens=1.0, squares=1.0, seconds=seconds, sessions=1)
        contest.observe_round(DecodingMode.PLAIN, nothing)
        contest.observe_round(DecodingMode.SPECULATE, nothing)
    assert math.isnan(contest.gain)


@settings(max_examples=60)
@given(
    cost=st.floats(1.0, 60.0),
    rate=st.floats(0.0, 1.0),
    noise=st.floats(0.0, 0.15),
    seed=st.integers(0, 1 << 30),
)
def test_never_slower_than_plain(cost: float, rate: float, noise: float, seed: int) -> None:
    world, contest = World(cost, rate, noise=noise, seed=seed), SpeculationController()
    for _ in range(START):
        world.round(contest)
    world.tokens, world.seconds = 0, 0.0
    for _ in range(ROUNDS):
        world.round(contest)
    assert world.over_plain >= 0.96


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("timed", [True, False])
def test_one_stall_does_not_take_away_what_speculation_has_won(settled: bool, timed: bool) -> None:
    contest = told()
    for _ in range(60):
        contest.observe_round(DecodingMode.SPECULATE, seen(4, 1.2 * PLAIN_S))
    contest.observe_round(
        DecodingMode.SPECULATE, seen(1, 1000.0 * PLAIN_S, settled=settled, timed=timed)
    )
    # Were it all lost, the next text of a lone session would begin without drafts.
    contest.active_mode = DecodingMode.PLAIN
    contest.begin_session()
    assert contest.active_mode is DecodingMode.SPECULATE
