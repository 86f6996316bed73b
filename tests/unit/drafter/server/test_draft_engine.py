"""The engine: what verdicts do to a session, and that none of them can do harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outrider_drafter.proposers.interface import Proposer, SessionDrafts
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.draft_engine import ConnectionClosed, DraftEngine
from outrider_drafter.state.session import FollowedSession

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import validate_tree
from outrider.wire.messages import (
    FeatureLayout,
    PlanChange,
    Proposals,
    SessionEnd,
    SessionsLost,
    TensorDtype,
    Verdicts,
    WireTensor,
)
from tests.unit.drafter.helpers import (
    CHAIN,
    HIDDEN,
    VOCAB,
    Script,
    answers,
    counted,
    drain,
    handle_of,
    head_source,
    make_engine,
    name_of,
    repeating,
)

NGRAM = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=3)
LOST = "outrider_drafter_lost_sessions_total"
IGNORED = "outrider_drafter_ignored_messages_total"


def started(script: Script, plan: SpeculationPlan = NGRAM, **start: Any) -> DraftEngine:
    engine = make_engine([NgramProposer(min_match=1)])
    engine.handle_message(1, script.start(plan=plan, **start))
    return engine


def test_only_the_newest_of_several_waiting_verdicts_is_drafted() -> None:
    script = repeating()
    engine = started(script)
    for end in (10, 11, 13):
        engine.handle_message(1, script.verdict(end))
    (proposal,) = drain(engine)
    assert proposal.prefix_len == 13


def test_a_verdict_that_wants_no_draft_gets_none() -> None:
    script = repeating()
    engine = started(script)
    engine.handle_message(1, script.verdict(10, draft_wanted=False))
    assert drain(engine) == []


def test_a_wish_is_withdrawn_by_a_later_verdict_without_one() -> None:
    script = repeating()
    engine = started(script)
    engine.handle_message(1, script.verdict(10))
    engine.handle_message(1, script.verdict(12, draft_wanted=False))
    assert drain(engine) == []


def test_a_plan_without_drafts_gets_none() -> None:
    script = repeating()
    engine = started(script, plan=SpeculationPlan())
    engine.handle_message(1, script.verdict(10))
    assert drain(engine) == []
    engine.handle_message(1, PlanChange(handle=script.handle, plan=NGRAM))
    engine.handle_message(1, script.verdict(12))
    assert len(drain(engine)) == 1


def test_a_method_that_is_not_offered_gives_no_proposal() -> None:
    script = repeating()
    engine = started(script, plan=CHAIN)
    engine.handle_message(1, script.verdict(10))
    (answer,) = answers(engine)
    assert len(answer.tree) == 0
    assert counted(engine, "outrider_drafter_no_proposal_total", method="eagle3") == 1


@pytest.mark.parametrize(
    "plan", [NGRAM, CHAIN, replace(NGRAM, method=DraftMethod.MODEL)], ids=lambda p: p.method
)
def test_a_wish_that_cannot_be_met_is_answered_at_once(
    tmp_path: Path, plan: SpeculationPlan
) -> None:
    """Nothing matches, the features are missing, the source fails: an empty proposal."""
    sources: list[Proposer] = [NgramProposer(), head_source(tmp_path), Broken(catches_up=True)]
    engine, script = make_engine(sources), Script()
    script.tokens[:] = range(len(script.tokens))
    engine.handle_message(1, script.start(plan=plan))
    engine.handle_message(1, script.verdict(10, with_features=False))
    (answer,) = answers(engine)
    assert len(answer.tree) == 0 and answer.distribution is None
    assert answer.prefix_digest == script.digest(10) and answer.prefix_len == 10
    validate_tree(answer.tree, vocab_size=VOCAB, max_nodes=256)
    assert counted(engine, "outrider_drafter_no_proposal_total", method=plan.method) == 1


def test_drafts_end_at_the_sessions_last_token() -> None:
    script = repeating()
    engine = started(script, plan=replace(NGRAM, draft_tokens=8), max_len=20)
    for end, expected in ((12, 7), (16, 3), (18, 1)):
        engine.handle_message(1, script.verdict(end))
        (proposal,) = drain(engine)
        assert len(proposal.tree) == expected
    engine.handle_message(1, script.verdict(19))
    (nothing,) = answers(engine)
    assert len(nothing.tree) == 0
    assert nothing.prefix_len == 19


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start": 11}, "token_gap"),
        ({"start": 8}, "token_conflict"),
        ({"prefix_digest": 1}, "digest"),
        ({"tokens": np.array([VOCAB], np.int32)}, "token_range"),
        ({"tokens": np.array([-1], np.int32)}, "token_range"),
        ({"tokens": np.zeros(600, np.int32)}, "too_long"),
    ],
)
def test_a_verdict_that_does_not_continue_the_prefix_loses_the_session(
    change: dict[str, Any], reason: str
) -> None:
    script = repeating()
    engine = started(script)
    engine.handle_message(1, script.verdict(10))
    assert len(drain(engine)) == 1
    engine.handle_message(1, Verdicts.of_verdicts([replace(script.entry(12), **change)]))
    assert drain(engine) == []
    assert counted(engine, LOST, reason=reason) == 1
    engine.handle_message(1, script.verdict(14))
    assert drain(engine) == []
    assert counted(engine, LOST, reason=reason) == 1
    fresh = repeating()
    engine.handle_message(1, fresh.start(plan=NGRAM))
    engine.handle_message(1, fresh.verdict(14))
    assert len(drain(engine)) == 1


@pytest.mark.parametrize(
    ("features", "start", "reason"),
    [
        (np.zeros((2, HIDDEN + 1), np.float32), 9, "feature_shape"),
        (np.zeros((2, HIDDEN), np.float32), 10, "feature_gap"),
        (np.zeros((3, HIDDEN), np.float32), 9, "feature_range"),
    ],
)
def test_features_that_do_not_fit_lose_the_session(
    tmp_path: Path,
    features: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    start: int,
    reason: str,
) -> None:
    engine, script = make_engine([head_source(tmp_path)]), Script()
    engine.handle_message(1, script.start())
    engine.handle_message(1, script.verdict(10))
    assert len(drain(engine)) == 1
    wire = WireTensor(dtype=TensorDtype.FLOAT32, data=features)
    verdict = replace(script.entry(12), features=wire, feature_start=start)
    engine.handle_message(1, Verdicts.of_verdicts([verdict]))
    assert drain(engine) == []
    assert counted(engine, LOST, reason=reason) == 1


def test_features_that_are_missing_only_cost_the_proposal(tmp_path: Path) -> None:
    engine, script = make_engine([head_source(tmp_path)]), Script()
    engine.handle_message(1, script.start())
    engine.handle_message(1, script.verdict(10))
    assert len(drain(engine)) == 1
    engine.handle_message(1, script.verdict(12, with_features=False))
    assert drain(engine) == []
    engine.handle_message(1, script.verdict(13))
    (proposal,) = drain(engine)
    assert proposal.prefix_len == 13


def test_a_replayed_verdict_changes_nothing() -> None:
    script = repeating()
    engine = started(script)
    verdicts = [script.verdict(end) for end in (10, 12, 13)]
    for verdict in [*verdicts, *verdicts, verdicts[0]]:
        engine.handle_message(1, verdict)
    (proposal,) = drain(engine)
    assert proposal.prefix_digest == script.digest(13)
    assert sum(counted(engine, LOST, reason=r) for r in ("digest", "token_conflict")) == 0


def test_verdicts_of_another_session_are_ignored() -> None:
    script = repeating()
    engine = started(script)
    engine.handle_message(1, repeating("other").verdict(10))
    engine.handle_message(2, script.verdict(10))
    assert drain(engine) == []
    assert counted(engine, IGNORED, reason="unknown_session") == 2


@pytest.mark.parametrize("start", [{"max_len": 0}, {"max_len": 9999}, {"prompt_len": 0}])
def test_an_impossible_session_is_not_followed(start: dict[str, Any]) -> None:
    engine = started(repeating(), **start)
    assert engine.num_sessions == 0


def test_the_least_recently_used_session_makes_room() -> None:
    engine = make_engine([NgramProposer(min_match=1)], max_sessions=2)
    first, second, third = (repeating(name) for name in ("a", "b", "c"))
    engine.handle_message(1, first.start(plan=NGRAM))
    engine.handle_message(1, second.start(plan=NGRAM))
    engine.handle_message(1, first.verdict(10))
    engine.handle_message(1, third.start(plan=NGRAM))
    assert engine.num_sessions == 2
    engine.handle_message(1, second.verdict(10))
    engine.handle_message(1, third.verdict(10))
    assert {name_of(p) for p in drain(engine)} == {"a", "c"}


def test_one_verifiers_sessions_do_not_push_out_anothers() -> None:
    engine = make_engine([NgramProposer(min_match=1)], max_sessions=4)
    mine = repeating("mine")
    engine.handle_message(1, mine.start(plan=NGRAM))
    others = [repeating(f"other {number}") for number in range(9)]
    for other in others:
        engine.handle_message(2, other.start(plan=NGRAM))
    assert engine.num_sessions == 4
    engine.handle_message(1, mine.verdict(10))
    for other in others:
        engine.handle_message(2, other.verdict(10))
    assert {name_of(p) for p in drain(engine)} == {"mine", "other 6", "other 7", "other 8"}


def test_a_session_that_is_told_of_twice_in_a_message_is_lost_and_no_other() -> None:
    engine = make_engine([NgramProposer(min_match=1)])
    twice, once = repeating("twice"), repeating("once")
    for script in (twice, once):
        engine.handle_message(1, script.start(plan=NGRAM))
    told = [twice.entry(10), once.entry(10), twice.entry(12)]
    engine.handle_message(1, Verdicts.of_verdicts(told))
    assert [name_of(p) for p in drain(engine)] == ["once"]
    assert counted(engine, LOST, reason="repeated") == 1


def test_the_bad_entries_of_a_message_cost_their_own_sessions() -> None:
    engine = make_engine([NgramProposer(min_match=1)])
    scripts = [repeating(name) for name in "abcdef"]
    for script in scripts:
        engine.handle_message(1, script.start(plan=NGRAM))
    told = [script.entry(10 + place) for place, script in enumerate(scripts)]
    told[1] = replace(told[1], prefix_digest=3)
    told[2] = replace(told[2], tokens=np.full(12, VOCAB, dtype=np.int32))
    told[4] = replace(told[4], start=2**32 - 1)
    told[5] = replace(told[5], handle=2**32 - 1)
    engine.handle_message(1, Verdicts.of_verdicts(told))
    assert [(name_of(p), p.prefix_len) for p in drain(engine)] == [("a", 10), ("d", 13)]
    for reason in ("digest", "token_range", "token_gap"):
        assert counted(engine, LOST, reason=reason) == 1
    assert counted(engine, IGNORED, reason="unknown_session") == 1


def test_drafts_for_two_verifiers_are_two_messages() -> None:
    engine = make_engine([NgramProposer(min_match=1)])
    scripts = [repeating(name) for name in "abc"]
    for connection, script in zip((1, 2, 1), scripts, strict=True):
        engine.handle_message(connection, script.start(plan=NGRAM))
        engine.handle_message(connection, script.verdict(10))
    (together,) = engine.draft_wanted()
    found = {c: [(name_of(p), len(p.tree)) for p in m.iter_proposals()] for c, m in together}
    assert found == {1: [("a", 3), ("c", 3)], 2: [("b", 3)]}


def test_a_closed_connection_takes_its_sessions_with_it(tmp_path: Path) -> None:
    source = head_source(tmp_path)
    engine = make_engine([source])
    scripts = [Script("a"), Script("b"), Script("a")]
    for connection, script in zip((1, 1, 2), scripts, strict=True):
        engine.handle_message(connection, script.start())
        engine.handle_message(connection, script.verdict(10))
    drain(engine)
    engine.handle_message(1, ConnectionClosed())
    assert engine.num_sessions == 1
    engine.handle_message(2, SessionEnd(handle=handle_of("a")))
    assert engine.num_sessions == 0
    assert source.used_rows == 0


class Broken:
    """A source that fails while it drafts."""

    method = DraftMethod.MODEL
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""

    def __init__(self, *, catches_up: bool, usable: bool = True) -> None:
        self.catches_up = catches_up
        self.is_usable = usable
        self.released: list[str] = []

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        if not self.catches_up:
            raise RuntimeError("broken catch-up")

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        raise RuntimeError("broken draft")
        yield

    def release_session(self, session: FollowedSession) -> None:
        self.released.append(session.session_id)


@pytest.mark.parametrize("draft_wanted", [True, False])
def test_a_failing_source_costs_its_own_sessions_only(draft_wanted: bool) -> None:
    broken = Broken(catches_up=draft_wanted)
    engine = make_engine([broken, NgramProposer(min_match=1)])
    bad, good = repeating("bad"), repeating("good")
    engine.handle_message(1, bad.start(plan=replace(NGRAM, method=DraftMethod.MODEL)))
    engine.handle_message(1, good.start(plan=NGRAM))
    engine.handle_message(1, bad.verdict(10, draft_wanted=draft_wanted))
    engine.handle_message(1, good.verdict(10))
    assert [name_of(p) for p in drain(engine)] == ["good"]
    assert counted(engine, LOST, reason="error") == 1
    assert "bad" in broken.released


def test_a_lost_session_is_made_known_and_followed_again_once_announced_again() -> None:
    engine = make_engine([NgramProposer(min_match=1)])
    bad, good = repeating("bad"), repeating("good")
    for script in (bad, good):
        engine.handle_message(1, script.start(plan=NGRAM))
    told = [replace(bad.entry(10), prefix_digest=3), good.entry(10)]
    engine.handle_message(1, Verdicts.of_verdicts(told))
    first, second = engine.draft_wanted()
    assert first == [(1, SessionsLost((bad.handle,)))]
    assert [(c, len(m.handles)) for c, m in second] == [(1, 1)]
    engine.handle_message(1, bad.verdict(11))
    assert not engine.has_wanted_drafts
    fresh = repeating("bad")
    engine.handle_message(1, SessionEnd(handle=fresh.handle))
    engine.handle_message(1, fresh.start(plan=NGRAM))
    engine.handle_message(1, fresh.verdict(11))
    assert [(name_of(p), p.prefix_len) for p in drain(engine)] == [("bad", 11)]


def test_sessions_whose_drafting_failed_are_made_known() -> None:
    engine, script = make_engine([Broken(catches_up=True)]), repeating()
    engine.handle_message(1, script.start(plan=replace(NGRAM, method=DraftMethod.MODEL)))
    engine.handle_message(1, script.verdict(10))
    lost, nothing = engine.draft_wanted()
    assert lost == [(1, SessionsLost((script.handle,)))]
    ((_, message),) = nothing
    assert isinstance(message, Proposals) and message.node_counts.tolist() == [0]
