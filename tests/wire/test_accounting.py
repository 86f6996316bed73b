from __future__ import annotations

from outrider.wire.accounting import add_round
from outrider.wire.messages import SpecStats


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
    )


def test_a_round_cut_short_by_a_stop_counts_what_was_emitted() -> None:
    stats = add_round(SpecStats(), 4, 3, 2, False)
    assert (stats.emitted, stats.accepted) == (2, 3)
