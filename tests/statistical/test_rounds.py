"""Several rounds in a row: whole texts follow the product of the target's conditional
distributions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import accept_drafts
from outrider.spec.sampling import Rule, SamplingParams
from tests.grids import thorough
from tests.reference.acceptance_oracle import softmax
from tests.reference.goodness_of_fit import LEAST_P, p_value
from tests.reference.host_rounds import accept_rows, draft, seeded, verify_logits

SEQUENCES = 6_144
LENGTH = 6
TARGET = torch.tensor([[0.4, -0.5], [-0.9, 0.7]])
DRAFT = torch.tensor([[-0.8, 0.6], [0.3, -0.2]])
"""Logits of the next token by the newest one, V = 2."""


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """A first-order model: logits depend on the newest token only."""

    logits_VV: Tensor
    newest: NDArray[np.int64]
    """Each row's root."""

    def __call__(self, context: NDArray[np.int64]) -> Tensor:
        last = context[:, -1] if context.shape[1] else self.newest
        return self.logits_VV[torch.from_numpy(last)]


def _texts(
    base: SamplingParams, widths: list[int], sequences: int = SEQUENCES
) -> NDArray[np.int64]:
    """[sequences, LENGTH] tokens after a root of 0, in rounds of one tree each."""
    blocks = range(0, sequences, 2048)
    return np.concatenate([_block(seeded(base, 2048, first), widths) for first in blocks])


def _block(params: list[SamplingParams], widths: list[int]) -> NDArray[np.int64]:
    texts: list[list[int]] = [[] for _ in params]
    active = list(range(len(params)))
    while active:
        newest = np.array([texts[i][-1] if texts[i] else 0 for i in active])
        positions = [1 + len(texts[i]) for i in active]
        here = [params[i] for i in active]
        drafts = draft(_Table(DRAFT, newest), here, positions, widths)
        logits = verify_logits(_Table(TARGET, newest), drafts)
        rows = accept_rows(drafts, here, positions, stride=1 + len(drafts.parents))
        for i, result in zip(active, accept_drafts(logits, rows), strict=True):
            texts[i] += result.tokens
        active = [i for i in active if len(texts[i]) < LENGTH]
    return np.array([text[:LENGTH] for text in texts])


def _exact(target: Tensor = TARGET) -> NDArray[np.float64]:
    """Probability of each of the 2^LENGTH texts, first token most significant."""
    distributions = np.array([softmax(row) for row in target.numpy().astype(np.float64)])
    result = []
    for text in itertools.product((0, 1), repeat=LENGTH):
        previous = (0, *text[:-1])
        result.append(np.prod([distributions[a, b] for a, b in zip(previous, text, strict=True)]))
    return np.array(result)


@pytest.mark.parametrize(
    ("rule", "widths"),
    [
        # A chain is a tree whose first node is alone.
        thorough(Rule.COUPLED, [1, 1]),
        (Rule.COUPLED, [2, 1]),
        (Rule.REJECTION, [1, 1]),
        (Rule.REJECTION, [2, 1]),
        thorough(Rule.TARGET_ONLY, [1, 1]),
        (Rule.TARGET_ONLY, [2, 1]),
    ],
)
def test_texts_of_six_tokens_follow_the_joint_law(rule: Rule, widths: list[int]) -> None:
    base = SamplingParams(temperature=1.0, rule=rule)
    texts = _texts(base, widths)
    counts = np.bincount(texts @ (1 << np.arange(LENGTH)[::-1]), minlength=1 << LENGTH)
    assert p_value(counts, _exact()) > LEAST_P
    # The power of this: one of the four probabilities is off by a twelfth.
    biased = TARGET.clone()
    biased[1, 1] -= 0.5
    assert p_value(counts, _exact(biased)) < LEAST_P


def test_a_coupled_text_is_a_function_of_the_seed_alone() -> None:
    base = SamplingParams(temperature=1.0, rule=Rule.COUPLED)
    plain, chain, tree = (_texts(base, widths, 4096) for widths in ([], [1, 1], [2, 1]))
    assert (plain == chain).all()
    assert (plain == tree).all()
