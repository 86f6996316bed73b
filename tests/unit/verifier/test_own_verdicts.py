"""Own drafts are judged by kind of session while kinds come alone, and together where they meet."""

from __future__ import annotations

from outrider_verifier.planner.in_process_planner import MAX_KINDS, OwnRow, OwnVerdicts
from outrider_verifier.planner.load_stats import Loads, Ran
from outrider_verifier.planner.workload_stats import Kind, Known, Pace

from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.speculation.cost_table import CostTable


def times(rows: int, *, own: bool, pieces: int = 0, featured: bool = False) -> float | None:
    """Own drafts make rounds half as long again."""
    return 0.006 if own else 0.004


def kind(temperature: float) -> Kind:
    return Kind(None, DraftMethod.EAGLE3, 4, 1, Rule.COUPLED, temperature)


COLD, HOT = kind(0.0), kind(2.0)


def row(of: Kind, tokens: int) -> OwnRow:
    return Pace(Known(of), own=True), tokens


def verdicts(*kinds: Kind) -> OwnVerdicts:
    loads = Loads(times, CostTable())
    loads.begin_round(8)
    own = OwnVerdicts(loads)
    for of in kinds:
        own.follow(of)
    return own


def rounds(own: OwnVerdicts, rows: list[OwnRow], *, count: int = 20, now: float = 0.0) -> None:
    for _ in range(count):
        own.observe(rows, Ran(len(rows), 0, 0, 0.0065, own=True), now)


def test_hot_sessions_give_drafts_up_and_cold_ones_that_follow_do_not() -> None:
    own = verdicts(HOT)
    rounds(own, [row(HOT, 1)] * 8)
    assert own.plain(1.0)
    assert [name for name, _, _ in own.summaries(1.0)] == [f"own drafts, {HOT}"]
    own.leave(HOT)
    own.follow(COLD)
    assert not own.plain(1.0)
    own.leave(COLD)
    own.follow(HOT)
    assert own.plain(2.0)
    assert not own.plain(40.0)


def test_while_sessions_of_a_kind_without_drafts_are_served_all_decode_plainly() -> None:
    own = verdicts(HOT)
    rounds(own, [row(HOT, 1)] * 8)
    own.follow(COLD)
    assert own.plain(1.0)


def test_kinds_that_share_rounds_are_judged_by_what_these_give() -> None:
    own = verdicts(HOT, COLD)
    rounds(own, [row(HOT, 1)] * 4 + [row(COLD, 4)] * 4)
    assert not own.plain(1.0)
    rounds(own, [row(HOT, 1)] * 7 + [row(COLD, 2)], count=200)
    # Whether the host has less to do in plain rounds is seen first, for a moment.
    rounds(own, [row(HOT, 1)] * 7 + [row(COLD, 2)], now=0.5)
    assert own.plain(1.0)
    own.leave(HOT)
    assert not own.plain(1.0)


def test_a_load_that_is_left_for_a_moment_goes_on_deciding() -> None:
    own = verdicts(HOT)
    loads = own._loads
    for _ in range(100):
        loads.begin_round(64)
        loads.observe(Ran(64, 0, 0, 0.004))
    rounds(own, [row(HOT, 1)] * 64)
    assert own.plain(1.0)
    loads.begin_round(20)
    assert loads.load < 6 and own.plain(1.0)
    for _ in range(100):
        loads.begin_round(20)
        loads.observe(Ran(20, 0, 0, 0.004))
    assert not own.plain(1.0)


def test_a_load_that_is_passed_on_the_way_to_one_where_drafts_win_pauses_nobody() -> None:
    own = verdicts(HOT)
    loads = own._loads
    rounds(own, [row(HOT, 1)] * 8)
    assert own.plain(1.0)
    loads.rest(1)
    loads.begin_round(64)
    rounds(own, [row(HOT, 4)] * 64)
    loads.rest(1)
    loads.begin_round(8)
    assert not own.plain(1.0)
    for _ in range(100):
        loads.observe(Ran(8, 0, 0, 0.004))
    assert own.plain(1.0)


def test_beside_sessions_without_drafts_it_is_asked_what_all_would_get_with_them() -> None:
    def dear(rows: int, *, own: bool, pieces: int = 0, featured: bool = False) -> float:
        return 0.002 + 0.0001 * rows if own else 0.002

    loads = Loads(dear, CostTable())
    loads.begin_round(64)
    own = OwnVerdicts(loads)
    own.follow(HOT)
    for _ in range(40):
        own.observe([row(HOT, 2)] * 4, Ran(64, 0, 0, 0.01, own=True), 0.0)
    assert own.plain(1.0)


def test_rounds_with_others_tell_of_tokens_and_no_more_kinds_are_kept_than_fit() -> None:
    own = verdicts(HOT)
    for _ in range(20):
        own.observe([row(HOT, 1)] * 8, Ran(9, 0, 3, 0.01, 1, own=True), 0.0)
    assert own.plain(1.0)
    own.leave(HOT)
    for index in range(2 * MAX_KINDS):
        own.follow(kind(3.0 + index))
        own.leave(kind(3.0 + index))
    assert len(own._drafts) <= MAX_KINDS
