"""Allowed ids and bad words: masks of the definition, wherever a session is and whatever it has
for a form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.errors import InvalidRequestError
from outrider.grammar.constraint import allowed_mask, allowed_prefix_len, mask_words, masks_of_paths
from outrider.grammar.draft_masks import ConstrainedTree, masks_of_trees
from outrider.grammar.grammar_cache import GrammarCache
from outrider.grammar.token_constraint import TokenConstraint
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.token_limits import MAX_ALLOWED_IDS, MAX_BAD_WORD_TOKENS, TokenLimits
from outrider.spec.tree import ROOT, path
from outrider.text.tokenizer import Tokenizer
from tests.mask_limits import LONG_MASKS
from tests.reference.grammar_oracle import ids_of

VOCAB = 40
IDS = st.integers(0, 5) | st.integers(30, VOCAB + 5)
LIMITS = st.builds(
    TokenLimits,
    allowed_ids=st.lists(IDS, min_size=1, max_size=6).map(tuple),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
) | st.builds(
    TokenLimits,
    bad_words=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6
    ).map(tuple),
)


def legal_by_hand(limits: TokenLimits, said: Sequence[int]) -> set[int]:
    """The definition: allowed, and no bad word complete; allowed ids alone if nothing is left."""
    allowed = {id_ for id_ in limits.allowed_ids or range(VOCAB) if id_ < VOCAB}
    kept = {
        id_
        for id_ in allowed
        if not any((*said, id_)[-len(word) :] == word for word in limits.bad_words)
    }
    # Where no id of the vocabulary is allowed there is nothing to limit.
    return kept or allowed or set(range(VOCAB))


@given(
    limits=LIMITS,
    output=st.lists(st.integers(0, 3), max_size=6),
    tree=st.lists(st.tuples(st.integers(-1, VOCAB), st.integers(0, 20)), max_size=8),
    steps=st.integers(1, 3),
)
def test_masks_of_a_tree_are_those_of_the_definition(
    limits: TokenLimits, output: list[int], tree: list[tuple[int, int]], steps: int
) -> None:
    constraint = TokenConstraint(limits, vocab_size=VOCAB)
    tokens = np.array([token for token, _ in tree], dtype=np.int32)
    parents = np.array([at % (n + 1) - 1 for n, (_, at) in enumerate(tree)], dtype=np.int32)
    for seen in range(0, len(output) + 1, steps):
        constraint.advance_to(np.array(output[:seen], dtype=np.int32))
    constraint.advance_to(np.array(output, dtype=np.int32))
    (masks,) = masks_of_trees([ConstrainedTree(constraint, tokens, parents)])
    assert masks.shape == (1 + len(tree), mask_words(VOCAB)) and masks.dtype == np.uint32
    paths = [[int(tokens[at]) for at in path(parents, n)] for n in range(ROOT, len(tree))]
    for mask, said in zip(masks, paths, strict=True):
        # Behind what is no id nothing is said.
        if all(0 <= token < VOCAB for token in said):
            wanted = legal_by_hand(limits, [*output, *said])
            (alone,) = masks_of_paths(constraint, [said])
            assert set(ids_of(mask, VOCAB)) == set(ids_of(alone, VOCAB)) == wanted


@given(
    limits=LIMITS,
    output=st.lists(st.integers(0, 3), max_size=5),
    draft=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    back=st.integers(0, 6),
)
def test_a_walk_along_a_draft_has_its_masks_and_leads_back(
    limits: TokenLimits, output: list[int], draft: list[int], back: int
) -> None:
    constraint = TokenConstraint(limits, vocab_size=VOCAB)
    constraint.advance_to(np.array(output, dtype=np.int32))
    wanted = masks_of_paths(constraint, [draft[:depth] for depth in range(len(draft) + 1)])
    assert (allowed_mask(constraint) == wanted[0]).all()
    for depth, token in enumerate(draft):
        assert constraint.push_tokens([token]) == 1
        assert (allowed_mask(constraint) == wanted[depth + 1]).all()
    back = min(back, len(draft))
    constraint.pop_tokens(back)
    assert (allowed_mask(constraint) == wanted[len(draft) - back]).all()
    constraint.pop_tokens(len(draft) - back)
    assert (allowed_mask(constraint) == wanted[0]).all()


@given(limits=LIMITS, output=st.lists(st.integers(0, 3), max_size=5), draft=st.lists(IDS))
def test_a_draft_is_legal_up_to_the_first_id_that_is_not(
    limits: TokenLimits, output: list[int], draft: list[int]
) -> None:
    constraint = TokenConstraint(limits, vocab_size=VOCAB)
    constraint.advance_to(np.array(output, dtype=np.int32))
    count = allowed_prefix_len(constraint, draft)
    for index, id_ in enumerate(draft[:count]):
        assert id_ in legal_by_hand(limits, [*output, *draft[:index]])
    if count < len(draft) and all(id_ < VOCAB for id_ in limits.allowed_ids):
        said = [*output, *draft[:count]]
        bad = any((*said, draft[count])[-len(word) :] == word for word in limits.bad_words)
        allowed = not limits.allowed_ids or draft[count] in limits.allowed_ids
        assert bad or not allowed or draft[count] >= VOCAB


def test_within_a_form_both_hold_and_where_nothing_is_left_the_form_does(
    tiny_target: Path,
) -> None:
    vocab, stop = 384, 2
    grammars = GrammarCache.from_tokenizer_file(
        tiny_target / "tokenizer.json", vocab_size=vocab, masks=LONG_MASKS
    )
    assert grammars is not None
    tokenizer = Tokenizer.load(tiny_target)
    form = grammars.compile_grammar(StructuredOutput(StructuredKind.REGEX, "[ab]{2}c"))
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")

    def ids_legal(limits: TokenLimits, *said: int) -> NDArray[np.int64]:
        constraint = TokenConstraint(limits, vocab_size=vocab, form=form.start_constraint([stop]))
        constraint.advance_to(np.array(said, dtype=np.int32))
        assert not constraint.failure
        (mask,) = masks_of_paths(constraint, [()])
        assert (allowed_mask(constraint) == mask).all()
        return np.array(sorted(ids_of(mask, vocab)))

    anything = set(ids_legal(TokenLimits(bad_words=((7, 8, 9),))).tolist())
    assert {a, b} <= anything
    assert ids_legal(TokenLimits(allowed_ids=(a, c))).tolist() == [a]
    assert set(ids_legal(TokenLimits(bad_words=((a,),))).tolist()) == anything - {a}
    behind_a = set(ids_legal(TokenLimits(bad_words=((7, 8, 9),)), a).tolist())
    assert set(ids_legal(TokenLimits(bad_words=((a, b),)), a).tolist()) == behind_a - {b}
    # The form allows neither: it wins. So does the end, which is none of the allowed ids.
    assert set(ids_legal(TokenLimits(allowed_ids=(7,))).tolist()) == anything
    assert ids_legal(TokenLimits(allowed_ids=(a, c)), a, a, c).tolist() == [stop]
    bound = TokenConstraint(
        TokenLimits(bad_words=((b,),)), vocab_size=vocab, form=form.start_constraint([stop])
    )
    assert allowed_prefix_len(bound, [a, a, c]) == 3 and allowed_prefix_len(bound, [a, b, c]) == 1
    before = allowed_mask(bound)
    assert bound.push_tokens([a, a]) == 2
    assert (allowed_mask(bound) == masks_of_paths(bound, [()])[0]).all(), (
        "both are where the walk is"
    )
    assert bound.push_tokens([c, stop]) == 1, "nothing follows the end"
    bound.pop_tokens(3)
    assert (allowed_mask(bound) == before).all()
    bound.advance_to(np.array([c], dtype=np.int32))
    assert "does not fit" in bound.failure


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"allowed_ids": (-1,)},
        {"allowed_ids": tuple(range(MAX_ALLOWED_IDS + 1))},
        {"bad_words": ((),)},
        {"bad_words": ((3, -1),)},
        {"bad_words": ((1,),) * 257},
        {"bad_words": ((1,) * (MAX_BAD_WORD_TOKENS + 1),)},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        TokenLimits(**limits)  # type: ignore[arg-type]
    assert refused.value.reason == "INVALID_SAMPLING"
