"""A drafter that computes random draws from all that it is told cannot move the target's
distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.acceptance import AcceptRow, accept_drafts
from outrider.spec.draft_distribution import make_distribution
from outrider.spec.noise import SHARED_DRAW_ID, NoiseStream, stream_key, uniform
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree
from tests.reference.acceptance_oracle import softmax
from tests.reference.goodness_of_fit import LEAST_P, p_value

TRIALS = 2_500
POSITION = 12
WANTED, LIKELY, V = 0, 1, 6
LOGITS = np.log([0.08, 0.62, 0.1, 0.1, 0.06, 0.04])
RULES = [Rule.TARGET_ONLY, Rule.REJECTION]

Secret = Callable[[SamplingParams], int]
"""What a drafter takes for the seed, or for the key of the ACCEPT stream."""


def _coin(secret: int, token: int) -> float:
    return float(uniform(secret, NoiseStream.ACCEPT, POSITION, token))


def _proposal(params: SamplingParams, secret: int) -> tuple[DraftTree, int]:
    """The wanted token where its random draw looks good, else the likely one where that looks
    bad."""
    shared = params.effective_rule is Rule.TARGET_ONLY
    good = _coin(secret, SHARED_DRAW_ID if shared else WANTED) < 0.08
    token = WANTED if good else LIKELY
    tree = DraftTree(np.array([token], np.int32), np.array([-1], np.int32), np.zeros(1, np.float32))
    return tree, token


def _emitted(rule: Rule, secret: Secret) -> NDArray[np.int64]:
    """Counts of the first token over sessions that differ by seed; distributions are claimed as
    one-hot."""
    logits = torch.from_numpy(LOGITS).float()[None].repeat(2, 1)
    rows = []
    for seed in range(TRIALS):
        params = SamplingParams(temperature=1.0, rule=rule, seed=seed)
        tree, token = _proposal(params, secret(params))
        distribution = make_distribution(
            1, {0: (np.array([token], np.int32), np.array([65535], np.uint16))}
        )
        rows.append(
            AcceptRow(
                logits_start=0,
                tree=tree,
                distribution=distribution if rule is Rule.REJECTION else None,
                sampling=params,
                position=POSITION,
            )
        )
    return np.bincount([result.tokens[0] for result in accept_drafts(logits, rows)], minlength=V)


def _told_seed(params: SamplingParams) -> int:
    return params.for_drafter().seed


def _told_key(params: SamplingParams) -> int:
    return params.for_drafter().draft_key or 0


def _key_of_the_told(params: SamplingParams) -> int:
    return stream_key(_told_key(params), NoiseStream.ACCEPT)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("secret", [_told_seed, _told_key, _key_of_the_told])
def test_what_a_drafter_is_told_says_nothing_about_the_coins(rule: Rule, secret: Secret) -> None:
    assert p_value(_emitted(rule, secret), softmax(LOGITS)) > LEAST_P


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_with_the_seed_would_be_noticed(rule: Rule) -> None:
    """The power of the test above."""
    counts = _emitted(rule, lambda params: params.seed)
    assert p_value(counts, softmax(LOGITS)) < LEAST_P
    assert counts[WANTED] > 1.2 * 0.08 * TRIALS
