"""Drafts of this process judged by the real acceptance: the text keeps the target's distribution.

A toy target and a different toy draft model, both Markov over a few ids; the trees come from the
production growth and child sampling, the verdicts from `outrider.engine.acceptance`. V ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from outrider_drafter.proposers.interface import ProposedDraft
from outrider_drafter.proposers.tree_growth import (
    GrowthJob,
    StepFrontier,
    grow_trees,
    make_growth,
)
from torch import Tensor

from outrider.engine.acceptance import AcceptRow, accept_drafts
from outrider.engine.logits_processor import TokenHistory
from outrider.spec.draft_distribution import validate_distribution
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import validate_tree
from tests.reference.goodness_of_fit import LEAST_P, p_value

V = 5
LENGTH = 3
TRIALS = 1500


def markov(seed: int) -> Tensor:
    """Logits [V, V] of the next id by the last one."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 1.5


TARGET, DRAFT = markov(1), markov(2)


class TableModel:
    """A draft model that is a table; a `TreeDraftModel`."""

    target_ids: Tensor | None = None

    def __init__(self, roots: Sequence[int], table: Tensor = DRAFT) -> None:
        self._roots = torch.tensor(roots)
        self._table = table

    def root_logits(self) -> Tensor:
        return self._table[self._roots]

    def step(self, frontiers: Sequence[tuple[int, StepFrontier]]) -> Tensor:
        return self._table[torch.tensor([t for _, frontier in frontiers for t in frontier.tokens])]


def draft_all(
    prefixes: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], plan: SpeculationPlan
) -> dict[int, ProposedDraft]:
    jobs = []
    for slot, (prefix, sampling) in enumerate(zip(prefixes, samplings, strict=True)):
        has_distribution = sampling.effective_rule is Rule.REJECTION
        growth = make_growth(plan, room=9, has_distribution=has_distribution)
        assert growth is not None
        jobs.append(
            GrowthJob(
                slot=slot, growth=growth, sampling=sampling, prefix_len=len(prefix), history=None
            )
        )
    return dict(grow_trees(TableModel([prefix[-1] for prefix in prefixes]), jobs))


def one_round(
    prefixes: list[list[int]], samplings: Sequence[SamplingParams], plan: SpeculationPlan
) -> int:
    """Draft, judge, and extend every prefix; the number of accepted draft tokens."""
    drafts = draft_all(prefixes, samplings, plan)
    logits: list[Tensor] = []
    rows: list[AcceptRow] = []
    start = 0
    for slot, (prefix, sampling) in enumerate(zip(prefixes, samplings, strict=True)):
        draft = drafts[slot]
        validate_tree(draft.tree, vocab_size=V, max_nodes=plan.draft_tokens)
        if draft.distribution is not None:
            validate_distribution(draft.distribution, draft.tree, V)
        logits.append(TARGET[torch.tensor([prefix[-1], *draft.tree.tokens.tolist()])])
        rows.append(
            AcceptRow(
                logits_start=start,
                tree=draft.tree,
                distribution=draft.distribution,
                sampling=sampling,
                position=len(prefix),
            )
        )
        start += 1 + len(draft.tree)
    accepted = 0
    for prefix, outcome in zip(prefixes, accept_drafts(torch.cat(logits), rows), strict=True):
        assert not outcome.used_target_only_fallback
        prefix.extend(outcome.tokens)
        accepted += len(outcome.accepted_nodes)
    return accepted


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.COUPLED, Rule.TARGET_ONLY])
@pytest.mark.parametrize("top_k", [1, 3])
def test_several_rounds_follow_the_targets_law(rule: Rule, top_k: int) -> None:
    plan = SpeculationPlan(
        method=DraftMethod.MODEL, draft_tokens=2 if top_k == 1 else 7, top_k=top_k
    )
    samplings = [SamplingParams(temperature=0.9, rule=rule, seed=s) for s in range(TRIALS)]
    prefixes = [[0] for _ in range(TRIALS)]
    short = list(range(TRIALS))
    accepted = 0
    while short:
        open_prefixes = [prefixes[i] for i in short]
        accepted += one_round(open_prefixes, [samplings[i] for i in short], plan)
        short = [i for i in short if len(prefixes[i]) <= LENGTH]
    assert accepted > TRIALS / 5
    counts = np.zeros((V,) * LENGTH)
    for prefix in prefixes:
        counts[tuple(prefix[1 : LENGTH + 1])] += 1
    probs = (TARGET.double() / 0.9).softmax(-1).numpy()
    distribution = np.zeros((V,) * LENGTH)
    for path in product(range(V), repeat=LENGTH):
        distribution[path] = np.prod([probs[a, b] for a, b in zip((0, *path), path, strict=False)])
    # A shape that depends on the drawn tokens is 15 sigmas off, this is 5.
    assert p_value(counts, distribution) > LEAST_P


def test_at_temperature_zero_the_text_is_the_targets_greedy_text() -> None:
    expected = [3]
    for _ in range(12):
        expected.append(int(TARGET[expected[-1]].argmax()))
    for top_k in (1, 3):
        plan = SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=7, top_k=top_k)
        prefix = [3]
        while len(prefix) < len(expected):
            one_round([prefix], [SamplingParams()], plan)
        assert prefix[: len(expected)] == expected


def test_coupled_text_is_the_same_with_any_tree() -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    texts = set()
    for nodes, top_k in ((0, 1), (1, 1), (4, 1), (7, 3), (20, 4)):
        prefix = [1]
        while len(prefix) < 30:
            if nodes:
                one_round(
                    [prefix],
                    [sampling],
                    SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=nodes, top_k=top_k),
                )
            else:
                row = AcceptRow(logits_start=0, sampling=sampling, position=len(prefix))
                prefix.extend(accept_drafts(TARGET[prefix[-1:]], [row])[0].tokens)
        texts.add(tuple(prefix[:30]))
    assert len(texts) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(presence_penalty=2.0, frequency_penalty=1.0),
        SamplingParams(temperature=0.8, seed=6, repetition_penalty=1.8),
        SamplingParams(temperature=1.0, seed=7, top_k=3, banned_ids=(2,)),
    ],
)
def test_every_guess_of_a_perfect_draft_model_stands(sampling: SamplingParams) -> None:
    """Positions of the noise and histories of the penalties must be those of the verifier."""
    tokens = [0, 4, 1]
    for _ in range(6):
        plan = SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=6)
        growth = make_growth(plan, room=9, has_distribution=False)
        assert growth is not None
        prompt, output = np.array(tokens[:2], np.int32), np.array(tokens[2:], np.int32)
        history = TokenHistory(prompt_ids=prompt, output_ids=output)
        job = GrowthJob(
            slot=0, growth=growth, sampling=sampling, prefix_len=len(tokens), history=history
        )
        ((_, draft),) = grow_trees(TableModel(tokens[-1:], TARGET), [job])
        row = AcceptRow(
            logits_start=0,
            tree=draft.tree,
            sampling=sampling,
            position=len(tokens),
            prompt_ids=prompt,
            output_ids=output,
        )
        logits = TARGET[torch.tensor([tokens[-1], *draft.tree.tokens.tolist()])]
        (outcome,) = accept_drafts(logits, [row])
        assert len(outcome.accepted_nodes) == 6
        tokens.extend(outcome.tokens)
