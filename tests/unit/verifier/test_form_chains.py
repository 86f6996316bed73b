"""A chain of the own head in a grammar: drafted under masks, then what stands, what is forced, what
is cut off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_verifier import form_drafts
from outrider_verifier.device_groups import Group
from outrider_verifier.form_chains import ChainWalk
from outrider_verifier.form_drafts import Emitted

from outrider.engine.device.draft_masks import Masks
from outrider.engine.device.form_drafts import FormDrafts
from outrider.engine.device.shapes import Drafts
from outrider.grammar.constraint import allows
from outrider.grammar.walks import side_by_side
from outrider.spec.sampling import Rule
from tests.fakes.scripted_grammar import END, WORDS, Scripted


class Head:
    """Drafts of some rows; what it is told when it drafts again."""

    are_chains = True

    def __init__(
        self, *drafts: list[int], levels: int = 3, others: list[list[int]] | None = None
    ) -> None:
        self.tokens = np.array(drafts, dtype=np.int32)
        self.others = others
        self.levels = levels
        self.told: dict[int, list[list[int]] | None] = {}
        """By slot: what it was told to be legal, level by level; None: anything."""

    def chains(self, slots: list[int]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        others = self.others or [[-1, -1]] * self.tokens.shape[1]
        return self.tokens[slots].copy(), np.array([others] * len(slots), dtype=np.int32)

    def redraft(self, slots: list[int], legal: list[Masks | None]) -> None:
        for slot, masks in zip(slots, legal, strict=True):
            self.told[slot] = None if masks is None else [ids(m) for m in masks[: self.levels]]

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


def told(
    *emitted: list[int], rule: Rule = Rule.GREEDY, levels: int = 3, undrafted: bool = False
) -> dict[int, Any]:
    """What the head is told once sessions have emitted so."""
    head, sessions = Head(levels=levels), [session_of(rule) for _ in emitted]
    form_drafts.draft_under_masks(
        [Emitted(*each) for each in zip(sessions, range(len(emitted)), emitted, strict=True)],
        cast(FormDrafts, head),
        undrafted=undrafted,
    )
    assert all(not session.constraint.path for session in sessions)
    return head.told


def ids(mask: NDArray[np.uint32]) -> list[int]:
    return [i for i in range(32 * WORDS) if allows(mask, i)]


def masks_of(group: Group, row: int = 0) -> list[list[int]]:
    assert group.inputs.legal is not None
    masks = group.inputs.legal[row]
    assert masks is not None
    return [ids(mask) for mask in masks]


def test_a_head_drafts_under_the_masks_of_what_must_follow_and_of_the_first_open_place() -> None:
    assert told([], [2], [1], [1, 3], levels=5) == {
        0: [[1, 2]],
        1: [[5, 6]],
        2: [[3], [4], [5, 6]],
        3: [[4], [5, 6]],
    }


def test_what_is_wholly_given_and_what_has_ended_is_not_drafted_again() -> None:
    assert told([1], [2, 6, END], levels=2) == {}
    assert told([1], rule=Rule.REJECTION, levels=2) == {0: [[3], [4]]}, "a draw is always repeated"


def test_a_head_that_has_not_drafted_yet_is_told_of_everybody() -> None:
    wanted = {0: None, 1: None, 2: [[5, 6]]}
    assert told([1], [2, 6, END], [2], levels=2, undrafted=True) == wanted


def test_a_session_that_has_failed_is_not_drafted_for() -> None:
    session = session_of(Rule.GREEDY)
    session.constraint.failed = "it left its grammar"
    head = Head()
    form_drafts.draft_under_masks([Emitted(session, 0, [2])], cast(FormDrafts, head))
    assert head.told == {}


def test_a_chain_that_fits_is_verified_as_it_is() -> None:
    head = Head([2, 5, 5])
    group = followed(head, Rule.GREEDY)
    assert head.tokens.tolist() == [[2, 5, 5]] and not group.cut
    assert masks_of(group) == [[1, 2], [5, 6], [5, 6], [5, 6]]


def test_where_one_id_is_left_it_is_the_draft() -> None:
    head = Head([1, 9, 9])
    group = followed(head, Rule.GREEDY)
    assert head.tokens.tolist() == [[1, 3, 4]]
    assert masks_of(group) == [[1, 2], [3], [4], [5, 6]]


def test_what_was_drafted_behind_a_replaced_token_is_cut_off() -> None:
    # 5 would fit behind 1 3 4, but it was drafted behind something else.
    head = Head([1, 9, 4, 5])
    group = followed(head, Rule.GREEDY)
    assert head.tokens.tolist() == [[1, 3, 4, -1]]
    assert masks_of(group)[3] == [5, 6]
    assert group.cut == {0: 3}, "what was verified is counted"


def test_where_more_are_left_the_best_that_might_have_been_drafted_is_the_draft() -> None:
    others = [[9, 2], [9, 6], [5, 6], [5, 6]]
    head = Head([9, 5, 5, 5], others=others)
    followed(head, Rule.GREEDY)
    # What was drafted behind 9 is not looked at, and neither is what might have been.
    assert head.tokens.tolist() == [[2, -1, -1, -1]]
    head = Head([2, 9, 5, 5], others=others)
    followed(head, Rule.GREEDY)
    assert head.tokens.tolist() == [[2, 6, END, -1]], "what must follow does"
    head = Head([1, 9, 9, 9], others=others)
    followed(head, Rule.GREEDY)
    assert head.tokens.tolist() == [[1, 3, 4, -1]], "behind what was replaced there are none"


def test_an_open_row_is_verified_without_drafts_beside_others() -> None:
    head = Head([9, 9, 9], [2, 5, 5], [2, 6, 9])
    followed(head, Rule.GREEDY, Rule.GREEDY, Rule.GREEDY)
    assert head.tokens.tolist() == [[-1, -1, -1], [2, 5, 5], [2, 6, 9]]


def test_behind_an_end_nothing_is_drafted() -> None:
    head = Head([2, 6, 9, 4, 4])
    followed(head, Rule.COUPLED)
    assert head.tokens.tolist() == [[2, 6, 9, -1, -1]]


@pytest.mark.parametrize("drawn", [[2, 5, 5], [9, 9, 9], [1, 9, 9]])
def test_draws_of_the_rejection_rule_are_never_replaced(drawn: list[int]) -> None:
    head = Head(drawn, others=[[2, 1], [3, 5], [4, 5]])
    group = followed(head, Rule.REJECTION)
    assert head.tokens.tolist() == [drawn] and not group.cut
    assert masks_of(group)[0] == [1, 2]
    if drawn[0] == 2:
        assert masks_of(group)[1:] == [[5, 6], [5, 6], [5, 6]], "masks all along"


def test_a_row_without_a_draft_has_the_mask_of_its_root() -> None:
    head = Head([-1, -1, -1])
    group = followed(head, Rule.GREEDY, blank=frozenset([0]))
    assert head.tokens.tolist() == [[-1, -1, -1]]
    assert masks_of(group)[0] == [1, 2]


def test_a_walk_that_is_closed_twice_leads_back_once() -> None:
    session, chain = session_of(Rule.GREEDY), np.array([1, 9, 9], dtype=np.int32)
    walk = ChainWalk(session, chain, chain[:, None], blank=False)
    side_by_side([(walk.constraint, walk.walk())])
    assert session.constraint.path
    walk.close()
    walk.close()
    assert session.constraint.path == []
