"""Own drafts are given up on solid evidence only, and tried again later."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.spec.contest import Mode
from outrider.spec.own_drafts import OwnDrafts

PLAIN_S = 0.004


def run(
    own: OwnDrafts,
    *,
    tokens: float,
    cost: float,
    rounds: int = 400,
    clean: float = 1.0,
    host_s: float = 0.001,
    rows: int = 8,
    start: float = 0.0,
    known: bool = True,
    seed: int = 0,
) -> int | None:
    """The round in which drafts were given up; `clean`: the share of rounds without prompts."""
    rng = np.random.default_rng(seed)
    now = start
    for count in range(rounds):
        took = (cost * PLAIN_S + host_s) * math.exp(rng.normal(0.0, 0.2))
        if rng.random() < 0.01:
            took += rng.uniform(0.0, 1.0)
        now += took
        own.observe(
            int(rng.poisson((tokens - 1.0) * rows)) + rows,
            rows,
            took if rng.random() < clean else None,
            plain_s=PLAIN_S if known else None,
            own_s=cost * PLAIN_S,
            now=now,
        )
        if own.mode(now) is Mode.PLAIN:
            return count
    return None


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("clean", [1.0, 0.1, 0.0])
@pytest.mark.parametrize("seed", range(5))
def test_drafts_that_win_clearly_are_never_given_up(rows: int, clean: float, seed: int) -> None:
    own = OwnDrafts()
    assert run(own, tokens=2.6, cost=1.2, rows=rows, clean=clean, seed=seed, rounds=2000) is None


@pytest.mark.parametrize("clean", [1.0, 0.3])
def test_drafts_that_lose_are_given_up_on_solid_evidence(clean: float) -> None:
    own = OwnDrafts()
    given_up = run(own, tokens=1.1, cost=1.6, clean=clean)
    assert given_up is not None
    assert 31 <= given_up < 120
    assert own.gain < 0.9


def test_a_verdict_holds_for_a_while_and_then_for_longer() -> None:
    own = OwnDrafts()
    run(own, tokens=1.1, cost=1.6)
    assert own.mode(30.0) is Mode.PLAIN
    assert own.mode(40.0) is Mode.SPECULATE
    assert run(own, tokens=1.1, cost=1.6, start=40.0) is not None
    assert own.mode(95.0) is Mode.PLAIN


def test_what_the_device_takes_is_asked_for_and_nothing_concluded_without() -> None:
    own = OwnDrafts()
    assert run(own, tokens=1.0, cost=3.0, known=False) is None
    assert math.isnan(own.gain)


def test_a_host_that_is_slow_makes_drafts_worth_more() -> None:
    slow, fast = OwnDrafts(), OwnDrafts()
    assert run(fast, tokens=1.3, cost=1.6, host_s=0.0) is not None
    assert run(slow, tokens=1.3, cost=1.6, host_s=0.02) is None
