"""A chain of the in-process drafter in a grammar: drafted level by level under masks; what is
given, where it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_verifier.model_runner.gpu_runner import grammar_drafts
from outrider_verifier.model_runner.gpu_runner.grammar_drafts import (
    GrammarChain,
    GrammarEmission,
    request_masks,
)
from outrider_verifier.model_runner.gpu_runner.launch_groups import LaunchGroup

from outrider.engine.device.drafting.draft_masks import Masks
from outrider.engine.device.drafting.grammar_drafts import GrammarDraftBuffer
from outrider.engine.device.graphs.shapes import DraftKind
from outrider.grammar.constraint import is_allowed
from outrider.spec.sampling import Rule
from tests.fakes.scripted_grammar import END, WORDS, Scripted

UNKNOWN = 3
"""An id that is not in the head's vocabulary."""


class Head:
    """What it drafts at each level where a mask leaves more than one id that it knows; what it is
    told."""

    are_chains = True

    def __init__(self, *drafts: list[int], begun: bool = True) -> None:
        self._drafts = drafts
        self.length = len(drafts[0]) if drafts else 3
        self.tokens = [[draft[0]] + [-1] * (self.length - 1) for draft in drafts]
        """What the device has."""
        self._slots, self._level = list(range(len(drafts))) if begun else [], 0
        self.told: dict[int, list[int] | None] = {}
        """By slot: what it was told to be legal at the first level; None: anything."""
        self.asked: list[dict[int, list[int] | None]] = []
        """At each further level: by slot what is allowed; None: anything."""
        self.waits = 0
        self.amended: list[list[int]] = []
        """Slots whose drafts were replaced on the way."""

    def start_drafts(
        self, slots: list[int], allowed_tokens: list[Masks | None], *, seen: bool = False
    ) -> None:
        self._slots, self.seen = slots, seen
        self.told = {
            slot: told_of(masks) for slot, masks in zip(slots, allowed_tokens, strict=True)
        }

    def has_started(self, slots: list[int]) -> bool:
        return set(slots) <= set(self._slots)

    def read_chains(self) -> dict[int, int]:
        self.waits += 1
        return {slot: self._drafts[slot][self._level] for slot in self._slots}

    def has_token(self, token: int) -> bool:
        return token != UNKNOWN

    def choose_level(
        self, slots: list[int], level: int, allowed_tokens: list[Masks | None]
    ) -> None:
        self._slots, self._level = slots, level
        self.asked.append(
            {s: told_of(masks) for s, masks in zip(slots, allowed_tokens, strict=True)}
        )
        for slot in slots:
            chain = self.tokens[slot]
            assert chain[level - 1] >= 0, "the head thinks behind what is there"
            only = self.asked[-1][slot] or []
            given = len(only) == 1 and self.has_token(only[0])
            chain[level] = only[0] if given else self._drafts[slot][level]

    def replace_tokens(self, slots: list[int], tokens: NDArray[np.int32], level: int) -> None:
        assert level == self._level
        self.amended.append(slots)
        self.write_chains(slots, tokens)

    def write_chains(self, slots: list[int], tokens: NDArray[np.int32]) -> None:
        for slot, chain in zip(slots, tokens.tolist(), strict=True):
            self.tokens[slot] = chain


def told_of(masks: Masks | None) -> list[int] | None:
    if masks is None:
        return None
    (mask,) = masks
    return ids(mask)


def session_of(rule: Rule) -> Any:
    sampling = SimpleNamespace(effective_rule=rule)
    return SimpleNamespace(
        constraint=Scripted(),
        spec=SimpleNamespace(sampling=sampling, prompt_len=0),
        tokens=np.empty(0, dtype=np.int32),
        length=0,
    )


def followed(head: Head, *rules: Rule, blank: frozenset[int] = frozenset()) -> LaunchGroup:
    """The rows' launch, once forms were followed."""
    sessions = [session_of(rule) for rule in rules]
    group = LaunchGroup(
        list(range(len(rules))),
        cast(Any, [SimpleNamespace(session=session) for session in sessions]),
        cast(Any, [SimpleNamespace(slot=slot) for slot in range(len(rules))]),
        undrafted_rows=blank,
    )
    group.drafts = DraftKind.IN_PROCESS
    grammar_drafts.apply_grammars(group, cast(GrammarDraftBuffer, head))
    assert all(not session.constraint.path for session in sessions)
    return group


def told(*emitted: list[int], undrafted: bool = False) -> dict[int, list[int] | None]:
    """What the head is told once sessions have emitted so."""
    head, sessions = Head(), [session_of(Rule.GREEDY) for _ in emitted]
    grammar_drafts.start_masked_drafts(
        [
            GrammarEmission(*each)
            for each in zip(sessions, range(len(emitted)), emitted, strict=True)
        ],
        cast(GrammarDraftBuffer, head),
        undrafted=undrafted,
    )
    for session in sessions:
        # What was emitted stands already.
        assert len(session.constraint.path) == session.constraint.stood
    return head.told


def ids(mask: NDArray[np.uint32]) -> list[int]:
    return [i for i in range(32 * WORDS) if is_allowed(mask, i)]


def masks_of(group: LaunchGroup, row: int = 0) -> list[list[int]]:
    assert group.inputs.allowed_tokens is not None
    masks = group.inputs.allowed_tokens[row]
    assert masks is not None
    return [ids(mask) for mask in masks]


def test_a_head_begins_under_the_mask_of_what_stands() -> None:
    assert told([], [2], [1], [1, 3]) == {0: [1, 2], 1: [5, 6], 2: [3], 3: [4]}


def test_what_has_ended_is_not_drafted_for() -> None:
    assert told([2, 6, END]) == {}


def test_a_head_that_has_not_drafted_yet_is_told_of_everybody() -> None:
    assert told([1], [2, 6, END], [2], undrafted=True) == {0: [3], 1: None, 2: [5, 6]}


def test_a_session_that_has_failed_is_not_drafted_for() -> None:
    session = session_of(Rule.GREEDY)
    session.constraint.failure = "it left its grammar"
    head = Head()
    grammar_drafts.start_masked_drafts(
        [GrammarEmission(session, 0, [2])], cast(GrammarDraftBuffer, head)
    )
    assert head.told == {}


def test_each_level_is_drafted_under_the_mask_of_what_stands_before_it() -> None:
    head = Head([2, 5, 6])
    group = followed(head, Rule.GREEDY)
    assert head.tokens == [[2, 5, 6]] and not group.draft_limits
    assert head.asked == [{0: [5, 6]}, {0: [5, 6]}] and head.waits == 3
    assert masks_of(group) == [[1, 2], [5, 6], [5, 6], [5, 6]]


def test_where_one_id_is_left_it_is_the_draft_and_nobody_waits_for_it() -> None:
    head = Head([1, 9, 9, 5])
    group = followed(head, Rule.GREEDY)
    assert head.tokens == [[1, 3, 4, 5]] and head.waits == 2 and not group.draft_limits
    assert head.asked == [{0: [3]}, {0: [4]}, {0: [5, 6]}]
    assert head.amended == [[0]], "the head does not know it, but goes on behind it"
    assert masks_of(group) == [[1, 2], [3], [4], [5, 6], [7, 8]]


def test_what_is_given_at_the_last_level_is_written() -> None:
    head = Head([1, 9])
    followed(head, Rule.GREEDY)
    assert head.tokens == [[1, 3]] and not head.amended


def test_a_chain_ends_where_the_head_knows_nothing_that_may_follow() -> None:
    head = Head([2, 9, 5], [9, 5, 5], [-1, 5, 5], [64, 5, 5])
    group = followed(head, *[Rule.GREEDY] * 4)
    assert head.tokens == [[2, -1, -1], [-1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert group.draft_limits == {0: 1, 1: 0, 2: 0, 3: 0}, "what is verified is counted"
    assert masks_of(group)[1] == [5, 6]


def test_chains_of_many_lengths_grow_side_by_side() -> None:
    head = Head([9, 9, 9], [2, 5, 5], [2, 6, 9], [1, 9, 9])
    group = followed(head, *[Rule.GREEDY] * 4)
    assert head.tokens == [[-1, -1, -1], [2, 5, 5], [2, 6, 9], [1, 3, 4]]
    assert [list(level) for level in head.asked] == [[1, 2, 3], [1, 2, 3]]
    assert group.draft_limits == {0: 0}


def test_behind_an_end_nothing_is_drafted() -> None:
    head = Head([2, 6, 9, 4, 4])
    group = followed(head, Rule.COUPLED)
    assert head.tokens == [[2, 6, 9, -1, -1]] and group.draft_limits == {0: 3}
    assert len(head.asked) == 2


def test_a_session_that_sat_a_round_out_begins_again() -> None:
    head = Head([2, 5, 5], [2, 5, 5], begun=False)
    followed(head, Rule.GREEDY, Rule.REJECTION)
    assert head.told == {0: [1, 2], 1: [1, 2]} and head.tokens == [[2, 5, 5]] * 2


@pytest.mark.parametrize(
    ("drawn", "wanted", "levels"),
    [
        ([2, 5, 5], [2, 5, 5], [[5, 6], [5, 6]]),
        ([9, 9, 9], [9, -1, -1], []),
        ([1, 9, 9], [1, 9, -1], [[3]]),
    ],
)
def test_draws_of_the_rejection_rule_are_never_replaced(
    drawn: list[int], wanted: list[int], levels: list[list[int]]
) -> None:
    head = Head(drawn)
    group = followed(head, Rule.REJECTION)
    assert head.tokens == [wanted]
    assert head.asked == [{0: legal} for legal in levels]
    assert masks_of(group)[0] == [1, 2]


def test_a_row_without_a_draft_has_the_mask_of_its_root() -> None:
    head = Head([-1, -1, -1])
    group = followed(head, Rule.GREEDY, blank=frozenset([0]))
    assert head.tokens == [[-1, -1, -1]] and not head.waits and not head.told
    assert masks_of(group)[0] == [1, 2]


def test_a_chain_that_is_closed_twice_leads_back_once() -> None:
    session = session_of(Rule.GREEDY)
    chain = GrammarChain(session)
    request_masks([chain])
    chain.extend_chain(1, cast(GrammarDraftBuffer, Head()))
    assert session.constraint.path
    chain.close()
    chain.close()
    assert session.constraint.path == []
