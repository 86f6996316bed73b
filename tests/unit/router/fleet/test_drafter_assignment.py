"""Who drafts for whom, and who moves when, are plain decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from outrider_router.base.reasons import MoveReason
from outrider_router.fleet.drafter_assignment import (
    DrafterCandidate,
    DrafterLoads,
    MoveSession,
    SessionPlacement,
    drafter_candidates,
    plan_moves,
)

from outrider.ids import DrafterId, RequestId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import AttachedDrafter
from tests.unit.router.fleet.test_compatibility import DRAFTER, VERIFIER

EAGLE, NGRAM = DraftMethod.EAGLE3, DraftMethod.NGRAM
A, B, C = DrafterId("a"), DrafterId("b"), DrafterId("c")
V, W = VerifierId("v"), VerifierId("w")


def candidate(drafter_id: DrafterId, **changes: object) -> DrafterCandidate:
    made = DrafterCandidate(drafter_id=drafter_id, methods=(EAGLE,))
    return replace(made, **changes)  # type: ignore[arg-type]


def seat(
    number: int, drafter_id: DrafterId | None, verifier_id: VerifierId = V
) -> SessionPlacement:
    return SessionPlacement(
        request_id=RequestId(f"r{number}"),
        verifier_id=verifier_id,
        method=EAGLE,
        drafter_id=drafter_id,
        tokens=100 + number,
    )


def seats(
    drafter_id: DrafterId | None, count: int, verifier_id: VerifierId = V
) -> list[SessionPlacement]:
    kind = f"{drafter_id}{verifier_id}"
    return [
        replace(seat(n, drafter_id, verifier_id), request_id=RequestId(f"{kind}{n}"))
        for n in range(count)
    ]


def look(
    them: Sequence[SessionPlacement], candidates: dict[VerifierId, list[DrafterCandidate]]
) -> list[MoveSession]:
    return plan_moves(them, candidates, others={}, max_homeless=32, max_balanced=4)


def after(them: Sequence[SessionPlacement], moves: Sequence[MoveSession]) -> list[SessionPlacement]:
    to = {move.request_id: move.drafter_id for move in moves}
    return [replace(s, drafter_id=to.get(s.request_id, s.drafter_id)) for s in them]


def choose(
    loads: DrafterLoads,
    *candidates: DrafterCandidate,
    verifier_id: VerifierId = V,
    method: DraftMethod = EAGLE,
) -> DrafterId | None:
    return loads.choose_drafter(candidates, verifier_id, method)


def link(
    drafter_id: DrafterId, answer_ms: float = 0.0, *, same_host: bool = False
) -> AttachedDrafter:
    return AttachedDrafter(
        drafter_id=drafter_id,
        incarnation="1",
        methods=(EAGLE,),
        sessions=0,
        answer_ms=answer_ms,
        same_host=same_host,
    )


# ---- choosing --------------------------------------------------------------------------------


def test_a_session_goes_where_the_method_is_and_the_sessions_are_few() -> None:
    loads = DrafterLoads([*seats(A, 2), *seats(B, 1)])
    other = candidate(C, methods=(NGRAM,))
    assert choose(loads, candidate(A), candidate(B), other) == B
    assert choose(loads, candidate(A), candidate(B), other, method=NGRAM) == C
    assert choose(loads, candidate(A), candidate(B), other, method=DraftMethod.MODEL) is None
    assert choose(loads, candidate(B, accepts_sessions=False), candidate(A)) == A
    assert choose(loads) is None


def test_sessions_of_other_routers_count() -> None:
    assert choose(DrafterLoads(seats(A, 2), {B: 3}), candidate(A), candidate(B)) == A


def test_a_slow_drafter_gets_fewer_sessions_and_the_same_host_wins_a_tie() -> None:
    slow = candidate(A, weight=2.0)
    placed: list[SessionPlacement] = []
    for number in range(30):
        chosen = choose(DrafterLoads(placed), slow, candidate(B))
        placed.append(seat(number, chosen))
    counts = Counter(s.drafter_id for s in placed)
    assert (counts[A], counts[B]) == (10, 20)
    assert choose(DrafterLoads([]), candidate(A), candidate(B, same_host=True)) == B


def test_at_equal_load_the_sessions_of_a_verifier_share_a_drafter() -> None:
    loads = DrafterLoads([*seats(A, 2, V), *seats(B, 2, W)])
    assert choose(loads, candidate(A), candidate(B), verifier_id=V) == A
    assert choose(loads, candidate(A), candidate(B), verifier_id=W) == B


def test_candidates_are_those_that_are_attached_and_were_not_lost_since() -> None:
    drafters = [replace(DRAFTER, drafter_id=each) for each in (A, B, C)]
    verifier = replace(VERIFIER, drafters=(link(A), link(B), link(DrafterId("unknown"))))
    found = drafter_candidates(verifier, drafters, detached={A})
    assert [c.drafter_id for c in found] == [B]
    restarted = [replace(drafter, incarnation="2") for drafter in drafters]
    assert drafter_candidates(verifier, restarted) == ()
    (leaving, staying) = drafter_candidates(verifier, drafters, draining={A})
    assert not leaving.accepts_sessions and staying.accepts_sessions


def test_what_a_place_costs_is_what_a_round_with_its_drafts_takes() -> None:
    drafters = [replace(DRAFTER, drafter_id=each) for each in (A, B, C)]
    links = (link(A, 1.0, same_host=True), link(B, 5.0), link(C))
    verifier = replace(VERIFIER, round_ms_p50=3.0, drafters=links)
    near, far, unknown = drafter_candidates(verifier, drafters)
    assert (near.weight, far.weight, unknown.weight) == (1.0, 2.0, 1.0)
    assert near.same_host and not far.same_host
    # Beside a long round the same difference is nothing.
    slow_rounds = replace(verifier, round_ms_p50=100.0)
    assert [c.weight for c in drafter_candidates(slow_rounds, drafters)] == [1.0, 1.0, 1.0]
    # Without rounds nothing is known.
    idle = replace(verifier, round_ms_p50=0.0)
    assert [c.weight for c in drafter_candidates(idle, drafters)] == [1.0, 1.0, 1.0]


# ---- moving ----------------------------------------------------------------------------------


def test_sessions_of_a_lost_drafter_spread_over_the_others() -> None:
    them = [*seats(A, 6), *seats(B, 2), *seats(C, 4)]
    moves = look(them, {V: [candidate(B), candidate(C)]})
    assert {move.reason for move in moves} == {MoveReason.LOST}
    counts = Counter(s.drafter_id for s in after(them, moves))
    assert counts == {B: 6, C: 6}


def test_sessions_without_a_drafter_get_the_one_that_came() -> None:
    them = seats(None, 3)
    assert look(them, {V: []}) == []
    assert look(them, {}) == []
    assert [m.drafter_id for m in look(them, {V: [candidate(A)]})] == [A] * 3


def test_the_lost_go_before_those_whose_drafter_leaves_and_a_look_is_bounded() -> None:
    them = [*seats(A, 3), *seats(C, 3)]
    here = [candidate(A, accepts_sessions=False), candidate(B)]
    moves = plan_moves(them, {V: here}, others={}, max_homeless=4, max_balanced=4)
    assert [move.reason for move in moves] == [MoveReason.LOST] * 3 + [MoveReason.DRAINED]
    assert look(them, {V: [candidate(A, accepts_sessions=False)]}) == []


def test_a_session_that_cannot_be_moved_is_let_be() -> None:
    them = [replace(s, is_fixed=True) for s in seats(A, 8)]
    assert look(them, {V: [candidate(B)]}) == []
    assert look(them, {V: [candidate(A), candidate(B)]}) == []


def test_a_drafter_that_joins_takes_over_until_the_load_is_even() -> None:
    them = seats(A, 8)
    candidates = {V: [candidate(A), candidate(B)]}
    first = look(them, candidates)
    # The shortest prefixes go: they cost least to be told.
    assert [m.request_id for m in first] == [f"av{n}" for n in range(4)]
    assert {m.reason for m in first} == {MoveReason.BALANCE}
    assert look(after(them, first), candidates) == []


def test_a_small_imbalance_and_sessions_that_have_just_moved_are_let_be() -> None:
    candidates = {V: [candidate(A), candidate(B)]}
    assert look(seats(A, 2), candidates) == []
    assert look([*seats(A, 9), *seats(B, 7)], candidates) == []
    assert look([replace(s, is_movable=False) for s in seats(A, 8)], candidates) == []


def test_all_verifiers_are_balanced_together() -> None:
    them = [*seats(A, 6, V), *seats(B, 2, W)]
    everywhere = [candidate(A), candidate(B)]
    moves = look(them, {V: everywhere, W: everywhere})
    assert Counter(s.drafter_id for s in after(them, moves)) == {A: 4, B: 4}
    assert all(move.request_id.startswith("av") for move in moves)
    # A drafter that one verifier alone can have relieves those that others have too.
    them = [*seats(A, 4, V), *seats(A, 4, W)]
    moves = look(them, {V: [candidate(A)], W: everywhere})
    assert Counter(s.drafter_id for s in after(them, moves)) == {A: 4, B: 4}
    assert all(move.request_id.startswith("aw") for move in moves)


@given(
    st.lists(st.tuples(st.sampled_from([V, W]), st.sampled_from([None, A, B, C])), max_size=40),
    st.lists(st.sampled_from([1.0, 1.25, 2.0]), min_size=6, max_size=6),
    st.sets(st.sampled_from([A, B, C])),
)
def test_looks_come_to_rest_with_everybody_housed(
    where: list[tuple[VerifierId, DrafterId | None]],
    weights: list[float],
    gone: set[DrafterId],
) -> None:
    them = [seat(n, drafter_id, verifier_id) for n, (verifier_id, drafter_id) in enumerate(where)]
    ids = [each for each in (A, B, C) if each not in gone]
    candidates = {
        V: [candidate(each, weight=w) for each, w in zip(ids, weights[:3], strict=False)],
        W: [candidate(each, weight=w) for each, w in zip(ids, weights[3:], strict=False)],
    }
    for _ in range(30):
        moves = look(them, candidates)
        assert all(move.drafter_id in ids for move in moves)
        assert len({move.request_id for move in moves}) == len(moves)
        them = after(them, moves)
        if not moves:
            break
    else:
        raise AssertionError("sessions never come to rest")
    if ids:
        assert all(s.drafter_id in ids for s in them)
