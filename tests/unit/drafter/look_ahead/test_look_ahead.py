"""Look-ahead in the engine: what is sent, what a verdict makes of it, and what ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from outrider_drafter.look_ahead import scheduler, time_budget
from outrider_drafter.proposers.interface import LookAheadProposer
from outrider_drafter.server.draft_engine import ConnectionClosed, DraftEngine

from outrider.spec.digest import extend_digest
from outrider.spec.plan import SpeculationPlan
from outrider.spec.tree import path
from outrider.wire.messages import PlanChange, Proposal, Proposals, SessionEnd
from tests.unit.drafter.helpers import answers, counted, make_engine
from tests.unit.drafter.scripted_look_ahead import AHEAD, ScriptedProposer, counting, started

HITS = "outrider_drafter_outcomes_total"


def looked(engine: DraftEngine) -> list[Proposal]:
    """All drafts for outcomes."""
    return [p for together in engine.run_look_ahead() for p in entries(together)]


def entries(together: scheduler.OutgoingProposals) -> list[Proposal]:
    return [p for _, m in together if isinstance(m, Proposals) for p in m.iter_proposals()]


def test_the_best_outcomes_of_the_live_proposal_are_drafted_for() -> None:
    script, proposer = counting(), ScriptedProposer()
    engine = started(proposer, script)
    assert not engine.has_look_ahead_work
    (live,) = answers(engine)
    assert engine.has_look_ahead_work and live.tree.tokens.tolist() == [10, 11]
    proposals = looked(engine)
    assert not engine.has_look_ahead_work and len(proposals) == AHEAD.fan_out
    # Below two accepted nodes .6 x .6 x .6, at the root .2 and .12: its best one is a child.
    outcomes = [(o.node, o.token) for o in proposer.drafted_outcomes[0]]
    assert outcomes[:2] == [(1, 12), (-1, 11)]
    for proposal, (node, token) in zip(proposals, outcomes, strict=True):
        suffix = [*live.tree.tokens[list(path(live.tree.parents, node))].tolist(), token]
        assert proposal.prefix_digest == extend_digest(script.digest(10), suffix)
        assert proposal.prefix_len == 10 + len(suffix)
        assert proposal.handle == script.handle
        assert proposal.tree.tokens.tolist() == [token + 1, token + 2]
    assert counted(engine, "outrider_drafter_outcome_drafts_total", method="ngram") == 3
    assert counted(engine, "outrider_drafter_look_aheads_total", method="ngram") == 1


def test_a_hit_is_not_drafted_again_and_is_the_next_to_look_ahead_from() -> None:
    script, proposer = counting(), ScriptedProposer()
    engine = started(proposer, script)
    answers(engine)
    looked(engine)
    # 10, 11 stand and 12 follows: a leaf's outcome.
    engine.handle_message(1, script.verdict(13, with_features=False))
    assert not engine.has_wanted_drafts and engine.has_look_ahead_work
    assert answers(engine) == []
    proposals = looked(engine)
    assert [each.tree.tokens.tolist() for each in proposer.pending] == [[13, 14]]
    assert {p.prefix_digest for p in proposals} >= {script.digest(16)}
    assert counted(engine, HITS, result="hit") == 1
    engine.handle_message(1, script.verdict(16, with_features=False))
    assert counted(engine, HITS, result="hit") == 2 and not engine.has_wanted_drafts


def test_a_miss_is_drafted_as_ever() -> None:
    script, proposer = counting(), ScriptedProposer()
    script.tokens[11:] += 50
    engine = started(proposer, script)
    answers(engine)
    looked(engine)
    engine.handle_message(1, script.verdict(12, with_features=False))
    assert engine.has_wanted_drafts and not engine.has_look_ahead_work
    (proposal,) = answers(engine)
    assert proposal.prefix_digest == script.digest(12)
    assert counted(engine, HITS, result="miss") == 1
    assert looked(engine)


def test_a_repeated_verdict_is_answered_again() -> None:
    script, proposer = counting(), ScriptedProposer()
    engine = make_engine([proposer])
    engine.handle_message(1, script.start(plan=AHEAD))
    verdict = script.verdict(10, with_features=False)
    for _ in range(2):
        engine.handle_message(1, verdict)
        assert len(answers(engine)) == 1
        assert len(looked(engine)) == 3
    assert counted(engine, HITS, result="miss") == 0


def test_rounds_that_come_together_are_followed_one_by_one() -> None:
    script, proposer = counting(), ScriptedProposer()
    engine = started(proposer, script)
    answers(engine)
    looked(engine)
    for end in (13, 14):
        engine.handle_message(1, script.verdict(end, with_features=False))
    assert [p.prefix_len for p in answers(engine)] == [14]
    assert counted(engine, HITS, result="hit") == counted(engine, HITS, result="miss") == 1


@pytest.mark.parametrize("plan", [replace(AHEAD, look_ahead=0), replace(AHEAD, draft_tokens=0)])
def test_a_session_in_lock_step_never_looks_ahead(plan: SpeculationPlan) -> None:
    proposer = ScriptedProposer()
    engine = started(proposer, counting(), plan=plan)
    answers(engine)
    assert not engine.has_look_ahead_work and looked(engine) == [] and not proposer.scored


def test_a_proposer_that_cannot_is_never_asked() -> None:
    class OnlyDrafts:
        """Without the two methods."""

        def __getattr__(self, name: str) -> Any:
            if name in ("score_proposals", "draft_outcomes"):
                raise AttributeError(name)
            return getattr(inner, name)

    inner = ScriptedProposer()
    proposer: Any = OnlyDrafts()
    assert not isinstance(proposer, LookAheadProposer)
    engine = make_engine([proposer])
    script = counting()
    engine.handle_message(1, script.start(plan=AHEAD))
    engine.handle_message(1, script.verdict(10, with_features=False))
    assert len(answers(engine)) == 1 and not engine.has_look_ahead_work


def test_a_change_of_plan_forgets_what_was_sent_ahead() -> None:
    script, proposer = counting(), ScriptedProposer()
    engine = started(proposer, script)
    answers(engine)
    looked(engine)
    engine.handle_message(1, PlanChange(handle=script.handle, plan=replace(AHEAD, draft_tokens=1)))
    assert not engine.has_look_ahead_work
    engine.handle_message(1, script.verdict(13, with_features=False))
    assert len(answers(engine)) == 1 and engine.has_look_ahead_work
    engine.handle_message(1, PlanChange(handle=script.handle, plan=replace(AHEAD, look_ahead=0)))
    assert not engine.has_look_ahead_work
    engine.handle_message(1, script.verdict(14, with_features=False))
    assert len(answers(engine)) == 1 and not engine.has_look_ahead_work


@pytest.mark.parametrize("end", ["end", "closed", "lost"])
def test_a_session_that_is_gone_is_not_looked_ahead_for(end: str) -> None:
    gone, stays, proposer = counting("a"), counting("b"), ScriptedProposer()
    engine = started(proposer, gone, stays)
    answers(engine)
    if end == "end":
        engine.handle_message(1, SessionEnd(handle=gone.handle))
    elif end == "closed":
        engine.handle_message(1, ConnectionClosed())
    else:
        gone.told += 5
        engine.handle_message(1, gone.verdict(20, with_features=False))
    handles = {proposal.handle for proposal in looked(engine)}
    assert handles == (set() if end == "closed" else {stays.handle})
    # The handle may be taken by another session; nothing of the old one is a hit there.
    again = counting("a")
    engine.handle_message(1, again.start(plan=AHEAD))
    engine.handle_message(1, again.verdict(13, with_features=False))
    assert again.handle in {proposal.handle for proposal in answers(engine)}


def test_nothing_is_drafted_for_beyond_the_sessions_end() -> None:
    for max_len, deepest in ((11, 0), (12, 0), (13, 1), (14, 2), (15, 3), (16, 3)):
        proposer = ScriptedProposer()
        engine = started(proposer, counting(), plan=replace(AHEAD, fan_out=64), max_len=max_len)
        answers(engine)
        assert max([p.prefix_len - 10 for p in looked(engine)], default=0) == deepest


def test_an_interrupted_look_ahead_goes_on_with_what_was_not_sent() -> None:
    script, proposer = counting(), ScriptedProposer()
    proposer.batch = 1
    engine = started(proposer, script)
    answers(engine)
    working = engine.run_look_ahead()
    assert next(working) == []
    first = entries(next(working))
    working.close()
    assert engine.has_look_ahead_work
    rest = looked(engine)
    digests = [p.prefix_digest for p in (*first, *rest)]
    assert len(set(digests)) == len(digests) == AHEAD.fan_out
    assert len(proposer.scored) == 2


def test_messages_never_interrupt_twice_before_anything_was_drafted() -> None:
    """Many verifiers may send faster than their sessions are scored."""
    scripts, proposer = [counting(name) for name in "abc"], ScriptedProposer()
    engine = started(proposer, *scripts)
    answers(engine)
    for sent in (0, 9, 0, 9):
        working = engine.run_look_ahead()
        assert len(entries(next(working))) == sent
        working.close()
        engine.handle_message(1, scripts[0].verdict(scripts[0].told + 1, with_features=False))
        answers(engine)
        if sent:
            for script in scripts[1:]:
                engine.handle_message(1, script.verdict(script.told + 1, with_features=False))
            answers(engine)
    assert counted(engine, "outrider_drafter_outcome_drafts_total", method="ngram") == 18


def test_outcomes_that_a_verdict_contradicts_are_dropped() -> None:
    script, proposer = counting(), ScriptedProposer()
    script.tokens[11:] += 50
    proposer.batch = 1
    engine = started(proposer, script)
    answers(engine)
    working = engine.run_look_ahead()
    next(working)
    next(working)
    working.close()
    engine.handle_message(1, script.verdict(12, with_features=False))
    assert counted(engine, "outrider_drafter_dropped_outcomes_total") == 2
    assert len(answers(engine)) == 1


def test_the_best_outcomes_of_all_sessions_are_drafted_for_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time_budget, "OUTCOME_BATCH_SIZES", (4,))
    scripts, proposer = [counting(name) for name in "abc"], ScriptedProposer()
    engine = started(proposer, *scripts)
    answers(engine)
    sizes = [len(entries(together)) for together in engine.run_look_ahead()]
    assert sizes == [0, 4, 0, 4, 0, 1]
    assert len(proposer.scored) == 1 and len(proposer.scored[0]) == 3
    assert {o.live for o in proposer.drafted_outcomes[0][:3]} == {0, 1, 2}
    assert {(o.node, o.token) for o in proposer.drafted_outcomes[0][:3]} == {(1, 12)}


@pytest.mark.parametrize("count", [1, 3, 8])
def test_outcomes_that_no_plan_counts_share_one_launch(count: int) -> None:
    """A chain of two has ten outcomes: four candidates a place, but for two children."""
    scripts, proposer = [counting(name) for name in "abcdefgh"[:count]], ScriptedProposer()
    engine = started(proposer, *scripts, plan=replace(AHEAD, fan_out=0))
    answers(engine)
    proposals = looked(engine)
    (drafted,) = proposer.drafted_outcomes
    assert len(proposals) == len(drafted) == min(10 * count, 64)
    assert (np.bincount([outcome.live for outcome in drafted]) >= 8).all()
    # What was left out is not waited for.
    engine.handle_message(1, scripts[0].verdict(13, with_features=False))
    assert counted(engine, "outrider_drafter_dropped_outcomes_total") == 0


def test_a_plan_that_counts_its_outcomes_gets_them_beside_others() -> None:
    counted_for, left_open, proposer = counting("a"), counting("b"), ScriptedProposer()
    engine = started(proposer, counted_for, plan=replace(AHEAD, fan_out=7))
    engine.handle_message(1, left_open.start(plan=replace(AHEAD, fan_out=0)))
    engine.handle_message(1, left_open.verdict(10, with_features=False))
    answers(engine)
    handles = [proposal.handle for proposal in looked(engine)]
    assert handles.count(counted_for.handle) == 7
    assert handles.count(left_open.handle) == 10


def test_drafts_for_several_verifiers_go_to_each_its_own() -> None:
    engine = make_engine([ScriptedProposer()])
    for connection in (1, 2):
        script = counting("ab"[connection - 1])
        engine.handle_message(connection, script.start(plan=AHEAD))
        engine.handle_message(connection, script.verdict(10, with_features=False))
    answers(engine)
    found = [
        (connection, len(message.handles))
        for together in engine.run_look_ahead()
        for connection, message in together
        if isinstance(message, Proposals)
    ]
    assert sorted(found) == [(1, 3), (2, 3)]


@pytest.mark.parametrize("step", ["score", "outcomes"])
def test_a_failed_look_ahead_leaves_its_sessions_in_lock_step(step: str) -> None:
    script, proposer = counting(), ScriptedProposer()
    engine = started(proposer, script)
    answers(engine)
    proposer.fails_in = step
    assert looked(engine) == []
    proposer.fails_in = ""
    assert counted(engine, "outrider_drafter_look_ahead_failures_total", method="ngram") == 1
    assert not engine.device_lost
    engine.handle_message(1, script.verdict(13, with_features=False))
    assert len(answers(engine)) == 1
    engine.handle_message(1, PlanChange(handle=script.handle, plan=AHEAD))
    engine.handle_message(1, script.verdict(14, with_features=False))
    assert len(answers(engine)) == 1 and not engine.has_look_ahead_work
    # Another session is not to blame.
    other = counting("b")
    engine.handle_message(1, other.start(plan=AHEAD))
    engine.handle_message(1, other.verdict(10, with_features=False))
    answers(engine)
    assert looked(engine)


def test_a_failed_look_ahead_finds_a_lost_device() -> None:
    proposer = ScriptedProposer()
    engine = started(proposer, counting())
    answers(engine)
    proposer.fails_in, proposer.works = "score", False
    assert looked(engine) == []
    assert engine.device_lost


def test_verdicts_teach_which_outcomes_come() -> None:
    """The third candidate always follows: soon it is drafted for first."""
    script, proposer = counting(), ScriptedProposer()
    script.tokens[10:] = 12 + 3 * np.arange(len(script.tokens) - 10)
    engine = started(proposer, script, plan=replace(AHEAD, fan_out=1))
    answers(engine)
    firsts = []
    for end in range(11, 40):
        looked(engine)
        firsts.append(proposer.drafted_outcomes[-1][0])
        engine.handle_message(1, script.verdict(end, with_features=False))
        answers(engine)
        engine.update_metrics()
    assert (firsts[0].node, firsts[0].token) == (1, 12)
    assert (firsts[-1].node, firsts[-1].token) == (-1, int(script.tokens[38]))
    assert counted(engine, HITS, result="hit") > 10
