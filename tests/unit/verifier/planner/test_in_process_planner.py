"""In-process drafts are observed by class while classes come alone, together where they meet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider_verifier.model_runner.interface import DraftShapeTimes
from outrider_verifier.planner.in_process_planner import InProcessPlanner
from outrider_verifier.planner.statistics import LoadStats, RoundSample
from outrider_verifier.planner.workload import MAX_WORKLOAD_CLASSES, WorkloadClass

from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule


def times(rows: int, *, own: bool, chunks: int = 0) -> float | None:
    """In-process drafts make rounds half as long again."""
    return 0.006 if own else 0.004


def chains(rows: int) -> Sequence[DraftShapeTimes]:
    return [DraftShapeTimes(5, False, 0.006)]


def chains_and_trees(rows: int) -> Sequence[DraftShapeTimes]:
    found = [DraftShapeTimes(5, False, 0.006), DraftShapeTimes(17, True, 0.0066)]
    return found if rows <= 16 else found[:1]


def unmeasured_chains(rows: int) -> Sequence[DraftShapeTimes]:
    """A drafter on another device: the warm-up has measured no rounds with its drafts."""
    return [DraftShapeTimes(5, False, math.nan)]


def kind(temperature: float) -> WorkloadClass:
    return WorkloadClass(None, DraftMethod.EAGLE3, 4, 1, Rule.COUPLED, temperature)


COLD, HOT = kind(0.0), kind(2.0)


class Rounds:
    """A planner and its rounds."""

    def __init__(self, sessions: int, shapes=chains) -> None:  # type: ignore[no-untyped-def]
        self.loads = LoadStats(times)
        self.loads.begin_round(sessions)
        self.planner = InProcessPlanner(self.loads, times, shapes)

    def run(self, tokens: int, *, rounds: int = 60, rows: int = 0, with_drafts: int = 0) -> int:
        """Rounds of all sessions, or of so many `rows`, of which `with_drafts` have drafts, 0: as
        the planner says. Trees give one token more. Returns how many rounds had drafts."""
        drafted_rounds = 0
        for _ in range(rounds):
            self.planner.choose_shape()
            count = rows or self.loads.sessions
            nodes = (self.planner.num_nodes or 5) - 1
            drafted = 0 if self.planner.is_plain else with_drafts or count
            seconds = {0: 0.0045, 4: 0.0065, 16: 0.0071}[nodes if drafted else 0]
            self.loads.observe_round(RoundSample(count, nodes, 0, 0, seconds))
            self.planner.observe_rows(
                [tokens + (nodes == 16)] * drafted, nodes, rows=count, seconds=seconds, weight=1.0
            )
            drafted_rounds += drafted > 0
        self.planner.choose_shape()
        return drafted_rounds


def test_hot_sessions_give_drafts_up_and_cold_ones_that_follow_do_not() -> None:
    rounds = Rounds(8)
    rounds.planner.add_session(HOT)
    rounds.run(1)
    assert rounds.planner.is_plain
    (summary,) = rounds.planner.summaries()
    assert str(HOT) in summary and "plain" in summary
    rounds.planner.remove_session(HOT, is_plain=False)
    rounds.planner.add_session(COLD)
    rounds.run(3)
    assert not rounds.planner.is_plain
    rounds.planner.remove_session(COLD, is_plain=False)
    rounds.planner.add_session(HOT)
    rounds.planner.choose_shape()
    assert rounds.planner.is_plain
    assert list(rounds.planner.summaries())


def test_classes_that_share_rounds_are_judged_by_what_these_give() -> None:
    rounds = Rounds(8)
    rounds.planner.add_session(HOT)
    rounds.planner.add_session(COLD)
    rounds.run(2)
    assert not rounds.planner.is_plain
    rounds.run(1, rounds=300)
    assert rounds.planner.is_plain
    rounds.planner.remove_session(HOT, is_plain=True)
    rounds.planner.choose_shape()
    assert not rounds.planner.is_plain


def test_rounds_of_a_part_of_the_sessions_or_with_others_decide_nothing() -> None:
    rounds = Rounds(8)
    rounds.planner.add_session(HOT)
    rounds.run(1, rows=4)
    rounds.run(1, rows=8, with_drafts=4)
    assert not rounds.planner.is_plain


def test_drafts_are_given_up_only_at_a_load_that_lasts() -> None:
    rounds = Rounds(64)
    rounds.planner.add_session(HOT)
    rounds.run(1, rounds=70)
    assert not rounds.planner.is_plain, "64 sessions have only begun"
    rounds.run(1, rounds=40)
    assert rounds.planner.is_plain


def test_sessions_that_begin_get_drafts_again_some_time() -> None:
    rounds = Rounds(8)
    rounds.planner.add_session(HOT)
    rounds.run(1)
    rounds.planner.record_dropped_drafts()
    assert rounds.planner.is_plain
    drafted = rounds.run(1, rounds=40_000)
    assert 0 < drafted < 1000


def test_the_draft_shape_follows_the_load() -> None:
    rounds = Rounds(8, chains_and_trees)
    assert rounds.planner.num_nodes == 0, "whatever the runner has"
    rounds.planner.add_session(COLD)
    rounds.planner.choose_shape()
    assert rounds.planner.num_nodes == 5
    rounds.run(3, rounds=120)
    assert rounds.planner.num_nodes == 17
    rounds.loads.reset_after_idle(64)
    rounds.loads.begin_round(64)
    rounds.planner.choose_shape()
    assert rounds.planner.num_nodes == 5


def test_no_more_classes_are_kept_than_fit() -> None:
    rounds = Rounds(8)
    for index in range(2 * MAX_WORKLOAD_CLASSES):
        rounds.planner.add_session(kind(3.0 + index))
        rounds.run(3, rounds=1)
        rounds.planner.remove_session(kind(3.0 + index), is_plain=False)
    assert rounds.planner.num_controllers <= MAX_WORKLOAD_CLASSES


def test_a_round_without_in_process_drafts_tells_nothing() -> None:
    rounds = Rounds(8)
    rounds.planner.observe_rows([], 0, rows=8, seconds=0.004, weight=1.0)
    assert not list(rounds.planner.summaries())


def test_drafts_without_measured_times_stay_while_they_win_and_go_where_they_lose() -> None:
    for tokens, wins in ((3, True), (1, False)):
        rounds = Rounds(8, unmeasured_chains)
        rounds.planner.add_session(COLD)
        assert rounds.run(tokens) == 60 if wins else rounds.run(tokens) < 30
        assert rounds.planner.is_plain is not wins
