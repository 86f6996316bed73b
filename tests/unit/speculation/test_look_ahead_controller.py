"""Look-ahead is left where it loses and kept where it wins; lock-step's worth is learnt."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.look_ahead_controller import LookAheadController
from outrider.speculation.measurements import RoundObservation
from outrider.speculation.speculation_controller import SpeculationController

LOCKSTEP_S = 0.007
ROUNDS = 1500


class World:
    """Rounds of `rows` sessions, in lock-step and under look-ahead."""

    def __init__(self, faster: float, stale: float, *, rows: int = 8, seed: int = 0) -> None:
        """`faster`: a round of lock-step over one under look-ahead; `stale`: tokens of a row under
        look-ahead over those of a row of lock-step."""
        self.faster, self.stale, self.rows = faster, stale, rows
        self.rng = np.random.default_rng(seed)
        self.tokens = self.seconds = 0.0
        self.looked = 0
        self.before: bool | None = None

    def round(self, look: LookAheadController, load: int = 3) -> None:
        """One round of all sessions, the way that is in force."""
        ahead = look.is_active(load)
        extra = 1.5 if not ahead else 2.5 * self.stale - 1.0
        emitted = 1 + self.rng.binomial(4, extra / 4.0, self.rows)
        seconds = LOCKSTEP_S / (self.faster if ahead else 1.0)
        seconds *= math.exp(self.rng.normal(0.0, 0.08))
        seen = RoundObservation(
            rows=self.rows,
            tokens=float(emitted.sum()),
            squares=float((emitted**2).sum()),
            seconds=seconds * self.rows,
            sessions=self.rows,
            is_load_steady=ahead is self.before,
        )
        look.observe_round(load, seen, ahead=ahead, hits=6 if ahead else 0)
        self.before = ahead
        self.tokens += float(emitted.sum())
        self.seconds += seconds
        self.looked += ahead

    @property
    def over_lockstep(self) -> float:
        """Speed relative to lock-step all the time, whose rounds are as noisy."""
        per_s = self.tokens / self.rows / self.seconds
        return per_s * LOCKSTEP_S * math.exp(0.08**2 / 2.0) / 2.5


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    ("faster", "stale"), [(1.4, 0.95), (1.3, 1.0), (0.8, 0.95), (1.0, 0.8), (0.5, 1.0), (1.2, 0.7)]
)
def test_the_better_way_is_in_force_nearly_all_the_time(
    faster: float, stale: float, rows: int, first: bool
) -> None:
    gain = faster * stale
    world, look = World(faster, stale, rows=rows), LookAheadController(first=first)
    for _ in range(ROUNDS):
        world.round(look)
    world.tokens = world.seconds = world.looked = 0
    for _ in range(ROUNDS):
        world.round(look)
    assert world.over_lockstep >= 0.97 * max(1.0, gain)
    assert (world.looked > 0.9 * ROUNDS) if gain > 1.0 else (world.looked < 0.15 * ROUNDS)


def test_a_row_without_a_draft_is_worth_a_token_of_a_round() -> None:
    # Under look-ahead rounds are as long, but half of the rows have no draft: 1 token for 3.
    look = LookAheadController(first=True)
    for _ in range(200):
        ahead = look.is_active(2)
        drafted, bare = (2, 2) if ahead else (4, 0)
        tokens, squares = 3.0 * drafted + bare, 9.0 * drafted + bare
        seen = RoundObservation(rows=4, tokens=tokens, squares=squares, seconds=0.04, sessions=4)
        look.observe_round(2, seen, ahead=ahead, hits=2 * ahead, missed=bare)
    assert not look.is_active(2)
    assert look.gain(2) == pytest.approx(2.0 / 3.0, rel=0.08)
    assert look.miss_share == 0.5


def test_the_share_of_misses_is_of_look_ahead_alone() -> None:
    look, seen = LookAheadController(first=True), RoundObservation(2, 5.0, 13.0, 0.02, 2)
    assert look.miss_share == 1.0
    look.observe_round(1, seen, ahead=True, hits=1)
    look.observe_round(1, seen, ahead=False)
    assert look.miss_share == 0.5
    look.reset_drafter()
    assert look.miss_share == 1.0


def test_another_load_begins_with_what_was_found_at_the_nearest() -> None:
    look, world = LookAheadController(first=True), World(0.5, 0.9)
    for _ in range(200):
        world.round(look)
    assert not look.is_active(3)
    assert not look.is_active(4)


def test_lock_step_gets_its_turn_before_speculation_is_left() -> None:
    look, speculation = (
        LookAheadController(first=True),
        SpeculationController(active_mode=DecodingMode.PLAIN),
    )
    look.follow_speculation(speculation, DecodingMode.SPECULATE, 0)
    assert not look.is_active(0)
    assert speculation.current_mode is DecodingMode.SPECULATE
    # It had its turn: the next time speculation is left for good.
    speculation.active_mode = DecodingMode.PLAIN
    look.follow_speculation(speculation, DecodingMode.SPECULATE, 0)
    assert speculation.current_mode is DecodingMode.PLAIN


def test_while_nobody_speculates_both_ways_are_tried_in_turn() -> None:
    look, speculation = (
        LookAheadController(first=False),
        SpeculationController(active_mode=DecodingMode.PLAIN),
    )
    ways = []
    plain = RoundObservation(rows=1, tokens=1.0, squares=1.0, seconds=0.004, sessions=1)
    drafted = RoundObservation(rows=1, tokens=1.0, squares=1.0, seconds=0.01, sessions=1)
    for _ in range(6000):
        before, was = speculation.current_mode, speculation.active_mode
        speculation.observe_round(before, drafted if before is DecodingMode.SPECULATE else plain)
        if speculation.current_mode is not before:
            look.follow_speculation(speculation, was, 0)
            if speculation.current_mode is DecodingMode.SPECULATE:
                ways.append(look.is_active(0))
    assert ways[:4] == [True, False, True, False]
