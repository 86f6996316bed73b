"""The inbox is bounded, keyed by prefix digest, and keeps the best proposal it may keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_verifier.inbox import Inbox, Offer, expected_accepted_len

from outrider.spec.law import DraftLaw, make_law
from outrider.spec.tree import DraftTree
from outrider.wire.messages import Proposal, Proposals

A, B, C = 0, 1, 2


def proposal(
    digest: int,
    prefix_len: int = 10,
    *,
    handle: int = A,
    logprobs: tuple[float, ...] = (-0.5,),
    law: DraftLaw | None = None,
) -> Proposal:
    """A chain with the given log-probs."""
    count = len(logprobs)
    tree = DraftTree(
        np.arange(count, dtype=np.int32),
        np.arange(-1, count - 1, dtype=np.int32),
        np.array(logprobs, dtype=np.float32),
    )
    return Proposal(handle=handle, prefix_digest=digest, prefix_len=prefix_len, tree=tree, law=law)


def move(box: Inbox, handle: int, digest: int = 7, prefix_len: int = 10) -> int:
    """A session has another prefix now."""
    return box.move(np.array([handle]), np.array([digest], dtype=np.uint64), np.array([prefix_len]))


def inbox(per_session: int = 4, total: int = 8) -> Inbox:
    """An inbox of three sessions whose prefix is 7, of length 10."""
    box = Inbox(max_sessions=3, per_session=per_session, total=total)
    for handle in (A, B, C):
        move(box, handle)
    return box


def offer(box: Inbox, *items: Proposal) -> Offer:
    """Offer drafts in one message; what became of most of them."""
    _, results = box.offer(Proposals.of(items), np.arange(len(items)))
    assert sum(results.values()) == len(items)
    return results.most_common(1)[0][0]


def peek(box: Inbox, handle: int) -> int | None:
    """Nodes of a session's usable draft; None if there is none."""
    (nodes,) = box.nodes([handle])
    return None if nodes < 0 else nodes


def take(box: Inbox, handle: int) -> Proposal | None:
    """A session's usable draft, taken out."""
    if peek(box, handle) is None:
        return None
    (held,) = box.take([handle])
    assert held.nodes == len(held.proposal.tree)
    return held.proposal


def logprobs_of(taken: Proposal | None) -> list[float]:
    """What tells the drafts of a test apart."""
    assert taken is not None
    return [round(float(x), 3) for x in taken.tree.logprobs]


def test_a_proposal_for_the_current_prefix_is_taken_once() -> None:
    box = inbox()
    assert offer(box, proposal(7, logprobs=(-0.5, -0.75))) is Offer.STORED
    assert peek(box, A) == 2
    assert len(box) == 1
    assert logprobs_of(take(box, A)) == [-0.5, -0.75]
    assert take(box, A) is None and peek(box, A) is None
    assert len(box) == 0


def test_drafts_of_one_message_are_told_apart() -> None:
    box = inbox()
    move(box, B, digest=8, prefix_len=20)
    drafts = [
        proposal(8, 20, handle=B, logprobs=(-2.0,)),
        proposal(6, 9, handle=C),
        proposal(7, handle=A, logprobs=(-1.0, -1.5)),
    ]
    current, results = box.offer(Proposals.of(drafts), np.arange(3))
    assert current.tolist() == [True, False, True]
    assert results[Offer.STORED] == 2 and results[Offer.STALE] == 1
    assert take(box, C) is None
    assert logprobs_of(take(box, A)) == [-1.0, -1.5]
    assert logprobs_of(take(box, B)) == [-2.0]


def test_a_draft_without_nodes_counts_as_one() -> None:
    box = inbox()
    offer(box, proposal(7, logprobs=()))
    assert peek(box, A) == 0
    taken = take(box, A)
    assert taken is not None and len(taken.tree) == 0


def test_a_large_message_is_not_kept_for_one_draft() -> None:
    box = inbox()
    count = 1 << 18
    large = proposal(7, handle=B, logprobs=(-0.5,) * count)
    offer(box, proposal(7, logprobs=(-0.25,)), large)
    held = box._held[A]
    assert held is not None and held.nbytes < 1 << 10
    assert logprobs_of(take(box, A)) == [-0.25]


def test_the_more_promising_of_two_proposals_stays() -> None:
    box = inbox()
    weak, strong = proposal(7, logprobs=(-2.0,)), proposal(7, logprobs=(-0.1, -0.2))
    assert offer(box, weak) is Offer.STORED
    assert offer(box, strong) is Offer.REPLACED
    assert offer(box, weak) is Offer.DUPLICATE
    assert logprobs_of(take(box, A)) == [-0.1, -0.2]


def test_promise_is_the_sum_of_path_probabilities() -> None:
    value = expected_accepted_len(proposal(7, logprobs=(-0.5, -1.0)))
    assert np.isclose(value, np.exp(-0.5) + np.exp(-1.0))


def test_a_replayed_proposal_is_dropped() -> None:
    box = inbox()
    offer(box, proposal(7))
    assert offer(box, proposal(7)) is Offer.DUPLICATE
    assert len(box) == 1


def test_sampled_trees_are_never_chosen_by_their_tokens() -> None:
    ids, counts = np.array([0, 1], np.int32), np.array([3, 4], np.uint16)
    law = make_law(1, {0: (ids, counts)})
    box = inbox()
    offer(box, proposal(7, logprobs=(-2.0,), law=law))
    assert offer(box, proposal(7, logprobs=(-0.1,), law=law)) is Offer.DUPLICATE
    assert offer(box, proposal(7, logprobs=(-0.1,))) is Offer.DUPLICATE
    taken = take(box, A)
    assert logprobs_of(taken) == [-2.0]
    assert taken is not None and taken.law is not None and taken.law.ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("digest", "prefix_len"), [(5, 9), (5, 10), (7, 12)], ids=["past", "other", "lying length"]
)
def test_a_proposal_that_can_never_be_used_is_stale(digest: int, prefix_len: int) -> None:
    assert offer(inbox(), proposal(digest, prefix_len)) is Offer.STALE


def test_a_proposal_for_a_predicted_outcome_waits_for_it() -> None:
    box = inbox()
    assert offer(box, proposal(99, 13)) is Offer.STORED
    assert peek(box, A) is None
    assert move(box, A, digest=55, prefix_len=12) == 0
    assert move(box, A, digest=99, prefix_len=13) == 0
    assert peek(box, A) == 1
    assert take(box, A) is not None and len(box) == 0


def test_a_new_prefix_drops_what_can_no_longer_come_true() -> None:
    box = inbox()
    offer(box, proposal(7))
    offer(box, proposal(98, 13))
    offer(box, proposal(99, 13))
    assert move(box, A, digest=99, prefix_len=13) == 2
    assert len(box) == 1


def test_a_session_keeps_its_share_and_the_current_prefix_finds_room() -> None:
    box = inbox(per_session=2)
    assert offer(box, proposal(90, 13)) is Offer.STORED
    assert offer(box, proposal(91, 13)) is Offer.STORED
    assert offer(box, proposal(92, 13)) is Offer.FULL
    assert offer(box, proposal(7)) is Offer.STORED
    assert len(box) == 3
    assert take(box, A) is not None


def test_past_the_total_the_oldest_goes() -> None:
    box = inbox(per_session=4, total=3)
    for digest in (90, 91, 92):
        offer(box, proposal(digest, 13))
    assert offer(box, proposal(93, 13, handle=B)) is Offer.STORED
    assert len(box) == 3
    move(box, A, digest=90, prefix_len=13)
    assert take(box, A) is None


def test_dropping_a_session_leaves_the_others() -> None:
    box = inbox()
    offer(box, proposal(7), proposal(7, handle=B))
    offer(box, proposal(90, 13))
    box.drop(A)
    box.drop(A)
    assert len(box) == 1 and peek(box, B) == 1


OPERATIONS = st.tuples(
    st.sampled_from(["offer", "take", "move", "drop"]),
    st.sampled_from([A, B, C]),
    st.integers(1, 12),
    st.integers(8, 14),
)


@given(st.lists(OPERATIONS, max_size=60), st.integers(1, 3), st.integers(1, 5))
def test_bounds_hold_whatever_arrives(
    operations: list[tuple[str, int, int, int]], per_session: int, total: int
) -> None:
    box = inbox(per_session, total)
    prefix = dict.fromkeys((A, B, C), (7, 10))
    for kind, handle, digest, length in operations:
        if kind == "offer":
            offer(box, proposal(digest, length, handle=handle))
        elif kind == "take":
            taken = take(box, handle)
            assert taken is None or taken.handle == handle
            assert taken is None or (taken.prefix_digest, taken.prefix_len) == prefix[handle]
        elif kind == "move":
            move(box, handle, digest, length)
            prefix[handle] = (digest, length)
        else:
            box.drop(handle)
            assert peek(box, handle) is None
        later = len(box) - sum(peek(box, name) is not None for name in (A, B, C))
        assert 0 <= later <= total
        assert len(box) == 0 or any(peek(box, name) is not None for name in (A, B, C)) or later
