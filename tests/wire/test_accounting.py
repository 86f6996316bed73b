from __future__ import annotations

from outrider.wire.messages import FALLBACK, LOOK_AHEAD_HIT, LOOKED_AHEAD, SpecStats
from outrider.wire.spec_stats_accumulator import add_round
from tests.fakes.serving import flags_of_round


def test_rounds_add_up() -> None:
    stats = add_round(SpecStats(), 4, 2, 3, False)
    stats = add_round(stats, 0, 0, 1, True)
    stats = add_round(stats, 4, 4, 5, False, target_only=True)
    stats = add_round(stats, 4, 1, 2, False)
    assert stats == SpecStats(
        rounds=4,
        emitted=11,
        proposed=12,
        accepted=7,
        fallback_rounds=1,
        target_only_rounds=1,
        accepted_per_depth=(3, 2, 1, 1),
        drafted_rounds=3,
    )


def test_a_round_cut_short_by_a_stop_counts_what_was_emitted() -> None:
    stats = add_round(SpecStats(), 4, 3, 2, False)
    assert (stats.emitted, stats.accepted) == (2, 3)


def test_rounds_with_look_ahead_are_hits_fresh_or_missed() -> None:
    stats = SpecStats()
    rounds = [(4, 3, False, True), (4, 2, False, True), (4, 4, False, False), (0, 0, True, False)]
    for proposed, accepted, missed, hit in rounds:
        before = stats
        stats = add_round(
            stats, proposed, accepted, accepted + 1, missed, looked_ahead=True, hit=hit
        )
        expected = LOOKED_AHEAD | LOOK_AHEAD_HIT * hit | FALLBACK * missed
        assert flags_of_round(before, stats) == expected
    stats = add_round(stats, 4, 4, 5, False)
    assert (stats.rounds, stats.look_ahead_rounds) == (5, 4)
    assert (stats.hit_rounds, stats.hit_accepted) == (2, 5)
    assert (stats.fresh_rounds, stats.fresh_accepted) == (1, 4)
    assert (stats.hit_rate, stats.accepted_per_hit, stats.accepted_per_fresh_round) == (
        0.5,
        2.5,
        4.0,
    )
    nothing = SpecStats()
    assert nothing.hit_rate == nothing.accepted_per_hit == nothing.accepted_per_fresh_round == 0.0
