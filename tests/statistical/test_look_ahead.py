"""Drafts for outcomes that had not happened, judged when they did: the target's distribution is
kept.

Whole texts through a real drafter engine and the real acceptance. V ids, LENGTH tokens a text.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from tests.fakes.rounds_by_digest import Rounds, Row, ahead, fresh, markov, table_engine
from tests.grids import thorough
from tests.reference.goodness_of_fit import LEAST_P, p_value

V, LENGTH, TRIALS = 4, 3, 1500
TARGET, DRAFT = markov(1, V), markov(2, V)
CHAIN = SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=2, look_ahead=1, fan_out=4)
TREE = SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=5, top_k=3, look_ahead=1, fan_out=6)
EXTRA = 4
"""Tokens beyond those that are judged: a session's end bounds its drafts."""


def _texts(rule: Rule, plan: SpeculationPlan) -> tuple[NDArray[np.int64], Rounds, float]:
    """Texts [TRIALS, LENGTH], what made them, and the share of the rounds that found a branch."""
    rows = [
        Row(
            handle=i,
            sampling=SamplingParams(temperature=0.9, rule=rule, seed=7000 + i),
            tokens=[0],
            max_len=1 + LENGTH + EXTRA,
            prompt_len=1,
        )
        for i in range(TRIALS)
    ]
    rounds, engine = Rounds(TARGET, rows), table_engine(DRAFT, max_sessions=TRIALS)
    rounds.announce(engine, plan)
    for proposals in fresh(engine):
        rounds.receive(proposals)
    hits = verified = 0
    short = rows
    while short:
        for proposals in ahead(engine):
            rounds.receive(proposals)
        rounds.round(short)
        rounds.tell(engine, short)
        short = [row for row in short if len(row.tokens) < 1 + LENGTH]
        verified += len(short)
        hits += sum(row.digest in row.inbox for row in short)
        # What missed decodes plainly: the drafts for its prefix come too late, all of them.
        fresh(engine)
        engine.update_metrics()
    return np.array([row.tokens[1 : 1 + LENGTH] for row in rows]), rounds, hits / verified


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        # A chain is a tree whose nodes have one child each.
        thorough(Rule.REJECTION, CHAIN),
        (Rule.REJECTION, TREE),
        (Rule.TARGET_ONLY, CHAIN),
        (Rule.COUPLED, TREE),
    ],
)
def test_texts_made_of_branches_follow_the_targets_law(rule: Rule, plan: SpeculationPlan) -> None:
    texts, rounds, hit_rate = _texts(rule, plan)
    assert hit_rate > 0.2 and rounds.accepted > TRIALS / 5
    counts = np.bincount(texts @ V ** np.arange(LENGTH)[::-1], minlength=V**LENGTH)
    probs = (TARGET.double() / 0.9).softmax(-1).numpy()
    distribution = [
        np.prod([probs[a, b] for a, b in zip((0, *text), text, strict=False)])
        for text in product(range(V), repeat=LENGTH)
    ]
    assert p_value(counts, distribution) > LEAST_P
