"""The load is steady where sessions come and go; prompts are no part of what rounds take."""

from __future__ import annotations

import math

import pytest
from outrider_verifier.planner.load_stats import LoadStats, RoundSample

from outrider.speculation.cost_table import CostTable


def times(rows: int, *, own: bool, chunks: int = 0, featured: bool = False) -> float | None:
    """A millisecond and a bit for a row, half of one for a piece."""
    return (1.0 + 0.01 * rows + 0.5 * chunks + own) / 1000.0


def unknown(rows: int, *, own: bool, chunks: int = 0, featured: bool = False) -> float | None:
    """No graphs, no times."""
    return None


@pytest.mark.parametrize(("sessions", "load"), [(1, 0), (2, 1), (8, 3), (32, 5), (64, 6)])
def test_a_session_that_ends_before_the_next_one_begins_is_no_other_load(
    sessions: int, load: int
) -> None:
    loads = LoadStats(times, CostTable())
    loads.begin_round(sessions)
    assert loads.load == load
    for count in (sessions - 1, sessions, sessions + 1) * 4:
        if sessions > 2:
            assert not loads.begin_round(count)
    assert loads.begin_round(4 * sessions)
    assert loads.load == load + 2


def test_sessions_between_two_loads_change_nothing_back_and_forth() -> None:
    loads = LoadStats(times, CostTable())
    loads.begin_round(11)
    before = loads.load
    assert not any(loads.begin_round(count) for count in (12, 11, 12, 11, 10))
    assert loads.load == before


def test_fewer_sessions_are_another_load_once_they_last() -> None:
    loads = LoadStats(times, CostTable())
    loads.begin_round(8)
    for _ in range(3):
        # A wave ends, and the next one begins within some rounds.
        for count in (7, 6, 5, 4, 4, 5, 8):
            assert not loads.begin_round(count)
            loads.observe_round(RoundSample(count, 0, 0, 0.001))
    changed = 0
    for _ in range(40):
        # It is asked for more often than rounds are run.
        changed += sum([loads.begin_round(4) for _ in range(3)])
        loads.observe_round(RoundSample(4, 0, 0, 0.001))
        assert loads.load in (2, 3)
    assert changed == 1 and loads.load == 2
    assert loads.begin_round(8)
    assert loads.begin_round(1), "so few are no wave that ends"


def test_a_few_rounds_that_were_held_up_are_not_what_a_plain_round_takes() -> None:
    loads = LoadStats(times, CostTable())
    loads.begin_round(8)
    for _ in range(3):
        loads.observe_round(RoundSample(8, 0, 0, 0.004))
    assert loads.plain_round_s == pytest.approx(0.00108)
    for _ in range(40):
        loads.observe_round(RoundSample(8, 0, 0, 0.0011))
    for _ in range(8):
        # Beside prompts it is less clear what a round takes.
        loads.observe_round(RoundSample(8, 0, 1, 0.0035))
    assert loads.plain_round_s < 0.0013
    # At another load that is known the same holds for the host's share.
    loads.begin_round(64)
    loads.observe_round(RoundSample(64, 0, 0, 0.02))
    assert loads.plain_round_s < 0.0021


def test_plain_rounds_are_those_seen_or_those_of_the_device_with_the_host_of_the_nearest() -> None:
    loads = LoadStats(times, CostTable())
    loads.begin_round(8)
    assert loads.plain_round_s == pytest.approx(0.00108)
    for _ in range(5):
        loads.observe_round(RoundSample(8, 0, 0, 0.00216))
    assert loads.plain_round_s == pytest.approx(0.00216)
    loads.begin_round(64)
    assert loads.plain_round_s == pytest.approx(2.0 * 0.00164)
    # Rounds of a few of the sessions, of drafts or of in-process drafts are no plain rounds.
    loads.observe_round(RoundSample(8, 0, 0, 1.0))
    loads.observe_round(RoundSample(64, 256, 0, 1.0))
    loads.observe_round(RoundSample(64, 0, 0, 1.0, has_in_process_drafts=True))
    assert loads.plain_round_s == pytest.approx(2.0 * 0.00164)


def test_without_times_nothing_is_expected_before_it_was_seen() -> None:
    loads = LoadStats(unknown, CostTable())
    loads.begin_round(4)
    assert math.isnan(loads.plain_round_s)
    assert loads.round_s == 0.0
    loads.observe_round(RoundSample(4, 0, 0, 0.01))
    assert loads.plain_round_s == loads.round_s == 0.01


def test_what_prompts_add_is_left_out_by_the_devices_times() -> None:
    loads = LoadStats(times, CostTable())
    loads.begin_round(8)
    loads.observe_round(RoundSample(8, 0, 2, 0.0025))
    assert loads.prompts_s == pytest.approx(0.001)
    assert loads.alone_s == 0.0
    # Alone they count as they would beside the sessions; that others had to wait is not left out.
    loads.observe_round(RoundSample(0, 0, 2, 0.004))
    assert loads.prompts_s == pytest.approx(0.002)
    assert loads.alone_s == pytest.approx(0.004)
    # However wrong the times are, a round took something.
    loads.observe_round(RoundSample(8, 0, 16, 0.001))
    assert loads.prompts_s == pytest.approx(0.002 + 0.0009)


def test_without_times_prompts_take_their_share_of_the_tokens() -> None:
    loads = LoadStats(unknown, CostTable())
    loads.begin_round(4)
    loads.observe_round(RoundSample(4, 12, 48, 0.064))
    assert loads.prompts_s == pytest.approx(0.048)
