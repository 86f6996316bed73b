"""The inbox is bounded, keyed by prefix digest, and keeps the best proposal it may keep."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from outrider_verifier.inbox import Inbox, Offer, expected_accepted_len

from outrider.ids import SessionId
from outrider.spec.law import DraftLaw, make_law
from outrider.spec.tree import DraftTree
from outrider.wire.messages import Proposal

A, B = SessionId("a"), SessionId("b")


def proposal(
    digest: int,
    prefix_len: int = 10,
    *,
    session: SessionId = A,
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
    return Proposal(
        session_id=session, prefix_digest=digest, prefix_len=prefix_len, tree=tree, law=law
    )


def inbox(per_session: int = 4, total: int = 8) -> Inbox:
    """An empty inbox."""
    return Inbox(per_session=per_session, total=total)


def offer(box: Inbox, item: Proposal, digest: int = 7, prefix_len: int = 10) -> Offer:
    """Offer to a session whose prefix has this digest and length."""
    return box.offer(item, digest=digest, prefix_len=prefix_len)


def test_a_proposal_for_the_current_prefix_is_taken_once() -> None:
    box = inbox()
    item = proposal(7)
    assert offer(box, item) is Offer.STORED
    assert box.peek(A, 7) is item
    assert box.take(A, 7) is item
    assert box.take(A, 7) is None
    assert len(box) == 0


def test_a_proposal_is_found_by_its_own_digest_and_session_only() -> None:
    box = inbox()
    offer(box, proposal(7))
    assert box.take(A, 8) is None
    assert box.take(B, 7) is None


def test_the_more_promising_of_two_proposals_stays() -> None:
    box = inbox()
    weak, strong = proposal(7, logprobs=(-2.0,)), proposal(7, logprobs=(-0.1, -0.2))
    assert offer(box, weak) is Offer.STORED
    assert offer(box, strong) is Offer.REPLACED
    assert offer(box, weak) is Offer.DUPLICATE
    assert box.take(A, 7) is strong


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
    first = proposal(7, logprobs=(-2.0,), law=law)
    offer(box, first)
    assert offer(box, proposal(7, logprobs=(-0.1,), law=law)) is Offer.DUPLICATE
    assert offer(box, proposal(7, logprobs=(-0.1,))) is Offer.DUPLICATE
    assert box.take(A, 7) is first


def test_a_proposal_for_a_past_prefix_is_stale() -> None:
    assert offer(inbox(), proposal(5, 9)) is Offer.STALE


def test_a_proposal_for_another_prefix_of_the_same_length_is_stale() -> None:
    assert offer(inbox(), proposal(5, 10)) is Offer.STALE


def test_a_proposal_that_lies_about_its_length_is_stale() -> None:
    assert offer(inbox(), proposal(7, 12)) is Offer.STALE


def test_a_proposal_for_a_predicted_outcome_waits_for_it() -> None:
    box = inbox()
    assert offer(box, proposal(99, 13)) is Offer.STORED
    assert box.prune(A, digest=55, prefix_len=12) == 0
    assert box.take(A, 99) is not None


def test_pruning_drops_what_can_no_longer_come_true() -> None:
    box = inbox()
    offer(box, proposal(98, 13))
    offer(box, proposal(99, 13))
    assert box.prune(A, digest=99, prefix_len=13) == 1
    assert len(box) == 1


def test_a_session_keeps_its_share_and_the_current_prefix_finds_room() -> None:
    box = inbox(per_session=2)
    assert offer(box, proposal(90, 13)) is Offer.STORED
    assert offer(box, proposal(91, 13)) is Offer.STORED
    assert offer(box, proposal(92, 13)) is Offer.FULL
    assert offer(box, proposal(7)) is Offer.STORED
    assert len(box) == 2
    assert box.take(A, 7) is not None


def test_past_the_total_the_oldest_goes() -> None:
    box = inbox(per_session=4, total=3)
    for digest in (90, 91, 92):
        offer(box, proposal(digest, 13))
    assert offer(box, proposal(7, session=B)) is Offer.STORED
    assert len(box) == 3
    assert box.take(A, 90) is None


def test_dropping_a_session_leaves_the_others() -> None:
    box = inbox()
    offer(box, proposal(7))
    offer(box, proposal(7, session=B))
    box.drop_session(A)
    box.drop_session(A)
    assert len(box) == 1


OPERATIONS = st.tuples(
    st.sampled_from(["offer", "take", "prune", "drop"]),
    st.sampled_from([A, B, SessionId("c")]),
    st.integers(1, 12),
    st.integers(8, 14),
)


@given(st.lists(OPERATIONS, max_size=60), st.integers(1, 3), st.integers(1, 5))
def test_bounds_hold_whatever_arrives(
    operations: list[tuple[str, SessionId, int, int]], per_session: int, total: int
) -> None:
    box = inbox(per_session, total)
    held: dict[tuple[SessionId, int], int] = {}
    for kind, session, digest, length in operations:
        if kind == "offer":
            offer(box, proposal(digest, length, session=session), digest=3)
        elif kind == "take":
            taken = box.take(session, digest)
            assert taken is None or (taken.session_id, taken.prefix_digest) == (session, digest)
        elif kind == "prune":
            box.prune(session, digest=digest, prefix_len=length)
        else:
            box.drop_session(session)
            assert all(box.peek(session, d) is None for d in range(13))
        held = {(s, d): 1 for s in (A, B, SessionId("c")) for d in range(13) if box.peek(s, d)}
        assert len(box) == len(held) <= total
        for name in (A, B, SessionId("c")):
            assert sum(s == name for s, _ in held) <= per_session
