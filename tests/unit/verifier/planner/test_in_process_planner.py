"""Own drafts are judged by kind of session while kinds come alone, and together where they meet."""

from __future__ import annotations

from outrider_verifier.model_runner.results import NO_ROWS
from outrider_verifier.planner.in_process_planner import (
    MAX_KINDS,
    InProcessDraftPlanner,
    InProcessRow,
    in_process_rows,
)
from outrider_verifier.planner.load_stats import LoadStats, RoundSample
from outrider_verifier.planner.workload_stats import SpeculationState, WorkloadClass, WorkloadStats

from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.speculation.cost_table import CostTable
from outrider.speculation.draft_shape_controller import DraftShapeTimes


def times(rows: int, *, own: bool, chunks: int = 0, featured: bool = False) -> float | None:
    """Own drafts make rounds half as long again."""
    return 0.006 if own else 0.004


def kind(temperature: float) -> WorkloadClass:
    return WorkloadClass(None, DraftMethod.EAGLE3, 4, 1, Rule.COUPLED, temperature)


COLD, HOT = kind(0.0), kind(2.0)


def row(of: WorkloadClass, tokens: int) -> InProcessRow:
    return SpeculationState(WorkloadStats(of), is_in_process=True), tokens, 4


def verdicts(*workload_classes: WorkloadClass) -> InProcessDraftPlanner:
    loads = LoadStats(times, CostTable())
    loads.begin_round(8)
    own = InProcessDraftPlanner(loads, lambda _: ())
    for of in workload_classes:
        own.add_session(of)
    return own


def rounds(
    own: InProcessDraftPlanner, rows: list[InProcessRow], *, count: int = 20, now: float = 0.0
) -> None:
    for _ in range(count):
        ran = RoundSample(len(rows), 0, 0, 0.0065, has_in_process_drafts=True)
        own.observe_rows(rows, ran, now)


def test_hot_sessions_give_drafts_up_and_cold_ones_that_follow_do_not() -> None:
    own = verdicts(HOT)
    rounds(own, [row(HOT, 1)] * 8)
    assert own.is_plain(1.0)
    assert [name for name, _, _ in own.summaries(1.0)] == [f"own drafts, {HOT}"]
    own.remove_session(HOT)
    own.add_session(COLD)
    assert not own.is_plain(1.0)
    own.remove_session(COLD)
    own.add_session(HOT)
    assert own.is_plain(2.0)
    assert not own.is_plain(40.0)


def test_while_sessions_of_a_kind_without_drafts_are_served_all_decode_plainly() -> None:
    own = verdicts(HOT)
    rounds(own, [row(HOT, 1)] * 8)
    own.add_session(COLD)
    assert own.is_plain(1.0)


def test_kinds_that_share_rounds_are_judged_by_what_these_give() -> None:
    own = verdicts(HOT, COLD)
    rounds(own, [row(HOT, 1)] * 4 + [row(COLD, 4)] * 4)
    assert not own.is_plain(1.0)
    rounds(own, [row(HOT, 1)] * 7 + [row(COLD, 2)], count=200)
    # Whether the host has less to do in plain rounds is seen first, for a moment.
    rounds(own, [row(HOT, 1)] * 7 + [row(COLD, 2)], now=0.5)
    assert own.is_plain(1.0)
    own.remove_session(HOT)
    assert not own.is_plain(1.0)


def test_a_load_that_is_left_for_a_moment_goes_on_deciding() -> None:
    own = verdicts(HOT)
    loads = own._loads
    for _ in range(100):
        loads.begin_round(64)
        loads.observe_round(RoundSample(64, 0, 0, 0.004))
    rounds(own, [row(HOT, 1)] * 64)
    assert own.is_plain(1.0)
    loads.begin_round(20)
    assert loads.load < 6 and own.is_plain(1.0)
    for _ in range(100):
        loads.begin_round(20)
        loads.observe_round(RoundSample(20, 0, 0, 0.004))
    assert not own.is_plain(1.0)


def test_a_load_that_is_passed_on_the_way_to_one_where_drafts_win_pauses_nobody() -> None:
    own = verdicts(HOT)
    loads = own._loads
    rounds(own, [row(HOT, 1)] * 8)
    assert own.is_plain(1.0)
    loads.reset_after_idle(1)
    loads.begin_round(64)
    rounds(own, [row(HOT, 4)] * 64)
    loads.reset_after_idle(1)
    loads.begin_round(8)
    assert not own.is_plain(1.0)
    for _ in range(100):
        loads.observe_round(RoundSample(8, 0, 0, 0.004))
    assert own.is_plain(1.0)


def test_beside_sessions_without_drafts_it_is_asked_what_all_would_get_with_them() -> None:
    def dear(rows: int, *, own: bool, chunks: int = 0, featured: bool = False) -> float:
        return 0.002 + 0.0001 * rows if own else 0.002

    loads = LoadStats(dear, CostTable())
    loads.begin_round(64)
    own = InProcessDraftPlanner(loads, lambda _: ())
    own.add_session(HOT)
    for _ in range(40):
        own.observe_rows(
            [row(HOT, 2)] * 4,
            RoundSample(64, 0, 0, 0.01, has_in_process_drafts=True),
            0.0,
        )
    assert own.is_plain(1.0)


def test_rounds_with_others_tell_of_tokens_and_no_more_kinds_are_kept_than_fit() -> None:
    own = verdicts(HOT)
    for _ in range(20):
        own.observe_rows(
            [row(HOT, 1)] * 8,
            RoundSample(9, 0, 3, 0.01, 1, has_in_process_drafts=True),
            0.0,
        )
    assert own.is_plain(1.0)
    own.remove_session(HOT)
    for index in range(2 * MAX_KINDS):
        own.add_session(kind(3.0 + index))
        own.remove_session(kind(3.0 + index))
    assert len(own._drafts) <= MAX_KINDS


def test_the_draft_shape_follows_the_load() -> None:
    def shapes(rows: int) -> list[DraftShapeTimes]:
        chains = DraftShapeTimes(5, False, 0.006)
        return [chains, DraftShapeTimes(17, True, 0.0066)] if rows <= 16 else [chains]

    loads = LoadStats(times, CostTable())
    own = InProcessDraftPlanner(loads, shapes)
    own.add_session(COLD)
    assert own.num_nodes == 0, "whatever the runner has"
    loads.begin_round(8)
    own.choose_shape()
    assert own.num_nodes == 5
    for _ in range(100):
        rounds(own, [row(COLD, 3)] * 8, count=1)
        own.choose_shape()
    assert own.num_nodes == 17
    loads.reset_after_idle(64)
    loads.begin_round(64)
    own.choose_shape()
    assert own.num_nodes == 5


def test_a_round_without_in_process_drafts_has_no_rows_to_judge() -> None:
    assert in_process_rows([], NO_ROWS) == []
