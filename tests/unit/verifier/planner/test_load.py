"""The load is steady where sessions come and go; prompts are no part of what rounds take."""

from __future__ import annotations

import pytest
from outrider_verifier.planner.statistics import LoadStats, RoundSample


def times(rows: int, *, own: bool, chunks: int = 0) -> float | None:
    """A millisecond and a bit for a row, half of one for a chunk."""
    return (1.0 + 0.01 * rows + 0.5 * chunks + own) / 1000.0


def unknown(rows: int, *, own: bool, chunks: int = 0) -> float | None:
    """No graphs, no times."""
    return None


def plain(rows: int, seconds: float = 0.001) -> RoundSample:
    return RoundSample(rows, 0, 0, 0, seconds)


@pytest.mark.parametrize(("sessions", "load"), [(1, 0), (2, 1), (8, 3), (32, 5), (64, 6)])
def test_a_session_that_ends_before_the_next_one_begins_is_no_other_load(
    sessions: int, load: int
) -> None:
    loads = LoadStats(times)
    loads.begin_round(sessions)
    assert loads.load == load
    for count in (sessions - 1, sessions, sessions + 1) * 4:
        if sessions > 2:
            assert not loads.begin_round(count)
    assert loads.begin_round(4 * sessions)
    assert loads.load == load + 2


def test_sessions_between_two_loads_change_nothing_back_and_forth() -> None:
    loads = LoadStats(times)
    loads.begin_round(11)
    before = loads.load
    assert not any(loads.begin_round(count) for count in (12, 11, 12, 11, 10))
    assert loads.load == before


def test_fewer_sessions_are_another_load_once_they_last() -> None:
    loads = LoadStats(times)
    loads.begin_round(8)
    for _ in range(3):
        # A wave ends, and the next one begins within some rounds.
        for count in (7, 6, 5, 4, 4, 5, 8):
            assert not loads.begin_round(count)
            loads.observe_round(plain(count))
    changed = 0
    for _ in range(40):
        # It is asked for more often than rounds are run.
        changed += sum([loads.begin_round(4) for _ in range(3)])
        loads.observe_round(plain(4))
        assert loads.load in (2, 3)
    assert changed == 1 and loads.load == 2
    assert loads.is_steady
    assert loads.begin_round(8)
    assert not loads.is_steady
    assert loads.begin_round(1), "so few are no wave that ends"
    loads.reset_after_idle(4)
    assert loads.load == 2 and loads.is_steady


def test_a_plain_round_is_that_of_the_load_or_of_the_nearest_one_that_was_seen() -> None:
    loads = LoadStats(unknown)
    assert loads.round_s == 0.0
    loads.begin_round(8)
    loads.observe_round(RoundSample(8, 32, 0, 0, 0.02))
    assert loads.round_s == 0.02
    for _ in range(40):
        loads.observe_round(plain(8, 0.004))
    assert loads.round_s == pytest.approx(0.004)
    loads.observe_round(plain(8, 1.0))
    assert loads.round_s < 0.006, "a round that was held up"
    loads.begin_round(64)
    assert loads.round_s < 0.006
    loads.observe_round(plain(64, 0.008))
    assert loads.round_s == 0.008


def test_what_prompts_add_is_left_out_by_the_devices_times() -> None:
    loads = LoadStats(times)
    loads.begin_round(8)
    assert loads.observe_round(RoundSample(8, 0, 128, 2, 0.0025)) == pytest.approx(0.0015)
    assert loads.prompts_s == pytest.approx(0.001)
    # Alone they count as they would beside the sessions; that others had to wait is not left out.
    loads.observe_round(RoundSample(0, 0, 128, 2, 0.004))
    assert loads.prompts_s == pytest.approx(0.002)
    # However wrong the times are, a round took something.
    loads.observe_round(RoundSample(8, 0, 1024, 16, 0.001))
    assert loads.prompts_s == pytest.approx(0.002 + 0.0009)


def test_without_times_prompts_take_their_share_of_the_tokens() -> None:
    loads = LoadStats(unknown)
    loads.begin_round(4)
    loads.observe_round(RoundSample(4, 12, 48, 48, 0.064))
    assert loads.prompts_s == pytest.approx(0.048)
