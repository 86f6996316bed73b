from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import AcceptanceResult, AcceptRow, accept_drafts
from outrider.engine.draft_sampling import propose_children
from outrider.engine.logits_processor import plain_argmax
from outrider.spec.draft_distribution import (
    DraftDistribution,
    make_distribution,
    validate_distribution,
)
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree, children, path, validate_tree
from tests.reference.acceptance_oracle import judge, penalised, softmax, warped_probs
from tests.reference.host_rounds import Drafts, accept_rows, draft, verify_logits

VOCAB = 12


def _chain(*tokens: int) -> DraftTree:
    return DraftTree(
        np.array(tokens, dtype=np.int32),
        np.arange(-1, len(tokens) - 1, dtype=np.int32),
        np.zeros(len(tokens), dtype=np.float32),
    )


def _peaks(*best: int) -> Tensor:
    """Logits whose row i is largest at best[i]."""
    logits = torch.zeros(len(best), VOCAB)
    logits[range(len(best)), best] = 3.0
    return logits


PLAIN = AcceptRow(logits_start=0, sampling=SamplingParams(), position=5)


def _judged(logits: Tensor, tree: DraftTree | None, row: AcceptRow = PLAIN) -> AcceptanceResult:
    return accept_drafts(logits, [replace(row, tree=tree)])[0]


def test_a_perfect_match_earns_the_bonus_token() -> None:
    result = _judged(_peaks(4, 7, 2), _chain(4, 7))
    assert result == AcceptanceResult(
        accepted_nodes=(0, 1),
        tokens=(4, 7, 2),
        resampled=False,
        used_target_only_fallback=False,
    )


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("node", [0, 1, 2])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("edited", [False, True])
def test_a_row_without_a_finite_logit_ends_its_own_walk(
    rule: Rule, node: int, value: float, edited: bool
) -> None:
    """Biases, bans and penalties would leave a finite column in such a row and hide it."""
    sampling = SamplingParams(
        temperature=0.05,
        rule=rule,
        repetition_penalty=1.1 if edited else 1.0,
        banned_ids=(0,) if edited else (),
        logit_bias=((3, 1.0),) if edited else (),
    )
    logits = torch.cat((_peaks(4, 7, 2), _peaks(4, 7, 2))) * 5
    rows = [
        replace(PLAIN, tree=_chain(4, 7), sampling=sampling),
        replace(PLAIN, tree=_chain(4, 7), sampling=sampling, logits_start=3),
    ]
    healthy = accept_drafts(logits, rows)
    assert [h.tokens for h in healthy] == [(4, 7, 2)] * 2
    logits[node] = value
    found = accept_drafts(logits, rows)
    assert found[1] == healthy[1]
    assert found[0].invalid_output and not healthy[0].invalid_output
    assert found[0].tokens == (*(4, 7)[:node], 0)
    assert found[0].accepted_nodes == (0, 1)[:node]


@pytest.mark.parametrize("rule", list(Rule))
def test_a_row_with_some_nan_is_judged_by_what_is_left(rule: Rule) -> None:
    sampling = SamplingParams(temperature=0.05, rule=rule)
    logits = _peaks(4, 7, 2) * 5
    wanted = _judged(logits, _chain(4, 7), replace(PLAIN, sampling=sampling))
    logits[:, 5:7], logits[1, 9] = torch.nan, -torch.inf
    assert _judged(logits, _chain(4, 7), replace(PLAIN, sampling=sampling)) == wanted


def test_an_early_mismatch_emits_the_targets_token_and_stops() -> None:
    result = _judged(_peaks(4, 8, 2), _chain(4, 7))
    assert (result.accepted_nodes, result.tokens, result.resampled) == ((0,), (4, 8), True)


def test_no_draft_is_plain_decoding() -> None:
    for tree in (None, _chain()):
        result = _judged(_peaks(4), tree)
        assert (result.accepted_nodes, result.tokens, result.resampled) == ((), (4,), False)


def test_a_tree_walk_follows_the_matching_branch() -> None:
    tree = DraftTree(
        np.array([3, 4, 5, 6, 7, 8], dtype=np.int32),
        np.array([-1, -1, 0, 1, 1, 4], dtype=np.int32),
        np.zeros(6, dtype=np.float32),
    )
    result = _judged(_peaks(4, 0, 7, 0, 0, 8, 9), tree)
    assert (result.accepted_nodes, result.tokens) == ((1, 4, 5), (4, 7, 8, 9))
    assert not result.resampled


def test_ragged_rows_find_their_own_logits() -> None:
    logits = torch.cat([_peaks(1, 2, 3), _peaks(4), _peaks(5, 6)])
    base = AcceptRow(logits_start=0, sampling=SamplingParams(), position=9)
    rows = [
        replace(base, logits_start=4, tree=_chain(5)),
        replace(base, logits_start=0, tree=_chain(1, 9)),
        replace(base, logits_start=3),
    ]
    assert [r.tokens for r in accept_drafts(logits, rows)] == [(5, 6), (1, 2), (4,)]


def test_only_visited_nodes_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(logits_RV: Tensor) -> Tensor:
        seen.append(len(logits_RV))
        return plain_argmax(logits_RV)

    monkeypatch.setattr("outrider.engine.acceptance.plain_argmax", counted)
    _judged(_peaks(4, 8, 2, 2, 2, 2), _chain(4, 7, 1, 1, 1))
    assert seen == [1, 1]


def test_penalties_at_a_node_count_the_accepted_drafts() -> None:
    """Token 4 wins everywhere on raw logits; its in-process draft costs it the next place."""
    logits = _peaks(4, 4, 4)
    logits[:, 5] = 2.0
    params = SamplingParams(presence_penalty=1.5)
    result = _judged(logits, _chain(4, 5), replace(PLAIN, sampling=params))
    assert result.tokens == (4, 5, 4)
    late = _judged(
        logits, None, replace(PLAIN, sampling=params, output_ids=np.array([4], np.int32))
    )
    assert late.tokens == (5,)


def test_ids_banned_in_this_round_are_not_emitted() -> None:
    assert _judged(_peaks(4, 7), _chain(4), replace(PLAIN, banned_now=(4, 7))).tokens == (0,)


def test_temperature_zero_is_greedy_whatever_the_rule() -> None:
    for rule in Rule:
        params = SamplingParams(temperature=0.0, rule=rule, seed=5)
        row = replace(PLAIN, sampling=params)
        assert _judged(_peaks(4, 7), _chain(4), row).tokens == (4, 7)


def test_the_rejection_rule_without_a_law_says_that_it_fell_back() -> None:
    params = SamplingParams(temperature=1.0, rule=Rule.REJECTION)
    base = AcceptRow(logits_start=0, tree=_chain(4), sampling=params, position=1)
    distribution = make_distribution(1, {0: (np.array([4], np.int32), np.array([9], np.uint16))})
    without, has_distribution, undrafted = accept_drafts(
        _peaks(4, 7), [base, replace(base, distribution=distribution), replace(base, tree=None)]
    )
    assert without.used_target_only_fallback
    assert not has_distribution.used_target_only_fallback
    assert not undrafted.used_target_only_fallback


def test_siblings_have_different_coins_under_rejection() -> None:
    """With one random draw for all, a rejected first child would drag its equals down with it."""
    tree = DraftTree(
        np.array([1, 2], np.int32), np.array([-1, -1], np.int32), np.zeros(2, np.float32)
    )
    distribution = make_distribution(
        2, {0: (np.array([1, 2], np.int32), np.array([60000, 60000], np.uint16))}
    )
    logits = torch.full((3, VOCAB), -30.0)
    logits[:, 1:4] = torch.tensor([0.0, 1.2, 0.0])
    rows = [
        AcceptRow(
            logits_start=0,
            tree=tree,
            distribution=distribution,
            sampling=SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=seed),
            position=3,
        )
        for seed in range(400)
    ]
    first = {result.accepted_nodes for result in accept_drafts(logits, rows)}
    assert first == {(0,), (1,), ()}


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[SamplingParams, list[int], int, int]:
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        rule=draw(st.sampled_from(list(Rule))),
        top_k=draw(st.sampled_from([0, 6])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6])),
        banned_ids=draw(st.sampled_from([(), (2, 5)])),
        seed=draw(st.integers(0, 2**64 - 1)),
    )
    widths = draw(st.lists(st.integers(1, 3), max_size=3))
    return params, widths, draw(st.integers(0, 2**20)), draw(st.integers(0, 2**16))


class _RandomModel:
    """Logits are a fixed random function of the context."""

    def __init__(self, seed: int, blur: float) -> None:
        self._seed, self._blur = seed, blur

    def __call__(self, context: NDArray[np.int64]) -> Tensor:
        rows = []
        for row in context:
            generator = torch.Generator().manual_seed(hash((self._seed, *row.tolist())) % 2**31)
            sharp = torch.randn(VOCAB, generator=generator) * 1.5
            rows.append(sharp + self._blur * torch.randn(VOCAB, generator=generator))
        return torch.stack(rows)


ONE_TOKEN_LAW = (
    SamplingParams(temperature=0.5, rule=Rule.REJECTION, top_p=0.9, banned_ids=(2, 5), seed=23),
    [1, 1, 2],
    368478,
    14044,
)
"""A draft distribution of one token, where the widths ask for two children."""


@settings(max_examples=250)
@given(scenarios())
@example(ONE_TOKEN_LAW)
def test_outcomes_equal_those_of_the_slow_oracle(
    scenario: tuple[SamplingParams, list[int], int, int],
) -> None:
    params, widths, position, seed = scenario
    drafts = draft(_RandomModel(seed, 0.5), [params], [position], widths)
    logits = verify_logits(_RandomModel(seed, 0.0), drafts)
    (row,) = accept_rows(drafts, [params], [position], stride=0)
    (result,) = accept_drafts(logits, [row])
    nodes, tokens = judge(
        row.tree or _chain(),
        row.distribution,
        params,
        position,
        lambda node: _probs(logits[node + 1], params, drafts, node),
    )
    assert (result.accepted_nodes, result.tokens) == (nodes, tokens)
    below = children(drafts.parents)[1 + (nodes[-1] if nodes else -1)]
    assert result.resampled is bool(below)


def _probs(
    logits: Tensor, params: SamplingParams, drafts: Drafts, node: int
) -> NDArray[np.float64]:
    values = logits.numpy().astype(np.float64)
    output = [int(drafts.tokens[0, n]) for n in path(drafts.parents, node)]
    if params.effective_rule is Rule.GREEDY:
        return softmax(penalised(values, params, output=output))
    return warped_probs(values, params, output=output)


@settings(max_examples=60)
@given(scenarios())
@example(ONE_TOKEN_LAW)
def test_what_is_drafted_is_valid(scenario: tuple[SamplingParams, list[int], int, int]) -> None:
    params, widths, position, seed = scenario
    drafts = draft(_RandomModel(seed, 0.5), [params], [position], widths)
    validate_tree(drafts.tree(0), vocab_size=VOCAB, max_nodes=40)
    distribution = drafts.law(0)
    assert (distribution is not None) is (params.effective_rule is Rule.REJECTION and bool(widths))
    if distribution is not None:
        validate_distribution(distribution, drafts.tree(0), VOCAB)


def test_a_token_outside_its_law_never_stands_and_recovery_is_plain() -> None:
    """Only a peer that lies can do this; the output stays the target's."""
    distribution: DraftDistribution = make_distribution(
        1, {0: (np.array([1], np.int32), np.array([5], np.uint16))}
    )
    for seed in range(40):
        params = SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=seed)
        row = AcceptRow(
            logits_start=0, tree=_chain(4), distribution=distribution, sampling=params, position=2
        )
        drafted, plain = accept_drafts(_peaks(4, 7), [row, replace(row, tree=None)])
        assert drafted.accepted_nodes == ()
        assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("rule", Rule)
def test_children_that_are_not_ids_are_passed_over(rule: Rule) -> None:
    """An empty place and an id past the vocabulary: as if only the two others were there."""
    logits = torch.zeros(5, VOCAB)
    logits[:, [3, 5, VOCAB - 1]] = 2.0
    entries = (np.array([3, 5, 8], np.int32), np.array([9, 3, 4], np.uint16))
    rows = [
        AcceptRow(
            logits_start=0,
            tree=DraftTree(
                np.array(tokens, np.int32),
                np.full(len(tokens), -1, np.int32),
                np.zeros(len(tokens), np.float32),
            ),
            distribution=make_distribution(len(tokens), {0: entries}),
            sampling=SamplingParams(temperature=1.0, rule=rule, seed=seed),
            position=9,
        )
        for tokens in ((-1, VOCAB, 3, 5), (3, 5))
        for seed in range(60)
    ]
    results = accept_drafts(logits, rows)
    for padded, plain in zip(results[:60], results[60:], strict=True):
        assert padded.accepted_nodes == tuple(node + 2 for node in plain.accepted_nodes)
        assert (padded.tokens, padded.resampled) == (plain.tokens, plain.resampled)


def test_coupled_drafts_from_the_targets_own_logits_always_stand() -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(2)) * 2
    for seed in range(20):
        params = SamplingParams(temperature=1.3, seed=seed, top_p=0.95)
        tokens = [
            int(propose_children(logits[d : d + 1], None, [params], [40 + d], 1).tokens)
            for d in range(4)
        ]
        row = AcceptRow(logits_start=0, tree=_chain(*tokens), sampling=params, position=40)
        assert accept_drafts(logits, [row])[0].accepted_nodes == (0, 1, 2, 3)
