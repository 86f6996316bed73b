"""Own drafts are given up on solid evidence only, and tried again later."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.in_process_controller import InProcessDraftController

PLAIN_S = 0.004
LOAD = 3


def run(
    own: InProcessDraftController,
    *,
    tokens: float,
    cost: float,
    rounds: int = 400,
    clean: float = 1.0,
    host_s: float = 0.001,
    rows: int = 8,
    start: float = 0.0,
    seed: int = 0,
    seen_s: float | None = None,
) -> int | None:
    """The round in which drafts were given up; `clean`: the share of rounds without prompts."""
    rng = np.random.default_rng(seed)
    now = start
    for count in range(rounds):
        took = (cost * PLAIN_S + host_s) * math.exp(rng.normal(0.0, 0.2))
        if rng.random() < 0.01:
            took += rng.uniform(0.0, 1.0)
        now += took
        emitted = 1 + rng.poisson(tokens - 1.0, rows)
        beyond_s = took - cost * PLAIN_S if rng.random() < clean else None
        squares = float((emitted**2).sum())
        own.observe_round(rows, float(emitted.sum()), squares, load=LOAD, host_s=beyond_s)
        own.evaluate(LOAD, PLAIN_S, cost * PLAIN_S, now, nodes=4, seen_s=seen_s)
        if own.choose_mode(LOAD, now) is DecodingMode.PLAIN:
            return count
    return None


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("clean", [1.0, 0.1, 0.0])
@pytest.mark.parametrize("seed", range(5))
def test_drafts_that_win_clearly_are_never_given_up(rows: int, clean: float, seed: int) -> None:
    own = InProcessDraftController()
    assert run(own, tokens=2.6, cost=1.2, rows=rows, clean=clean, seed=seed, rounds=2000) is None


@pytest.mark.parametrize("clean", [1.0, 0.3])
@pytest.mark.parametrize(("rows", "most"), [(64, 12), (8, 20), (1, 60)])
def test_drafts_that_lose_are_given_up_the_sooner_the_more_rows_tell(
    rows: int, most: int, clean: float
) -> None:
    own = InProcessDraftController()
    given_up = run(own, tokens=1.1, cost=1.6, clean=clean, rows=rows)
    assert given_up is not None
    assert 5 <= given_up < most
    assert own.gain < 0.9


def test_a_verdict_holds_for_a_while_and_then_for_longer() -> None:
    own = InProcessDraftController()
    run(own, tokens=1.1, cost=1.6)
    assert own.choose_mode(LOAD, 30.0) is DecodingMode.PLAIN
    assert own.choose_mode(LOAD, 40.0) is DecodingMode.SPECULATE
    assert run(own, tokens=1.1, cost=1.6, start=40.0) is not None
    assert own.choose_mode(LOAD, 95.0) is DecodingMode.PLAIN


def test_what_one_load_found_is_no_verdict_at_another_but_evidence() -> None:
    own = InProcessDraftController()
    assert run(own, tokens=1.3, cost=2.0) is not None
    now = own._until[LOAD] - 1.0
    assert own.choose_mode(LOAD, now) is DecodingMode.PLAIN
    assert own.choose_mode(0, now) is DecodingMode.SPECULATE
    # At a load where drafts cost little the same tokens are worth it.
    for _ in range(20):
        own.observe_round(8, 10.0, 14.0, load=0, host_s=0.0)
        own.evaluate(0, PLAIN_S, 1.05 * PLAIN_S, now, nodes=4)
    assert own.choose_mode(0, now) is DecodingMode.SPECULATE
    assert own.gain > 1.1


def test_rounds_without_rows_tell_nothing() -> None:
    own = InProcessDraftController()
    own.observe_round(0, 0.0, 0.0, load=LOAD)
    own.evaluate(LOAD, PLAIN_S, PLAIN_S, 0.0, nodes=4)
    assert math.isnan(own.gain)
    assert own.choose_mode(LOAD, 0.0) is DecodingMode.SPECULATE


def test_a_host_that_is_slow_makes_drafts_worth_more() -> None:
    slow, fast = InProcessDraftController(), InProcessDraftController()
    assert run(fast, tokens=1.4, cost=1.6, host_s=0.0) is not None
    assert run(slow, tokens=1.4, cost=1.6, host_s=0.02, seen_s=PLAIN_S + 0.02) is None


def test_drafts_that_gain_next_to_nothing_over_plain_rounds_that_were_seen_are_given_up() -> None:
    equal = InProcessDraftController()
    assert run(equal, tokens=1.6, cost=1.6, rows=64, seen_s=PLAIN_S + 0.001) is not None


def test_nothing_is_tried_at_a_load_that_has_not_lasted_or_before_rounds_have_told() -> None:
    passing, unheard, lasting = (
        InProcessDraftController(),
        InProcessDraftController(),
        InProcessDraftController(),
    )
    for own, host_s in ((passing, 0.003), (unheard, None), (lasting, 0.003)):
        for _ in range(20):
            own.observe_round(64, 90.0, 150.0, load=LOAD, host_s=host_s)
            keeps = own is not passing
            own.evaluate(LOAD, PLAIN_S, 1.3 * PLAIN_S, 1.0, nodes=16, lasting=keeps)
    assert passing.choose_mode(LOAD, 1.1) is DecodingMode.SPECULATE
    assert unheard.choose_mode(LOAD, 1.1) is DecodingMode.SPECULATE
    assert lasting.choose_mode(LOAD, 1.1) is DecodingMode.PLAIN


def test_a_host_whose_work_plain_rounds_hide_makes_them_worth_less() -> None:
    own = InProcessDraftController()
    assert run(own, tokens=1.8, cost=1.6, host_s=0.004, seen_s=PLAIN_S) is not None
    assert own.choose_mode(LOAD, own._until[LOAD] - 1.0) is DecodingMode.PLAIN
    assert own.gain < 0.9


def test_plain_rounds_are_run_for_a_moment_where_the_hosts_share_in_them_decides() -> None:
    own = InProcessDraftController()
    began = run(own, tokens=1.8, cost=1.6, host_s=0.004)
    assert began is not None
    until = own._until[LOAD]
    assert (
        own.choose_mode(LOAD, until - 0.2) is DecodingMode.PLAIN
        and own.choose_mode(LOAD, until) is DecodingMode.SPECULATE
    )
    # They were not seen, perhaps because the load changed; it is not tried for ever.
    for _ in range(2):
        assert run(own, tokens=1.8, cost=1.6, host_s=0.004, start=until) is not None
        until = own._until[LOAD]
    assert run(own, tokens=1.8, cost=1.6, host_s=0.004, start=until) is None
    # Or they were, and it is as it was hoped or it is not.
    for seen_s, kept in ((PLAIN_S + 0.004, True), (PLAIN_S, False)):
        then = run(own, tokens=1.8, cost=1.6, host_s=0.004, start=until, seen_s=seen_s)
        assert (then is None) is kept
        until += 100.0


def test_the_hosts_share_of_many_sessions_says_nothing_of_few() -> None:
    own = InProcessDraftController()
    run(own, tokens=1.8, cost=1.2, host_s=0.004, seen_s=PLAIN_S + 0.004)
    for _ in range(40):
        # Fewer of them: the host has next to nothing to do.
        own.observe_round(2, 3.6, 7.0, load=1, host_s=0.0)
        own.evaluate(1, PLAIN_S, 1.2 * PLAIN_S, 10.0, nodes=4, seen_s=PLAIN_S)
    assert own.choose_mode(1, 10.0) is DecodingMode.SPECULATE and own.gain > 1.4


def test_slow_rounds_have_time_for_as_many() -> None:
    own = InProcessDraftController()
    for _ in range(20):
        own.observe_round(8, 16.0, 40.0, load=LOAD, host_s=0.3)
    own.evaluate(LOAD, 0.05, 0.1, 10.0, nodes=4)
    assert (
        own.choose_mode(LOAD, 13.0) is DecodingMode.PLAIN
        and own.choose_mode(LOAD, 14.0) is DecodingMode.SPECULATE
    )


def test_where_the_hosts_share_does_not_matter_no_plain_rounds_are_run() -> None:
    assert run(InProcessDraftController(), tokens=2.6, cost=1.2, host_s=0.002) is None


def test_a_host_that_is_held_up_for_a_moment_ends_no_drafts_that_win() -> None:
    for held_up_s, ends in ((0.6, False), (5.0, True)):
        own, now = InProcessDraftController(), 0.0
        while now < 3.0 + held_up_s:
            host_s = 0.006 if now > 3.0 else 0.001
            now += 0.002 + host_s
            own.observe_round(256, 256 * 2.5, 256 * 7.0, load=8, host_s=host_s)
            own.evaluate(8, 0.001, 0.002, now, nodes=3, seen_s=0.002)
        assert (own.choose_mode(8, now) is DecodingMode.PLAIN) == ends
    # What has never won is given up as soon as that is known.
    own, now = InProcessDraftController(), 0.0
    while own.choose_mode(8, now) is DecodingMode.SPECULATE:
        now += 0.008
        own.observe_round(256, 256 * 2.5, 256 * 7.0, load=8, host_s=0.006)
        own.evaluate(8, 0.001, 0.002, now, nodes=3, seen_s=0.002)
        assert now < 0.1
