"""Masks of a session and its drafts: those of a slow oracle, wherever it is and however it came
there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider.grammar.constraint import (
    ALL_TOKENS,
    Constraint,
    allowed_mask,
    allowed_prefix_len,
    mask_of,
    mask_words,
    masks_along_drafts,
    masks_of_paths,
    single_id,
    small_id_set,
)
from outrider.grammar.draft_masks import ConstrainedTree, masks_of_trees
from outrider.grammar.grammar_cache import GrammarCache
from outrider.grammar.grammar_constraint import GrammarConstraint
from outrider.grammar.token_constraint import make_constraint
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.token_limits import TokenLimits
from outrider.spec.tree import ROOT
from outrider.text.tokenizer import Tokenizer
from tests.mask_limits import LONG_MASKS
from tests.reference.grammar_oracle import FiniteLanguage, ids_of

VOCAB = 384
STOP = 2
TEXTS = [
    "".join(parts)
    for parts in itertools.product(["0 1", "zwei", "the target"], [" ", ""], ["decides", "\u00e4"])
] + ["0", "drafts"]


@pytest.fixture(scope="module")
def grammars(tiny_target: Path) -> GrammarCache:
    found = GrammarCache.from_tokenizer_file(
        tiny_target / "tokenizer.json", vocab_size=VOCAB, masks=LONG_MASKS
    )
    assert found is not None
    return found


@pytest.fixture(scope="module")
def language(tiny_target: Path) -> FiniteLanguage:
    return FiniteLanguage(TEXTS, tiny_target, VOCAB)


def begun(grammars: GrammarCache) -> GrammarConstraint:
    grammar = "start: " + " | ".join(json.dumps(text) for text in TEXTS)
    form = StructuredOutput(StructuredKind.GRAMMAR, grammar)
    return grammars.compile_grammar(form).start_constraint([STOP])


def draft_tree(
    constraint: GrammarConstraint, tokens: Sequence[int], parents: Sequence[int]
) -> ConstrainedTree:
    return ConstrainedTree(constraint, np.array(tokens, np.int32), np.array(parents, np.int32))


def random_tree(
    rng: np.random.Generator, language: FiniteLanguage, before: list[int], nodes: int
) -> tuple[list[int], list[int]]:
    """Mostly of allowed tokens, ends among them, with some that are not."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = []
    for node in range(nodes):
        parent = int(rng.integers(ROOT, node))
        above = [] if parent == ROOT else paths[parent]
        going = sorted(language.legal([*before, *above], [STOP]))
        wild = rng.random() < 0.2 or not going
        token = int(rng.integers(0, VOCAB)) if wild else int(rng.choice(going))
        tokens.append(token)
        parents.append(parent)
        paths.append([*above, token])
    return tokens, parents


@pytest.mark.parametrize("seed", range(6))
def test_masks_of_a_tree_are_those_of_every_prefix_matched_anew(
    seed: int, grammars: GrammarCache, language: FiniteLanguage
) -> None:
    rng = np.random.default_rng(seed)
    constraint, before, stood = begun(grammars), list[int](), 0
    while True:
        tokens, parents = random_tree(rng, language, before, 12)
        (masks,) = masks_of_trees([draft_tree(constraint, tokens, parents)])
        assert masks.shape == (13, mask_words(VOCAB)) and masks.dtype == np.uint32
        assert language.agrees(ids_of(masks[0], VOCAB), before, [STOP]), before
        for node in range(12):
            path, at, stands = list[int](), node, True
            while at != ROOT:
                path.insert(0, tokens[at])
                stands &= tokens[at] in ids_of(masks[parents[at] + 1], VOCAB)
                at = parents[at]
            if not stands:
                # Below what is not legal it says anything.
                continue
            stood += 1
            found = ids_of(masks[node + 1], VOCAB)
            assert language.agrees(found, [*before, *path], [STOP]), (before, path)
            (alone,) = masks_of_paths(constraint, [path])
            assert np.array_equal(alone, masks[node + 1])
            anew = begun(grammars)
            anew.advance_to(np.array([*before, *path], np.int32))
            assert anew.failure or np.array_equal(allowed_mask(anew), alone)
        going = sorted(language.legal(before, []))
        if not going:
            break
        before.append(int(rng.choice(going)))
        constraint.advance_to(np.array(before, np.int32))
    assert stood > 6
    # Complete, and nothing can follow: its end alone is allowed.
    assert ids_of(allowed_mask(constraint), VOCAB) == {STOP}
    assert not constraint.failure


def test_a_constraint_is_where_its_tokens_are_however_they_came(
    grammars: GrammarCache, tiny_target: Path
) -> None:
    """One by one, in parts, or all at once after a failover."""
    ids = np.array(Tokenizer.load(tiny_target).encode("the target decid"), np.int32)
    slowly, at_once = begun(grammars), begun(grammars)
    for end in range(len(ids) + 1):
        slowly.advance_to(ids[:end])
        slowly.advance_to(ids[:end])
    at_once.advance_to(ids)
    assert np.array_equal(allowed_mask(slowly), allowed_mask(at_once))
    assert ids_of(allowed_mask(at_once), VOCAB)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_what_was_entered_may_stand_and_what_was_asked_is_not_asked_again(
    seed: int, limited: bool, grammars: GrammarCache
) -> None:
    """Steps by chance, next to a constraint that is asked anew at each place."""
    limits = TokenLimits(bad_words=((7,), (40, 41))) if limited else None

    def begin() -> Constraint:
        found = make_constraint(limits, begun(grammars), vocab_size=VOCAB)
        assert found is not None
        return found

    rng, constraint = np.random.default_rng(seed), begin()
    stands, entered, asked = list[int](), list[int](), 0
    for _ in range(60):
        anew = begin()
        anew.advance_to(np.array(stands, np.int32))
        assert anew.push_tokens(entered) == len(entered)
        mask = allowed_mask(anew)
        here = constraint.current_mask
        asked += here is None
        assert here is None or np.array_equal(here, mask)
        assert np.array_equal(allowed_mask(constraint), mask)
        match rng.integers(4):
            case 0:
                count = int(rng.integers(1 + len(entered)))
                constraint.pop_tokens(count)
                del entered[len(entered) - count :]
            case 1:
                constraint.commit_tokens()
                stands, entered = stands + entered, []
                constraint.advance_to(np.array(stands, np.int32))
            case 2:
                pass
            case _:
                ids = sorted(ids_of(mask, VOCAB) - {STOP})
                if ids:
                    entered.append(int(rng.choice(ids)))
                    assert constraint.push_tokens(entered[-1:]) == 1
    assert len(stands) > 2 and (limited or asked < 50)


def test_a_walk_along_a_draft_has_its_masks_and_leads_back(
    grammars: GrammarCache, tiny_target: Path
) -> None:
    ids = list(Tokenizer.load(tiny_target).encode("the target"))
    constraint = begun(grammars)
    wanted = masks_of_paths(constraint, [ids[:depth] for depth in range(len(ids) + 1)])
    for depth, token in enumerate(ids):
        assert np.array_equal(allowed_mask(constraint), wanted[depth])
        assert constraint.push_tokens([token]) == 1
    assert not constraint.push_tokens([5]), "it is not legal there"
    constraint.pop_tokens(len(ids) - 1)
    assert np.array_equal(allowed_mask(constraint), wanted[1])
    constraint.pop_tokens(1)
    constraint.pop_tokens(0)
    assert np.array_equal(allowed_mask(constraint), wanted[0])


@pytest.mark.parametrize("ids", [[0], [31], [32], [63], [40]])
def test_the_only_id_of_a_mask_is_known(ids: list[int]) -> None:
    assert single_id(mask_of(ids, 2)) == ids[0]
    assert single_id(mask_of([*ids, 33], 2)) is None
    assert single_id(mask_of([], 2)) is None


def test_ids_of_a_mask_are_told_if_they_are_few() -> None:
    mask = mask_of([0, 31, 32, 40], 2)
    assert small_id_set(mask, 4) == small_id_set(mask, 9) == [0, 31, 32, 40]
    assert small_id_set(mask, 3) == small_id_set(mask, 1) == small_id_set(mask_of([], 2), 3) == []


def test_tokens_that_do_not_fit_are_said(grammars: GrammarCache) -> None:
    constraint = begun(grammars)
    constraint.advance_to(np.array([5, 6], np.int32))
    assert "token 5 does not fit" in constraint.failure
    assert ids_of(allowed_mask(constraint), VOCAB) == {STOP}
    (masks,) = masks_of_trees([draft_tree(constraint, [9], [ROOT])])
    assert ids_of(masks[0], VOCAB) == {STOP}
    assert allowed_prefix_len(constraint, [4]) == 0


def test_drafts_are_cut_where_they_leave_the_grammar(
    grammars: GrammarCache, tiny_target: Path
) -> None:
    constraint = begun(grammars)
    ids = list(Tokenizer.load(tiny_target).encode("drafts"))
    assert allowed_prefix_len(constraint, ids) == len(ids)
    assert allowed_prefix_len(constraint, [*ids, STOP]) == len(ids) + 1, "an end may be drafted"
    assert allowed_prefix_len(constraint, [*ids, STOP, STOP]) == len(ids) + 1
    assert allowed_prefix_len(constraint, [*ids, ids[0]]) == len(ids)
    assert (
        allowed_prefix_len(constraint, [STOP]) == allowed_prefix_len(constraint, [VOCAB + 7]) == 0
    )
    assert allowed_prefix_len(constraint, ids) == len(ids), "what is tried is undone"


def test_specials_and_padding_are_never_legal(grammars: GrammarCache) -> None:
    anything = grammars.compile_grammar(
        StructuredOutput(StructuredKind.REGEX, "(.|\n)*")
    ).start_constraint([STOP])
    found = ids_of(allowed_mask(anything), VOCAB)
    assert STOP in found and not {0, 1} & found
    assert max(found) < 359 < VOCAB, "the vocabulary is padded beyond the tokenizer's ids"


def test_sessions_side_by_side_have_the_masks_that_they_have_alone(
    grammars: GrammarCache, language: FiniteLanguage
) -> None:
    """Of them one that has failed, and one whose tree has but a root."""
    rng = np.random.default_rng(5)
    trees = [random_tree(rng, language, [], nodes) for nodes in (5, 0, 9, 3)]
    constraints = [begun(grammars) for _ in trees]
    constraints[3].advance_to(np.array([5, 6], np.int32))
    alone = [
        masks_of_trees([draft_tree(constraint, *tree)])[0]
        for constraint, tree in zip(constraints, trees, strict=True)
    ]
    together = masks_of_trees(
        [draft_tree(*each) for each in zip(constraints, *zip(*trees, strict=True), strict=True)]
    )
    assert constraints[3].failure
    for masks, wanted in zip(together, alone, strict=True):
        assert np.array_equal(masks, wanted)


@pytest.mark.parametrize("seed", range(4))
def test_masks_along_drafts_are_those_of_single_steps(
    seed: int, grammars: GrammarCache, language: FiniteLanguage
) -> None:
    """Of many sessions at once, without drafts, or with some that leave the grammar or end."""
    rng = np.random.default_rng(seed)
    drafts = list[list[int]]()
    for _ in range(8):
        tokens = list[int]()
        for _ in range(int(rng.integers(0, 6))):
            going = sorted(language.legal(tokens, [STOP])) or [STOP]
            wild = [-1, VOCAB, 1 << 30, int(rng.integers(0, VOCAB))]
            tokens.append(int(rng.choice(wild if rng.random() < 0.1 else going)))
        drafts.append(tokens)
    constraints = [begun(grammars) for _ in drafts]
    found = masks_along_drafts(list(zip(constraints, drafts, strict=True)))
    for constraint, tokens, along in zip(constraints, drafts, found, strict=True):
        assert along.masks.shape == (1 + len(tokens), mask_words(VOCAB))
        stepped = begun(grammars)
        for depth in range(along.entered + 1):
            assert np.array_equal(along.masks[depth], allowed_mask(stepped)), (tokens, depth)
            if depth < along.entered:
                assert stepped.push_tokens([tokens[depth]]) == 1
        if along.entered < len(tokens):
            here = ids_of(along.masks[along.entered], VOCAB)
            left = tokens[along.entered]
            assert left not in here or not stepped.push_tokens([left]), "nothing follows it"
            assert (along.masks[1 + along.entered :] == ALL_TOKENS).all()
        assert not constraint.failure
        assert np.array_equal(allowed_mask(constraint), allowed_mask(begun(grammars))), (
            "it is where it was"
        )


def test_what_must_follow_is_what_masks_leave_alone(grammars: GrammarCache) -> None:
    constraint = grammars.compile_grammar(
        StructuredOutput(StructuredKind.REGEX, "x(abc){2}[01]")
    ).start_constraint([STOP])
    forced = list(constraint.forced_tokens())
    assert forced
    for depth in range(len(forced)):
        (mask,) = masks_of_paths(constraint, [forced[:depth]])
        assert single_id(mask) == forced[depth]
    (behind,) = masks_of_paths(constraint, [forced])
    assert single_id(behind) is None


@pytest.mark.parametrize("way", ["advance_to", "resume", "prepare"])
def test_the_error_of_a_matcher_is_told_and_no_token_is_blamed(
    grammars: GrammarCache, tiny_target: Path, way: str
) -> None:
    right_recursive = StructuredOutput(StructuredKind.GRAMMAR, 'start: "a" start | "a"')
    constraint = grammars.compile_grammar(right_recursive).start_constraint([STOP])
    (token,) = Tokenizer.load(tiny_target).encode("a")
    ids = np.full(2_500, token, np.int32)
    if way == "prepare":
        constraint.advance_to(ids[:1_990])
        constraint.prepare(ids[:2_010])
        assert constraint.matcher is None
    else:
        getattr(constraint, way)(ids)
    assert "more than 2,000 open items" in constraint.failure

    constraint = grammars.compile_grammar(
        StructuredOutput(StructuredKind.REGEX, "b+")
    ).start_constraint([STOP])
    constraint.advance_to(ids)
    assert constraint.failure == f"token {token} does not fit the grammar"
