"""A chain of the own head in a grammar: what stands, what is forced, what is drafted again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_verifier import form_drafts
from outrider_verifier.device_groups import Group
from outrider_verifier.form_chains import ChainWalk

from outrider.engine.device.form_drafts import FormDrafts
from outrider.engine.device.shapes import Drafts
from outrider.grammar.constraint import allows
from outrider.grammar.walks import side_by_side
from outrider.spec.sampling import Rule
from tests.fakes.scripted_grammar import WORDS, Scripted


class Head:
    """Drafts of some rows; what it is told when it drafts again."""

    chains = True
    words = WORDS

    def __init__(self, *drafts: list[int], again: dict[int, list[int]] | None = None) -> None:
        self.tokens = np.array(drafts, dtype=np.int32)
        self.levels = self.tokens.shape[1]
        self.told: list[tuple[list[int], list[int]]] = []
        """By pass: which rows, and how many levels each was masked at."""
        self._again = again or {}

    def read(self, slots: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        parents = np.arange(-1, self.levels - 1, dtype=np.int32)
        return self.tokens[slots].copy(), np.broadcast_to(parents, (len(slots), self.levels))

    def redraft(self, slots: list[int], legal: NDArray[np.uint32]) -> None:
        masked = (legal != np.uint32(0xFFFFFFFF)).any(axis=2)
        self.told.append((slots, masked.sum(axis=1).tolist()))
        for slot in slots:
            self.tokens[slot] = self._again[slot]

    def write(self, slots: list[int], tokens: NDArray[np.int32]) -> None:
        self.tokens[slots] = tokens


def session_of(rule: Rule) -> Any:
    sampling = SimpleNamespace(effective_rule=rule)
    return SimpleNamespace(
        constraint=Scripted(),
        spec=SimpleNamespace(sampling=sampling, prompt_len=0),
        tokens=np.empty(0, dtype=np.int32),
        length=0,
    )


def followed(head: Head, *rules: Rule, blank: frozenset[int] = frozenset()) -> Group:
    """The rows' launch, once forms were followed."""
    sessions = [session_of(rule) for rule in rules]
    group = Group(
        list(range(len(rules))),
        cast(Any, [SimpleNamespace(session=session) for session in sessions]),
        cast(Any, [SimpleNamespace(slot=slot) for slot in range(len(rules))]),
        blank=blank,
    )
    group.drafts = Drafts.OWN
    form_drafts.follow_forms(group, cast(FormDrafts, head))
    assert all(not session.constraint.path for session in sessions)
    return group


def ids(mask: NDArray[np.uint32]) -> list[int]:
    return [i for i in range(32 * WORDS) if allows(mask, i)]


def masks_of(group: Group, row: int = 0) -> list[list[int]]:
    assert group.inputs.legal is not None
    masks = group.inputs.legal[row]
    assert masks is not None
    return [ids(mask) for mask in masks]


def test_a_chain_that_fits_is_verified_as_it_is() -> None:
    head = Head([2, 5, 5])
    group = followed(head, Rule.GREEDY)
    assert head.tokens.tolist() == [[2, 5, 5]] and not head.told
    assert masks_of(group) == [[1, 2], [5, 6], [5, 6], [5, 6]]


def test_where_one_id_is_left_it_is_the_draft_and_nobody_drafts_again() -> None:
    head = Head([1, 9, 9])
    group = followed(head, Rule.GREEDY)
    assert head.tokens.tolist() == [[1, 3, 4]] and not head.told
    assert masks_of(group) == [[1, 2], [3], [4], [5, 6]]


def test_what_was_drafted_behind_a_replaced_token_is_cut_off() -> None:
    # 5 would fit behind 1 3 4, but it was drafted behind something else; one level of four is not
    # worth a pass.
    head = Head([1, 9, 4, 5])
    group = followed(head, Rule.GREEDY)
    assert head.tokens.tolist() == [[1, 3, 4, -1]] and not head.told
    assert masks_of(group)[3] == [5, 6]
    assert group.cut == {0: 3}, "what was verified is counted"


def test_a_chain_that_is_open_from_the_start_is_drafted_again_under_masks() -> None:
    head = Head([9, 9, 9], again={0: [2, 5, 5]})
    group = followed(head, Rule.GREEDY)
    assert head.told == [([0], [1])]
    assert head.tokens.tolist() == [[2, 5, 5]]
    assert masks_of(group) == [[1, 2], [5, 6], [5, 6], [5, 6]]


def test_one_open_row_of_many_does_not_hold_up_the_others() -> None:
    head = Head([9, 9, 9], [2, 5, 5], [2, 6, 9])
    followed(head, Rule.GREEDY, Rule.GREEDY, Rule.GREEDY)
    assert not head.told
    assert head.tokens.tolist() == [[-1, -1, -1], [2, 5, 5], [2, 6, 9]]


def test_behind_an_end_nothing_is_drafted() -> None:
    head = Head([2, 6, 9, 4, 4])
    followed(head, Rule.COUPLED)
    assert head.tokens.tolist() == [[2, 6, 9, -1, -1]]


def test_a_head_that_cannot_draft_what_is_legal_is_not_asked_for_ever() -> None:
    head = Head([9, 9, 9], again={0: [9, 9, 9]})
    followed(head, Rule.GREEDY)
    assert head.told == [([0], [1])]
    assert head.tokens.tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize("first", [[2, 5, 5], [9, 9, 9]])
def test_draws_of_the_rejection_rule_are_repeated_once_whatever_came_and_never_replaced(
    first: list[int],
) -> None:
    head = Head(first, again={0: [1, 9, 9]})
    group = followed(head, Rule.REJECTION)
    assert head.told == [([0], [1])]
    assert head.tokens.tolist() == [[1, 9, 9]]
    assert masks_of(group)[:2] == [[1, 2], [3]]


def test_a_draw_that_is_not_repeated_is_verified_under_masks_all_along() -> None:
    """Where nobody else needs a pass, it is not worth one."""
    head = Head([2, 5, 5], [2, 5, 5], [2, 5, 5])
    group = followed(head, Rule.REJECTION, Rule.GREEDY, Rule.GREEDY)
    assert not head.told
    assert masks_of(group) == [[1, 2], [5, 6], [5, 6], [5, 6]]
    assert head.tokens[0].tolist() == [2, 5, 5]


def test_a_row_without_a_draft_has_the_mask_of_its_root() -> None:
    head = Head([-1, -1, -1])
    group = followed(head, Rule.GREEDY, blank=frozenset([0]))
    assert not head.told and head.tokens.tolist() == [[-1, -1, -1]]
    assert masks_of(group)[0] == [1, 2]


def test_a_walk_that_is_closed_twice_leads_back_once() -> None:
    session = session_of(Rule.GREEDY)
    walk = ChainWalk(session, 0, blank=False)
    chain = np.array([2, 5, 5], dtype=np.int32)
    side_by_side([(walk.constraint, walk.read(chain, chain))])
    assert session.constraint.path == [2, 5, 5]
    walk.close()
    walk.close()
    assert session.constraint.path == []
