"""Which sessions of a round their drafters hear of, and what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from outrider_verifier.engine.in_flight_round import InFlightRound
from outrider_verifier.exchange.proposal_inbox import ProposalInbox
from outrider_verifier.exchange.verdict_builder import (
    VerdictBatch,
    VerdictBuilder,
    may_need_features,
)
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.model_runner.interface import DecodeOutput, RowOutput
from outrider_verifier.model_runner.results import VerdictInputs
from outrider_verifier.state.round_plan import RoundPlan
from outrider_verifier.state.session import Session

from outrider.ids import DrafterId
from outrider.spec.digest import EMPTY_DIGEST, extend_digest
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.wire.messages import Proposal, Proposals, TensorDtype
from tests.fakes.scripted_drafter import make_tree
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import make_spec


def session(handle: int, **options: Any) -> Session:
    """A session that decodes, of whose budget of 16 one token is used."""
    made = Session.create(
        make_spec(f"s{handle}", **options),
        ticket=handle,
        kv=FakeTarget(num_blocks=8).pool.allocate(32),
        now=0.0,
        keeps_features=True,
    )
    made.handle = handle
    made.link_id = None if made.spec.drafter_id is None else 1
    made.kv.advance(made.length)
    made.commit_tokens((7,), 0.0)
    return made


def decoded(*rows: tuple[int, ...]) -> DecodeOutput:
    """What rows emitted, with features."""
    return DecodeOutput(
        counts=np.array([len(row) for row in rows]),
        tokens=np.array([token for row in rows for token in row], dtype=np.int32),
        features=lambda: [np.full((len(row), 2), index) for index, row in enumerate(rows)],
        row_outputs=_nothing_more,
        draft_nodes=lambda: [0] * len(rows),
        special_rows=lambda: (),
    )


def _nothing_more(numbers: Sequence[int]) -> list[RowOutput]:
    raise AssertionError(f"nobody is to ask for rows {numbers}")


def inputs_of(sessions: list[Session]) -> VerdictInputs:
    """The inputs of a round of which some drafter hears."""
    verdict_inputs = VerdictInputs.of_sessions(sessions)
    assert verdict_inputs is not None
    return verdict_inputs


def batch_of(sessions: list[Session], outcome: DecodeOutput) -> VerdictBatch:
    """What a drafter is told of the round, which is something."""
    told = inputs_of(sessions).make_batch(outcome)
    assert told is not None
    return told


def pieces(told: VerdictBatch) -> list[list[int]]:
    """The tokens of each entry."""
    ends = np.cumsum(told.counts).tolist()
    return [
        told.tokens[end - count : end].tolist()
        for end, count in zip(ends, told.counts.tolist(), strict=True)
    ]


def test_all_go_on() -> None:
    sessions = [session(3), session(1)]
    told = batch_of(sessions, decoded((5, 6), (8,)))
    assert told.handles.tolist() == [3, 1]
    assert told.prefix_lens.tolist() == [6, 6] and told.written_positions.tolist() == [7, 6]
    assert pieces(told) == [[5, 6], [8]]
    assert told.draft_wanted.all() and told.is_prompt_done.all()


@pytest.mark.parametrize("reason", ["stop", "budget", "ended", "paused", "no drafter"])
def test_who_ends_or_is_followed_by_nobody_is_left_out(reason: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "stop": {"stop_token_ids": (6,)},
        "budget": {"max_new_tokens": 3},
        "no drafter": {"drafter": None},
    }
    out = session(0, **options.get(reason, {}))
    out.is_speculation_off = reason == "paused"
    if reason == "ended":
        out.mark_ended()
    told = batch_of([session(1), out, session(2)], decoded((5, 6), (5, 6), (6,)))
    assert told.handles.tolist() == [1, 2]
    assert pieces(told) == [[5, 6], [6]]
    assert [None if rows is None else rows[0, 0] for rows in told.features] == [0, 2]


@pytest.mark.parametrize("reason", ["nobody", "paused", "drafter"])
def test_where_no_drafter_hears_of_any_session_there_is_nothing_to_work_out(reason: str) -> None:
    sessions = [session(n, drafter="d" if reason == "drafter" else None) for n in range(2)]
    if reason == "paused":
        sessions = [session(number) for number in range(2)]
        for each in sessions:
            each.is_speculation_off = True
    verdict_inputs = VerdictInputs.of_sessions(sessions)
    assert (verdict_inputs is None) is (reason != "drafter")
    assert verdict_inputs is None or len(batch_of(sessions, decoded((5, 6), (7,)))) == 2


def test_a_session_closed_in_flight_does_not_cost_the_others_their_hits() -> None:
    stays, closed = sessions = [session(0), session(1)]
    box = ProposalInbox(max_sessions=2, per_session=2, reach=5, budget_bytes=1 << 20)
    verdict_builder = VerdictBuilder(
        inbox=box, store=None, dtype=TensorDtype.FLOAT32, chunk_tokens=8, max_sessions=2
    )
    for each in sessions:
        verdict_builder.follow_session(each)
    verdict_builder.advance_prefixes(VerdictBatch.of_current(sessions, [None, None]))
    prefix = extend_digest(EMPTY_DIGEST, stays.tokens[: stays.length])
    ahead = Proposal(
        handle=0,
        prefix_digest=extend_digest(prefix, (5, 6)),
        prefix_len=stays.length + 2,
        tree=make_tree([1]),
    )
    box.store_proposals(Proposals.of_proposals([ahead]), [0])
    closed.mark_ended()
    # Its place goes to another one at once, of which nothing is known.
    verdict_builder.follow_session(session(1))
    verdict_inputs = inputs_of(sessions)
    verdict_inputs.digests = verdict_builder.prefix_digests(
        verdict_inputs.handles, verdict_inputs.lengths, verdict_inputs.has_drafter
    )
    assert verdict_inputs.digests is not None and verdict_inputs.digests[0] == prefix
    assert verdict_inputs.advance_inbox(decoded((5, 6), (5, 6)), box)


def test_who_goes_on_steps_to_the_prefix_that_a_drafter_will_be_told_of() -> None:
    sessions = [session(0), session(1, stop_token_ids=(6,)), session(2), session(3)]
    sessions[2].is_speculation_off = True
    box = ProposalInbox(max_sessions=4, per_session=2, reach=5, budget_bytes=1 << 20)
    columns = np.arange(4), np.arange(4, dtype=np.uint64) + 40, np.full(4, 6)
    box.advance_sessions(*columns)
    ahead = [
        Proposal(
            handle=handle,
            prefix_digest=extend_digest(40 + handle, (5, 6)),
            prefix_len=8,
            tree=make_tree([1]),
        )
        for handle in range(3)
    ]
    box.store_proposals(Proposals.of_proposals(ahead), range(3))
    verdict_inputs, outcome = inputs_of(sessions), decoded(*[(5, 6)] * 4)
    assert not verdict_inputs.advance_inbox(outcome, box), "the digests are not known"
    verdict_inputs.digests = [40, 41, 42, 43]
    assert verdict_inputs.advance_inbox(outcome, box)
    # One stops, of one nobody is told, and for one there is no draft.
    assert box.num_nodes(range(4)) == [1, -1, -1, -1]
    assert not verdict_inputs.advance_inbox(decoded(*[(5, 7)] * 4), box)


def test_a_draft_is_wanted_where_the_budget_and_the_plan_leave_room_for_one() -> None:
    sessions = [
        session(0, max_new_tokens=4),
        session(1, max_new_tokens=5),
        session(2, plan=SpeculationPlan()),
        session(3),
    ]
    sessions[3].draft_limit = 0
    told = batch_of(sessions, decoded(*[(5, 6)] * 4))
    wanted = []
    for each in sessions:
        each.commit_tokens((5, 6), 0.0)
        wanted.append(each.draft_wanted)
    assert told.draft_wanted.tolist() == wanted == [False, True, False, False]


def test_what_a_drafter_missed_comes_before_what_is_new() -> None:
    sessions = [session(0), session(1)]
    told = batch_of(sessions, decoded((8, 9), (5,)))
    assert told.tokens_between(np.array([6, 6]), np.array([8, 7])).tolist() == [8, 9, 5]
    assert told.tokens_between(np.array([4, 6]), np.array([8, 7])).tolist() == [5, 7, 8, 9, 5]
    present = VerdictBatch.of_current(sessions, [None, None])
    assert present.tokens_between(np.array([0, 6]), np.array([6, 6])).tolist() == [3, 1, 4, 1, 5, 7]


def test_a_sheet_that_is_ready_stands_until_sessions_are_touched() -> None:
    one = session(0)
    in_flight = InFlightRound(
        plan=RoundPlan(), prefill=[], verify=[VerifyRow(one)], flight=object(), began=0, waited_s=0
    )
    assert not in_flight.has_verdict_inputs
    ready = in_flight.verdict_inputs(7)
    assert ready is not None
    assert in_flight.has_verdict_inputs and in_flight.verdict_inputs(7) is ready
    told = ready.make_batch(decoded((5, 6)))
    assert told is not None and len(told) == 1
    one.mark_ended()
    assert in_flight.verdict_inputs(8) is None


@pytest.mark.parametrize("drafter", [None, DrafterId("d0")])
def test_features_are_kept_where_drafts_may_come_by_messages(
    drafter: DrafterId | None,
) -> None:
    eagle = make_spec(drafter=drafter, plan=SpeculationPlan(method=DraftMethod.EAGLE3))
    assert may_need_features(eagle, 0)
    # In the verifier's process, or between devices.
    assert not may_need_features(eagle, 3)
    ngram = make_spec(drafter=drafter, plan=SpeculationPlan(method=DraftMethod.NGRAM))
    assert not may_need_features(ngram, 0)
