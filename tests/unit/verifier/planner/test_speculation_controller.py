"""The fastest draft shape is found and kept; probes of others are few and lose little."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from outrider_verifier.planner.speculation_controller import (
    OFF,
    PROBE_BUDGET,
    CandidateShape,
    RoundObservation,
    SpeculationController,
)

from outrider.spec.decoding_mode import DecodingModeReason

CHAIN, TREE = CandidateShape(4), CandidateShape(16, is_tree=True)
AHEAD = CHAIN._replace(is_ahead=True)
UNKNOWN = math.nan
World = Mapping[CandidateShape, tuple[float, float]]
"""Milliseconds of a round, and tokens of a row."""


def run(
    controller: SpeculationController,
    world: World,
    device_s: Mapping[CandidateShape, float],
    rounds: int,
    *,
    load: int = 3,
    seed: int = 0,
    stalls: float = 0.0,
) -> dict[CandidateShape, int]:
    """Rounds of `2 ** load` sessions; how many had each shape."""
    rng, sessions = np.random.default_rng(seed), 2**load
    counts = dict.fromkeys(world, 0)
    before = None
    for _ in range(rounds):
        shape = controller.shape(load, device_s)
        counts[shape] += 1
        ms, tokens = world[shape]
        depth = shape.nodes if not shape.is_tree else 6
        rows = (
            1 + rng.binomial(depth, (tokens - 1.0) / depth, sessions) if depth else [1] * sessions
        )
        seconds = ms / 1000.0 * math.exp(rng.normal(0.0, 0.08))
        if rng.random() < stalls:
            seconds += 0.2
        seen = RoundObservation(
            sessions,
            int(sum(rows)),
            int(sum([count * count for count in rows])),
            sessions * seconds,
            sessions,
            is_settled=shape == before,
        )
        controller.observe_round(load, shape, seen, device_s)
        before = shape
    return counts


@pytest.mark.parametrize("load", [0, 3, 6])
@pytest.mark.parametrize(
    ("world", "best"),
    [
        ({CHAIN: (8.0, 1.4), OFF: (5.0, 1.0)}, OFF),
        ({CHAIN: (8.0, 3.0), OFF: (5.0, 1.0)}, CHAIN),
        ({CHAIN: (8.0, 3.0), AHEAD: (6.0, 2.8), OFF: (5.0, 1.0)}, AHEAD),
        ({AHEAD: (10.0, 2.8), CHAIN: (7.0, 3.0), OFF: (5.0, 1.0)}, CHAIN),
        ({AHEAD: (10.0, 1.1), CHAIN: (7.0, 1.1), OFF: (5.0, 1.0)}, OFF),
        ({CHAIN: (6.0, 3.1), TREE: (6.5, 4.2), OFF: (5.0, 1.0)}, TREE),
        ({TREE: (9.0, 4.2), CHAIN: (6.0, 3.1), OFF: (5.0, 1.0)}, CHAIN),
    ],
)
@pytest.mark.parametrize("is_timed", [False, True])
def test_the_fastest_shape_is_found_and_kept(
    world: World, best: CandidateShape, is_timed: bool, load: int
) -> None:
    device_s = {
        shape: (ms - 0.3) / 1000.0 if is_timed else UNKNOWN for shape, (ms, _) in world.items()
    }
    for seed in range(3):
        controller = SpeculationController()
        run(controller, world, device_s, 300, load=load, seed=seed)
        counts = run(controller, world, device_s, 1000, load=load, seed=seed + 10)
        assert counts[best] > 850
        if best != OFF:
            gain = world[best][1] / world[best][0] * world[OFF][0]
            measured = controller.gain(load, device_s)
            # While plain decoding is probed its times begin anew.
            assert math.isnan(measured) or measured == pytest.approx(gain, rel=0.2)


def test_probes_lose_no_more_than_their_budget() -> None:
    world = {CHAIN: (8.0, 1.1), OFF: (5.0, 1.0)}
    device_s = dict.fromkeys(world, UNKNOWN)
    controller = SpeculationController()
    run(controller, world, device_s, 200)
    counts = run(controller, world, device_s, 20_000)
    lost_ms = counts[CHAIN] * (8.0 - 1.1 * 5.0)
    assert 0.0 < lost_ms < 1.5 * PROBE_BUDGET * 20_000 * 5.0


def test_drafts_that_have_become_good_are_found() -> None:
    device_s = {CHAIN: UNKNOWN, OFF: 0.005}
    controller = SpeculationController()
    run(controller, {CHAIN: (8.0, 1.05), OFF: (5.0, 1.0)}, device_s, 500)
    assert controller.shape(3, device_s) == OFF
    counts = run(controller, {CHAIN: (8.0, 3.0), OFF: (5.0, 1.0)}, device_s, 3000)
    assert counts[CHAIN] > 1500


def test_drafts_that_are_never_accepted_are_left_though_nothing_is_known_of_plain_rounds() -> None:
    device_s = {CHAIN: UNKNOWN, OFF: UNKNOWN}
    world = {CHAIN: (5.0, 1.0), OFF: (5.0, 1.0)}
    controller = SpeculationController()
    counts = run(controller, world, device_s, 400, load=6)
    assert counts[OFF] > 10


def test_stalls_end_no_drafts_that_win() -> None:
    device_s = {CHAIN: UNKNOWN, OFF: UNKNOWN}
    world = {CHAIN: (8.0, 3.0), OFF: (5.0, 1.0)}
    for seed in range(5):
        counts = run(SpeculationController(), world, device_s, 1000, seed=seed, stalls=0.02)
        assert counts[CHAIN] > 900


def test_another_load_begins_with_what_was_found_at_the_nearest() -> None:
    device_s = {CHAIN: UNKNOWN, OFF: UNKNOWN}
    world = {CHAIN: (8.0, 1.1), OFF: (5.0, 1.0)}
    controller = SpeculationController()
    run(controller, world, device_s, 300, load=6)
    assert controller.shape(5, device_s) == OFF
    assert run(controller, world, device_s, 50, load=5)[CHAIN] == 0


def test_the_devices_times_tell_the_best_shape_of_a_load_that_is_new() -> None:
    few = {CHAIN: 0.006, TREE: 0.0065, OFF: 0.005}
    many = {CHAIN: 0.007, TREE: 0.02, OFF: 0.005}
    controller = SpeculationController(can_resume=False)
    run(controller, {CHAIN: (6.3, 3.1), TREE: (6.8, 4.2), OFF: (5.3, 1.0)}, few, 300)
    assert controller.shape(3, few) == TREE
    assert controller.shape(5, many) == CHAIN
    # Sixteen sessions have no trees.
    assert controller.shape(3, {CHAIN: 0.006, OFF: 0.005}) == CHAIN


def test_plain_decoding_that_is_final_is_taken_when_it_is_clear_and_never_tried() -> None:
    device_s = {CHAIN: 0.006, OFF: 0.005}
    wins, loses = {CHAIN: (6.3, 1.3), OFF: (5.3, 1.0)}, {CHAIN: (6.3, 1.02), OFF: (5.3, 1.0)}
    for seed in range(3):
        controller = SpeculationController(can_resume=False)
        assert run(controller, wins, device_s, 1000, seed=seed)[OFF] == 0
        controller = SpeculationController(can_resume=False)
        counts = run(controller, loses, device_s, 300, seed=seed)
        assert counts[CHAIN] < 40
    # Without the device's times it takes drafts that are never accepted.
    device_s = dict.fromkeys(device_s, UNKNOWN)
    controller = SpeculationController(can_resume=False)
    assert run(controller, {CHAIN: (6.3, 1.2), OFF: (5.3, 1.0)}, device_s, 1000)[OFF] == 0


def test_reasons_tell_what_is_known() -> None:
    device_s = {CHAIN: UNKNOWN, OFF: UNKNOWN}
    world = {CHAIN: (8.0, 3.0), OFF: (5.0, 1.0)}
    controller = SpeculationController()
    reasons = []
    for _ in range(100):
        reasons.append(controller.reason(3))
        run(controller, world, device_s, 2)
    kinds = list(dict.fromkeys(reasons))
    assert kinds == [
        DecodingModeReason.MEASURING,
        DecodingModeReason.PROBE,
        DecodingModeReason.FASTER,
    ]
    assert math.isnan(SpeculationController().gain(0, device_s))


def test_each_shape_is_probed_in_its_turn() -> None:
    """A shape that is probed often, because it loses little, keeps no other from its turn."""
    device_s = {AHEAD: UNKNOWN, CHAIN: UNKNOWN, OFF: UNKNOWN}
    loses = {AHEAD: (6.0, 1.1), CHAIN: (8.0, 1.1), OFF: (5.0, 1.0)}
    wins = loses | {CHAIN: (8.0, 2.4)}
    controller = SpeculationController()
    run(controller, loses, device_s, 500)
    assert run(controller, wins, device_s, 10_000)[CHAIN] > 2000


def test_a_shape_that_its_sessions_cannot_have_is_waited_for_in_vain_for_a_while_only() -> None:
    device_s = {CHAIN: 0.006, TREE: 0.0065, OFF: 0.005}
    controller = SpeculationController(can_resume=False)
    for tokens, rounds in ((24, 300), (8, 600)):
        for _ in range(rounds):
            seen = RoundObservation(8, tokens, tokens * tokens // 8, 8 * 0.0063, 8)
            controller.observe_round(3, CHAIN, seen, device_s)
    assert controller.shape(3, device_s) == OFF


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_rounds_without_a_time_tell_nothing(value: float) -> None:
    device_s = {CHAIN: UNKNOWN, OFF: UNKNOWN}
    controller = SpeculationController()
    controller.observe_round(0, CHAIN, RoundObservation(1, 2, 4, value, 1), device_s)
    controller.observe_round(0, TREE, RoundObservation(1, 2, 4, 1.0, 1), device_s)
    assert math.isnan(controller.gain(0, device_s))
