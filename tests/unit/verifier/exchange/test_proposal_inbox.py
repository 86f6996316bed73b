"""The inbox is bounded, keyed by prefix digest, and keeps the best proposals it may keep."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_verifier.exchange.proposal_inbox import (
    HeldProposal,
    OfferResult,
    ProposalInbox,
    expected_accepted_tokens,
)

from outrider.spec.draft_distribution import DraftDistribution, make_distribution
from outrider.spec.tree import DraftTree
from outrider.wire.messages import Proposal, Proposals
from tests.reference.proposal_inbox import SlowInbox

A, B, C = 0, 1, 2
REACH = 5
ROOMY = 1 << 30


def proposal(
    digest: int,
    prefix_len: int = 10,
    *,
    handle: int = A,
    logprobs: tuple[float, ...] = (-0.5,),
    distribution: DraftDistribution | None = None,
) -> Proposal:
    """A chain with the given log-probs."""
    count = len(logprobs)
    tree = DraftTree(
        np.arange(count, dtype=np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
        np.array(logprobs, dtype=np.float32),
    )
    return Proposal(
        handle=handle,
        prefix_digest=digest,
        prefix_len=prefix_len,
        tree=tree,
        distribution=distribution,
    )


def move(box: ProposalInbox, handle: int, digest: int = 7, prefix_len: int = 10) -> int:
    """A session has another prefix now."""
    return box.advance_sessions(
        np.array([handle]), np.array([digest], dtype=np.uint64), np.array([prefix_len])
    )


def inbox(per_session: int = 4, budget_bytes: int = ROOMY) -> ProposalInbox:
    """An inbox of three sessions whose prefix is 7, of length 10."""
    box = ProposalInbox(
        max_sessions=3, per_session=per_session, reach=REACH, budget_bytes=budget_bytes
    )
    for handle in (A, B, C):
        move(box, handle)
    return box


def offer(box: ProposalInbox, *items: Proposal) -> OfferResult:
    """Offer drafts in one message; what became of most of them."""
    results = box.store_proposals(Proposals.of_proposals(items), range(len(items))).results
    assert sum(results.values()) == len(items)
    return results.most_common(1)[0][0]


def peek(box: ProposalInbox, handle: int) -> int | None:
    """Nodes of a session's usable draft; None if there is none."""
    (nodes,) = box.num_nodes([handle])
    return None if nodes < 0 else nodes


def take(box: ProposalInbox, handle: int) -> Proposal | None:
    """A session's usable draft, taken out."""
    held = take_held(box, handle)
    return None if held is None else held.proposal


def take_held(box: ProposalInbox, handle: int) -> HeldProposal | None:
    """A session's usable draft as it lay, taken out."""
    if peek(box, handle) is None:
        return None
    (held,) = box.take_proposals([handle])
    assert held.nodes == len(held.proposal.tree)
    assert held.proposal.handle == handle
    return held


def logprobs_of(taken: Proposal | None) -> list[float]:
    """What tells the drafts of a test apart."""
    assert taken is not None
    return [round(float(x), 3) for x in taken.tree.logprobs]


def test_a_proposal_for_the_current_prefix_is_taken_once() -> None:
    box = inbox()
    assert offer(box, proposal(7, logprobs=(-0.5, -0.75))) is OfferResult.STORED
    assert peek(box, A) == 2
    assert len(box) == 1
    assert logprobs_of(take(box, A)) == [-0.5, -0.75]
    assert take(box, A) is None and peek(box, A) is None
    assert len(box) == 0


def test_whoever_takes_what_is_not_there_takes_nothing() -> None:
    box = inbox()
    offer(box, proposal(7))
    for handles in ([A, B], [A, A]):
        with pytest.raises(AssertionError):
            box.take_proposals(handles)
        assert peek(box, A) is not None and len(box) == 1
    box.drop_session(A)
    assert (len(box), box.nbytes) == (0, 0)


def test_drafts_of_one_message_are_told_apart() -> None:
    box = inbox()
    move(box, B, digest=8, prefix_len=20)
    drafts = [
        proposal(8, 20, handle=B, logprobs=(-2.0,)),
        proposal(6, 9, handle=C),
        proposal(7, handle=A, logprobs=(-1.0, -1.5)),
    ]
    offers = box.store_proposals(Proposals.of_proposals(drafts), range(3))
    assert offers.current == [0, 2]
    assert offers.stale == [1]
    assert offers.results[OfferResult.STORED] == 2 and offers.results[OfferResult.STALE] == 1
    assert take(box, C) is None
    assert logprobs_of(take(box, A)) == [-1.0, -1.5]
    assert logprobs_of(take(box, B)) == [-2.0]


def test_a_draft_without_nodes_counts_as_one() -> None:
    box = inbox()
    offer(box, proposal(7, logprobs=()))
    assert peek(box, A) == 0
    taken = take(box, A)
    assert taken is not None and len(taken.tree) == 0


def test_a_large_message_is_not_kept_for_few_of_its_drafts() -> None:
    box = inbox()
    stale = [proposal(5, 9, handle=B, logprobs=(-0.5,) * (1 << 12)) for _ in range(4)]
    offer(box, proposal(7, logprobs=(-0.25,)), *stale)
    assert box.nbytes < 1 << 10
    assert logprobs_of(take(box, A)) == [-0.25]
    assert box.nbytes == 0


def test_the_more_promising_of_two_proposals_stays() -> None:
    box = inbox()
    weak, strong = proposal(7, logprobs=(-2.0,)), proposal(7, logprobs=(-0.1, -0.2))
    assert offer(box, weak) is OfferResult.STORED
    assert offer(box, strong) is OfferResult.REPLACED
    assert offer(box, weak) is OfferResult.DUPLICATE
    assert logprobs_of(take(box, A)) == [-0.1, -0.2]


def test_promise_is_the_sum_of_path_probabilities() -> None:
    drafts = [proposal(7, logprobs=(-0.5, -1.0)), proposal(7, logprobs=()), proposal(7)]
    expected = [np.exp(-0.5) + np.exp(-1.0), 0.0, np.exp(-0.5)]
    assert np.allclose(expected_accepted_tokens(Proposals.of_proposals(drafts)), expected)


def test_a_replayed_proposal_is_dropped() -> None:
    box = inbox()
    offer(box, proposal(7))
    assert offer(box, proposal(7)) is OfferResult.DUPLICATE
    assert len(box) == 1


def test_sampled_trees_are_never_chosen_by_their_tokens() -> None:
    ids, counts = np.array([0, 1], np.int32), np.array([3, 4], np.uint16)
    distribution = make_distribution(1, {0: (ids, counts)})
    box = inbox()
    offer(box, proposal(7, logprobs=(-2.0,), distribution=distribution))
    assert (
        offer(box, proposal(7, logprobs=(-0.1,), distribution=distribution))
        is OfferResult.DUPLICATE
    )
    assert offer(box, proposal(7, logprobs=(-0.1,))) is OfferResult.DUPLICATE
    taken = take(box, A)
    assert logprobs_of(taken) == [-2.0]
    assert (
        taken is not None
        and taken.distribution is not None
        and taken.distribution.ids.tolist() == [0, 1]
    )


@pytest.mark.parametrize(
    ("digest", "prefix_len"),
    [(5, 9), (5, 10), (7, 12), (7, 9), (5, 16), (5, 2**32 - 1)],
    ids=["past", "other", "lying length", "lying past", "beyond a round", "absurd"],
)
def test_a_proposal_that_cannot_be_used_is_stale(digest: int, prefix_len: int) -> None:
    box = inbox()
    assert offer(box, proposal(digest, prefix_len)) is OfferResult.STALE
    assert len(box) == 0 and box.nbytes == 0


def test_no_draft_continues_an_unfinished_prompt() -> None:
    box = inbox()
    box.open_session(A)
    for digest, length in [(0, 10), (0, 2**32 - 1), (7, 10), (0, 11)]:
        assert offer(box, proposal(digest, length)) is OfferResult.STALE
    assert peek(box, A) is None


def test_a_proposal_for_a_predicted_outcome_waits_for_it() -> None:
    box = inbox()
    assert offer(box, proposal(99, 13)) is OfferResult.STORED
    assert peek(box, A) is None
    assert move(box, A, digest=55, prefix_len=12) == 0
    assert move(box, A, digest=99, prefix_len=13) == 0
    held = take_held(box, A)
    assert held is not None and held.is_hit
    assert len(box) == 0


@pytest.mark.parametrize("taken", [False, True])
def test_a_step_finds_the_hit_and_the_move_behind_it_drops_the_rest(taken: bool) -> None:
    box = inbox()
    offer(box, proposal(99, 13), proposal(98, 12), proposal(97, 14))
    assert box.advance_session(A, 99, 13)
    assert len(box) == 3
    if taken:
        held = take_held(box, A)
        assert held is not None and held.is_hit
    assert move(box, A, digest=99, prefix_len=13) == 1
    assert len(box) == 2 - taken
    # Nothing is left of the step: the same prefix again is another move.
    assert move(box, A, digest=99, prefix_len=13) == 1 - taken


def test_a_step_to_a_prefix_that_nobody_drafted_for_is_no_hit() -> None:
    box = inbox()
    offer(box, proposal(7, 10), proposal(99, 13), proposal(97, 14))
    assert not box.advance_session(A, 99, 12)
    assert peek(box, A) is None
    assert move(box, A, digest=99, prefix_len=12) == 1
    assert len(box) == 1


def test_a_proposal_for_what_has_happened_is_no_hit() -> None:
    box = inbox()
    move(box, A, digest=99, prefix_len=13)
    offer(box, proposal(99, 13))
    held = take_held(box, A)
    assert held is not None and not held.is_hit


def test_a_better_draft_for_what_has_happened_takes_the_place_of_a_hit() -> None:
    box = inbox()
    offer(box, proposal(99, 13, logprobs=(-1.0,)))
    move(box, A, digest=99, prefix_len=13)
    assert offer(box, proposal(99, 13, logprobs=(-2.0,))) is OfferResult.DUPLICATE
    assert offer(box, proposal(99, 13, logprobs=(-0.5,))) is OfferResult.REPLACED
    held = take_held(box, A)
    assert held is not None and not held.is_hit
    assert logprobs_of(held.proposal) == [-0.5]


def test_a_new_prefix_drops_what_can_no_longer_come_true() -> None:
    box = inbox()
    offer(box, proposal(7))
    offer(box, proposal(97, 11), proposal(98, 13), proposal(99, 13), proposal(96, 14))
    assert move(box, A, digest=99, prefix_len=13) == 3
    assert len(box) == 2
    assert move(box, A, digest=95, prefix_len=14) == 2
    assert len(box) == 0 and box.nbytes == 0


def test_hits_of_many_sessions_are_of_one_message_wherever_they_came_from() -> None:
    box = inbox()
    offer(box, proposal(99, 13, logprobs=(-1.0, -2.0)), proposal(98, 13))
    offer(box, proposal(97, 12, handle=B, logprobs=(-3.0,)))
    move(box, A, digest=99, prefix_len=13)
    move(box, B, digest=97, prefix_len=12)
    offer(box, proposal(7, 10, handle=C, logprobs=(-4.0, -5.0, -6.0)))
    c, b, a = box.take_proposals([C, B, A])
    assert a.proposals is b.proposals is c.proposals
    assert [logprobs_of(held.proposal) for held in (a, b, c)] == [
        [-1.0, -2.0],
        [-3.0],
        [-4.0, -5.0, -6.0],
    ]
    assert [held.is_hit for held in (a, b, c)] == [True, True, False]
    assert [held.nodes for held in (a, b, c)] == [2, 1, 3]


def test_entries_of_one_session_in_one_message_are_for_different_prefixes() -> None:
    box = inbox()
    drafts = [
        proposal(90, 11, logprobs=(-0.5,)),
        proposal(7, 10, logprobs=(-1.0,)),
        proposal(91, 12, logprobs=(-0.75,)),
        proposal(7, 10, logprobs=(-0.25,)),
        proposal(90, 11, logprobs=(-0.125,)),
    ]
    offers = box.store_proposals(Proposals.of_proposals(drafts), range(5))
    assert offers.current == [1, 3]
    assert offers.results == Counter({OfferResult.STORED: 3, OfferResult.DUPLICATE: 2})
    assert logprobs_of(take(box, A)) == [-0.25]
    move(box, A, digest=90, prefix_len=11)
    assert logprobs_of(take(box, A)) == [-0.125]


def test_the_newest_take_the_place_of_the_oldest_and_the_current_prefix_finds_room() -> None:
    box = inbox(per_session=2)
    for digest in (90, 91, 92):
        assert offer(box, proposal(digest, 13)) is OfferResult.STORED
    assert offer(box, proposal(7)) is OfferResult.STORED
    assert len(box) == 3
    move(box, A, digest=90, prefix_len=13)
    assert take(box, A) is None


def test_of_one_message_the_first_are_kept() -> None:
    box = inbox(per_session=2)
    drafts = [proposal(digest, 13) for digest in (90, 91, 92)]
    results = box.store_proposals(Proposals.of_proposals(drafts), range(3)).results
    assert results == Counter({OfferResult.STORED: 2, OfferResult.FULL: 1})
    move(box, A, digest=90, prefix_len=13)
    assert take(box, A) is not None


def test_past_the_memory_the_oldest_messages_go() -> None:
    size = Proposals.of_proposals([proposal(7)]).nbytes
    box = inbox(budget_bytes=3 * size)
    for handle, digest in ((A, 90), (A, 91), (B, 92), (B, 93)):
        assert offer(box, proposal(digest, 13, handle=handle)) is OfferResult.STORED
    assert len(box) == 3 and box.nbytes == 3 * size
    move(box, A, digest=90, prefix_len=13)
    assert take(box, A) is None


def test_the_newest_message_is_kept_however_large() -> None:
    box = inbox(budget_bytes=1)
    offer(box, proposal(90, 13))
    offer(box, proposal(91, 13))
    assert len(box) == 1
    move(box, A, digest=91, prefix_len=13)
    assert take(box, A) is not None


def test_dropping_a_session_leaves_the_others() -> None:
    box = inbox()
    offer(box, proposal(7), proposal(7, handle=B))
    offer(box, proposal(90, 13))
    box.drop_session(A)
    box.drop_session(A)
    assert len(box) == 1 and peek(box, B) == 1


def test_what_comes_for_the_prefix_that_was_missed_is_late() -> None:
    box = inbox()
    box.record_miss(A)
    move(box, A, digest=8, prefix_len=11)
    drafts = [proposal(7), proposal(6), proposal(7, handle=B), proposal(8, 11), proposal(9, 12)]
    offers = box.store_proposals(Proposals.of_proposals(drafts), range(5))
    assert offers.late == [0]
    assert offers.stale == [0, 1]
    box.open_session(A)
    assert not box.store_proposals(Proposals.of_proposals(drafts[:1]), range(1)).late


def test_a_hostile_flood_leaves_nothing_behind_and_is_soon_dealt_with() -> None:
    per_session, sessions = 64, 64
    box = ProposalInbox(
        max_sessions=sessions, per_session=per_session, reach=65, budget_bytes=1 << 20
    )
    everyone = np.arange(sessions)
    box.advance_sessions(everyone, np.full(sessions, 7, dtype=np.uint64), np.full(sessions, 10))
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    for _ in range(16):
        count = 4096
        nodes = rng.integers(0, 8, count)
        flood = Proposals(
            handles=rng.integers(0, sessions, count) * rng.integers(0, 2, count),
            digests=rng.choice(np.array([0, 7, 8, 9, 2**64 - 1, 12345], dtype=np.uint64), count),
            prefix_lens=rng.choice(np.array([1, 10, 11, 75, 76, 2**32 - 1]), count),
            node_counts=nodes,
            tokens=np.zeros(nodes.sum(), dtype=np.int32),
            parents=np.full(nodes.sum(), -1, dtype=np.int32),
            logprobs=np.zeros(nodes.sum(), dtype=np.float32),
        )
        results = box.store_proposals(flood, range(count)).results
        assert sum(results.values()) == count
        assert len(box) <= sessions * (1 + per_session)
        assert box.nbytes <= (1 << 20) + flood.nbytes
    assert time.perf_counter() - began < 5.0
    box.advance_sessions(everyone, np.full(sessions, 1, dtype=np.uint64), np.full(sessions, 200))
    assert len(box) == 0 and box.nbytes == 0


OFFERED = st.lists(
    st.tuples(
        st.sampled_from([A, B, C]),
        st.integers(1, 7),
        st.integers(8, 20),
        st.sampled_from([(), (-0.5,), (-1.0,), (-0.5, -0.75)]),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=12,
)
OPERATIONS = st.one_of(
    st.tuples(st.just("offer"), OFFERED),
    st.tuples(st.just("take"), st.lists(st.sampled_from([A, B, C]), unique=True)),
    st.tuples(
        st.just("move"),
        st.lists(st.sampled_from([A, B, C]), unique=True, min_size=1),
        st.integers(1, 7),
        st.integers(0, 3),
    ),
    st.tuples(st.sampled_from(["drop", "open"]), st.sampled_from([A, B, C])),
)


@settings(max_examples=300)
@given(st.lists(OPERATIONS, max_size=40), st.integers(1, 4))
def test_the_inbox_holds_what_is_plain_to_see(
    operations: list[tuple[Any, ...]], per_session: int
) -> None:
    box = inbox(per_session)
    slow = SlowInbox((A, B, C), per_session=per_session, reach=REACH)
    lengths = dict.fromkeys((A, B, C), 10)
    for handle in (A, B, C):
        slow.move(handle, (7, 10))
    for kind, *rest in operations:
        if kind == "offer":
            drafts = [
                proposal(
                    d, n, handle=h, logprobs=p, distribution=empty_law(len(p)) if law else None
                )
                for h, d, n, p, law in rest[0]
            ]
            found = box.store_proposals(Proposals.of_proposals(drafts), range(len(drafts))).results
            assert +found == slow.offer(drafts)
        elif kind == "take":
            ready = [handle for handle in rest[0] if peek(box, handle) is not None]
            for handle, held in zip(ready, box.take_proposals(ready), strict=True):
                expected = slow.take(handle)
                assert expected is not None
                assert held.is_hit == expected[1]
                assert same(held.proposal, expected[0])
        elif kind == "move":
            handles, digest, step = rest
            for handle in handles:
                lengths[handle] += step
            gone = box.advance_sessions(
                np.array(handles),
                np.full(len(handles), digest, dtype=np.uint64),
                np.array([lengths[handle] for handle in handles]),
            )
            assert gone == sum(slow.move(handle, (digest, lengths[handle])) for handle in handles)
        else:
            {"drop": box.drop_session, "open": box.open_session}[kind](rest[0])
            getattr(slow, kind)(rest[0])
        assert len(box) == len(slow)
        usable = [peek(box, handle) is not None for handle in (A, B, C)]
        assert usable == [slow.sessions[h].usable is not None for h in (A, B, C)]


def empty_law(nodes: int) -> DraftDistribution:
    """The distribution of a draft nobody can draw from."""
    return make_distribution(nodes, {})


def same(one: Proposal, other: Proposal) -> bool:
    """Whether two drafts say the same."""
    return (
        (one.handle, one.prefix_digest, one.prefix_len, one.distribution is None)
        == (other.handle, other.prefix_digest, other.prefix_len, other.distribution is None)
    ) and one.tree.logprobs.tolist() == other.tree.logprobs.tolist()
