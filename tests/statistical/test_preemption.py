"""Texts of preempted sessions under the rejection rule: the target's distribution, whatever was
drafted."""

from __future__ import annotations

import itertools

import numpy as np
from outrider_verifier.state.preemption_mode import PreemptionMode

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree
from tests.fakes.scripted_drafter import Followed, ProposeFn, make_tree
from tests.fakes.target import FakeTarget
from tests.reference.acceptance_oracle import softmax
from tests.reference.goodness_of_fit import LEAST_P, p_value
from tests.unit.verifier.forced_preemption import preempt_often, preemptions
from tests.unit.verifier.harness import make_spec, verifier

VOCAB, LENGTH, SESSIONS = 3, 3, 900
PROMPT = (1, 0, 2)
PLAN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=2, proposal_timeout_ms=2000)


def blind_chain(seed: int) -> ProposeFn:
    """Two tokens, whatever came before; without a distribution, so that they count as one-hot
    ones."""
    rng = np.random.default_rng(seed)

    def propose(_followed: Followed) -> DraftTree:
        return make_tree(rng.integers(0, VOCAB, 2).tolist())

    return propose


async def test_texts_follow_the_targets_law() -> None:
    target = FakeTarget(vocab_size=VOCAB, num_blocks=256, peak=1.0)
    cells = list(itertools.product(range(VOCAB), repeat=LENGTH))
    distribution = np.array([_probability(target, text) for text in cells])
    observed = np.zeros(len(cells), dtype=np.int64)
    async with verifier(
        target=target, preemption=PreemptionMode.RECOMPUTE.value, max_sessions=16
    ) as rig:
        preempt_often(rig.service, every=2)
        await rig.attach(blind_chain(7))
        for first in range(0, SESSIONS, 60):
            specs = [
                make_spec(
                    f"s{i}",
                    prompt=PROMPT,
                    max_new_tokens=LENGTH,
                    plan=PLAN,
                    sampling=SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=i),
                )
                for i in range(first, first + 60)
            ]
            for result in await rig.run_all(specs):
                observed[cells.index(tuple(result.tokens))] += 1
        assert preemptions(rig.service) > SESSIONS // 20
        assert rig.service.core.counters["accepted_tokens"] > 0
    assert p_value(observed, distribution) > LEAST_P


def _probability(target: FakeTarget, text: tuple[int, ...]) -> float:
    """Of a text after the prompt, by the target's conditional distributions."""
    found = 1.0
    for end in range(len(text)):
        logits = target.logits((*PROMPT, *text[:end])).astype(np.float64)
        found *= float(softmax(logits)[text[end]])
    return found
