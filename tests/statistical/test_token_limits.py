"""Allowed ids and bad words restrict the target's distribution and change nothing else, whatever is
drafted.

The target is a first-order model over V ids. Joint distribution of the two tokens behind an output
that ends in ROOT_ID; drafts are not masked, so that many of them are not allowed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import accept_drafts
from outrider.grammar.draft_masks import ConstrainedTree, masks_of_trees
from outrider.grammar.token_constraint import TokenConstraint
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.token_limits import TokenLimits
from tests.reference.goodness_of_fit import LEAST_P, least_bias, p_value
from tests.reference.host_rounds import Logits, accept_rows, draft, seeded, verify_logits

TRIALS, V, POSITION, ROOT_ID = 4_000, 7, 23, 3
TARGET = torch.randn(V, V, generator=torch.Generator().manual_seed(2))
DRAFT = 0.8 * TARGET + 0.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(3))
LIMITS = TokenLimits(
    allowed_ids=(0, 1, 2, 4, 6), bad_words=((ROOT_ID, 1), (0, 4), (ROOT_ID, 2, 6), (2, 2))
)
LEAST_BIAS = 0.3
"""What is seen of the likeliest text's probability."""


def _by_newest(table: Tensor) -> Logits:
    def logits(context: NDArray[np.int64]) -> Tensor:
        newest = context[:, -1] if context.shape[1] else np.full(len(context), ROOT_ID)
        return table[torch.from_numpy(newest)]

    return logits


def _law(*before: int) -> NDArray[np.float64]:
    """The target's distribution [V] behind the root and these ids, by the definition of the
    limits."""
    said = (ROOT_ID, *before)
    distribution = TARGET[said[-1]].double().softmax(dim=-1).numpy().copy()
    for id_ in range(V):
        then = (*said, id_)
        bad = any(then[-len(word) :] == word for word in LIMITS.bad_words)
        if bad or id_ not in LIMITS.allowed_ids:
            distribution[id_] = 0.0
    return np.asarray(distribution / distribution.sum())


def _joint() -> NDArray[np.float64]:
    """[V * V], the first token most significant."""
    return np.concatenate([_law()[first] * _law(first) for first in range(V)])


def _emitted(rule: Rule, widths: list[int]) -> NDArray[np.int64]:
    """Counts [V * V]; where a round emitted one token only, numpy draws the other."""
    params = seeded(SamplingParams(temperature=1.0, rule=rule), TRIALS)
    positions = [POSITION] * TRIALS
    drafts = draft(_by_newest(DRAFT), params, positions, widths)
    constraint = TokenConstraint(LIMITS, vocab_size=V)
    constraint.advance_to(np.array([5, ROOT_ID], dtype=np.int32))
    trees = [ConstrainedTree(constraint, tokens, drafts.parents) for tokens in drafts.tokens]
    rows = accept_rows(drafts, params, positions, stride=1 + len(drafts.parents))
    rows = [
        replace(row, allowed_tokens=masks_of_trees([tree])[0])
        for row, tree in zip(rows, trees, strict=True)
    ]
    rng = np.random.default_rng(4)
    counts = np.zeros(V * V, dtype=np.int64)
    for result in accept_drafts(verify_logits(_by_newest(TARGET), drafts), rows):
        first, *more = result.tokens
        second = more[0] if more else int(rng.choice(V, p=_law(first)))
        counts[first * V + second] += 1
    return counts


@pytest.mark.parametrize("widths", [[1, 1], [3, 2]], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.REJECTION, Rule.TARGET_ONLY])
def test_texts_follow_the_targets_law_over_what_is_allowed(rule: Rule, widths: list[int]) -> None:
    expected = _joint()
    assert p_value(_emitted(rule, widths), expected) > LEAST_P
    assert least_bias(expected, TRIALS) < LEAST_BIAS
