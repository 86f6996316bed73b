"""Joint distributions of several tokens, 200,000 trials each, judged by p-values.

Sessions differ by their noise only. The target is a first-order model, so a walk that reads a wrong
row, a random draw that is used twice or a residual that is a little off shows up in the joint
counts. T trials, V ids, K draft length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.kernels.acceptance.randomized import DenseChainDistribution, accept_sampled
from outrider.engine.kernels.drafts.in_process_distributions import draft_probs
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.session_tensors import NUM_STREAMS, RULE_NUMBERS, SamplingState
from outrider.engine.logits_processor import MAX_LOGIT
from outrider.spec.sampling import Rule
from tests.reference.goodness_of_fit import LEAST_P, p_value

TRIALS, V, K = 200_000, 5, 2
POSITION = 31
TARGET = torch.randn(V, V, generator=torch.Generator().manual_seed(5))
DRAFT = 0.7 * TARGET + 0.8 * torch.randn(V, V, generator=torch.Generator().manual_seed(6))
"""Logits by the newest id; the root is id 0."""

Proposer = Callable[[SamplingState, Tensor], tuple[Tensor, Tensor]]
"""(state, slots) -> tokens int32 [T, K], distributions float32 [T, K, V]."""


def _state(rule: Rule, *, seed: int = 1) -> SamplingState:
    """T slots with random keys, and the padding slot."""
    generator = torch.Generator().manual_seed(seed)
    return SamplingState(
        stream_keys=torch.randint(
            -(2**63), 2**63 - 1, (TRIALS + 1, NUM_STREAMS), generator=generator
        ),
        temperatures=torch.ones(TRIALS + 1),
        rules=torch.full((TRIALS + 1,), RULE_NUMBERS[rule], dtype=torch.int32),
    )


def _drafted(state: SamplingState, slots: Tensor, table: Tensor = DRAFT) -> tuple[Tensor, Tensor]:
    """An honest chain: each token is drawn from the distribution that is claimed for it."""
    newest, tokens, distributions = torch.zeros(TRIALS, dtype=torch.int64), [], []
    for step in range(K):
        logits = table[newest]
        positions = torch.full((TRIALS,), POSITION + step, dtype=torch.int32)
        drawn = choose_tokens(logits, state, slots, positions, rows_per_slot=1, side="draft")
        distributions.append(draft_probs(logits, state, slots))
        tokens.append(drawn)
        newest = drawn.long()
    return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1)


def _texts(rule: Rule, propose: Proposer) -> NDArray[np.int64]:
    """[T, K + 1] tokens; what a round did not emit is drawn by numpy from the target's
    distribution."""
    state, slots = _state(rule), torch.arange(TRIALS, dtype=torch.int32)
    drafts, distributions = propose(state, slots)
    roots = torch.zeros(TRIALS, 1, dtype=torch.int32)
    tokens = torch.cat((roots, drafts), dim=1)
    logits = TARGET[tokens.clamp(min=0).long()].view(-1, V)
    positions = (POSITION + torch.arange(K + 1, dtype=torch.int32)).repeat(TRIALS)
    chosen = choose_tokens(logits, state, slots, positions, rows_per_slot=K + 1, side="target")
    identity = torch.arange(V, dtype=torch.int32)
    distribution = DenseChainDistribution(
        torch.cat((distributions, distributions[:1])), identity, identity
    )
    result = accept_sampled(
        logits,
        chosen,
        tokens.flatten(),
        None,
        num_nodes=K + 1,
        state=state,
        slots=slots,
        positions=positions,
        distribution=distribution if rule is Rule.REJECTION else None,
    )
    return _completed(result.tokens.numpy().astype(np.int64))


def _completed(texts: NDArray[np.int64]) -> NDArray[np.int64]:
    cumulated = TARGET.double().softmax(dim=-1).cumsum(dim=-1).numpy()
    rng = np.random.default_rng(7)
    for place in range(1, K + 1):
        missing = texts[:, place] < 0
        above = cumulated[texts[missing, place - 1]]
        texts[missing, place] = (rng.random((int(missing.sum()), 1)) > above).sum(axis=1)
    return texts


def _joint(table: Tensor = TARGET) -> NDArray[np.float64]:
    """Probability of each text, first token most significant."""
    distributions = table.double().softmax(dim=-1).numpy()
    joint = distributions[0][:, None, None] * distributions[:, :, None] * distributions[None, :, :]
    return np.asarray(joint.ravel())


def _p(texts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    codes = texts @ (V ** np.arange(K, -1, -1))
    return p_value(np.bincount(codes, minlength=V ** (K + 1)), expected)


RULES = [Rule.COUPLED, Rule.TARGET_ONLY, Rule.REJECTION]


@pytest.mark.parametrize("rule", RULES)
def test_texts_of_a_chain_follow_the_joint_law(rule: Rule) -> None:
    assert _p(_texts(rule, _drafted), _joint()) > LEAST_P


def test_a_bias_of_three_percent_would_be_noticed() -> None:
    """The power of the test above: one token of one distribution is 3 % less probable than it
    should be."""
    texts, biased = _texts(Rule.REJECTION, _drafted), TARGET.clone()
    biased[0, int(TARGET[0].argmax())] += np.log(0.97)
    assert _p(texts, _joint(biased)) < LEAST_P


def _with(column: int, value: float, *others: tuple[int, float]) -> Tensor:
    """The draft's table with odd logits in every row."""
    table = DRAFT.clone()
    for at, logit in ((column, value), *others):
        table[:, at] = logit
    return table


NOT_FINITE = {
    "nan": _with(1, torch.nan),
    "inf": _with(1, torch.inf),
    "two infs": _with(1, torch.inf, (3, torch.inf)),
    "huge": _with(1, MAX_LOGIT, (3, 2 * MAX_LOGIT)),
    "nan and inf": _with(0, torch.nan, (2, torch.inf)),
    "minus inf": _with(4, -torch.inf),
    "nothing": torch.full((V, V), torch.nan),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_draft_logits_that_are_not_finite_leave_no_trace(name: str) -> None:
    propose = partial(_drafted, table=NOT_FINITE[name])
    assert _p(_texts(Rule.REJECTION, propose), _joint()) > LEAST_P


def _claims(state: SamplingState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """A liar: always token 1, which it claims to have drawn with a probability of 1 in 65,536."""
    tokens = torch.ones(TRIALS, K, dtype=torch.int32)
    distributions = torch.full((TRIALS, K, V), (1.0 - 2.0**-16) / (V - 1))
    distributions[:, :, 1] = 2.0**-16
    return tokens, distributions


def _selective(state: SamplingState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """A drafter that keeps what it has drawn to itself unless it begins with token 1."""
    tokens, distributions = _drafted(state, slots)
    withheld = tokens[:, 0] != 1
    return tokens.masked_fill(withheld[:, None], -1), distributions


@pytest.mark.parametrize("propose", [_claims, _selective])
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.TARGET_ONLY])
def test_without_a_law_a_drafter_can_only_cost_time(rule: Rule, propose: Proposer) -> None:
    assert _p(_texts(rule, propose), _joint()) > LEAST_P


@pytest.mark.parametrize("propose", [_claims, _selective])
def test_the_rejection_rule_trusts_its_drafter(propose: Proposer) -> None:
    """As decision 13 says: a lie about the distribution, or about what was drawn, moves the text's
    distribution."""
    texts, distribution = _texts(Rule.REJECTION, propose), TARGET[0].double().softmax(dim=-1)
    assert p_value(np.bincount(texts[:, 0], minlength=V), distribution.numpy()) < LEAST_P


def test_a_lying_law_can_only_promote_what_the_target_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token of probability 0 stays one, whatever distribution is claimed."""
    without = TARGET.clone()
    without[:, 1] = -torch.inf
    monkeypatch.setattr("tests.statistical.test_joint_distributions.TARGET", without)
    assert (_texts(Rule.REJECTION, _claims) != 1).all()
