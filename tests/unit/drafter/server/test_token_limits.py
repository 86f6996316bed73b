"""Drafts of sessions with allowed ids and bad words follow these from the first draft on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.proposers.small_model import SmallModelProposer

from outrider.engine.model_loader import load_target
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.token_limits import TokenLimits
from outrider.spec.tree import path
from tests.unit.drafter.helpers import Script, answers
from tests.unit.drafter.state.test_session_grammars import PLANS, SAMPLINGS, VOCAB, engine_of

ALLOWED = tuple(range(30, 50))


@pytest.fixture(scope="module")
def small(tiny_target: Path) -> SmallModelProposer:
    return SmallModelProposer(load_target(tiny_target, kv_tokens=2048), vocab_size=VOCAB)


def script_of(*tokens: int) -> Script:
    script = Script("s")
    script.tokens = np.array(tokens, np.int32)
    return script


@pytest.mark.parametrize("plan", PLANS, ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_path_of_a_draft_has_what_is_forbidden(
    plan: SpeculationPlan, sampling: SamplingParams, small: SmallModelProposer
) -> None:
    script = script_of(3, 1, 4, 31, 32)
    start = script.start(plan=plan, sampling=sampling, prompt_len=3)
    limits = TokenLimits(allowed_ids=ALLOWED)
    for _ in range(2):
        engine = engine_of(small, None)
        script.told = script.features_told = 0
        engine.handle_message(1, replace(start, token_limits=limits))
        engine.handle_message(1, script.verdict(len(script.tokens), with_features=False))
        (proposal,) = answers(engine)
        tree = proposal.tree
        assert 0 < len(tree) <= plan.draft_tokens
        paths = [
            (32, *(int(tree.tokens[at]) for at in path(tree.parents, node)))
            for node in range(len(tree))
        ]
        assert {id_ for said in paths for id_ in said} <= set(ALLOWED)
        assert not any(
            said[at : at + len(word)] == word
            for said in paths
            for word in limits.bad_words
            for at in range(len(said))
        )
        # Once more without the pairs that were drafted.
        limits = replace(limits, bad_words=tuple({said[:2] for said in paths} | {paths[-1][-2:]}))


def test_lookups_are_cut_where_they_are_forbidden() -> None:
    script = script_of(7, 8, 9, 10, 7, 8)
    plan = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=4)
    start = script.start(plan=plan, prompt_len=4)
    found = []
    for limits in (
        None,
        TokenLimits(bad_words=((9, 10, 7),)),
        TokenLimits(allowed_ids=(7, 8, 9)),
    ):
        engine = engine_of(NgramProposer(min_match=1), None)
        script.told = script.features_told = 0
        engine.handle_message(1, replace(start, token_limits=limits))
        engine.handle_message(1, script.verdict(len(script.tokens), with_features=False))
        (proposal,) = answers(engine)
        found.append(proposal.tree.tokens.tolist())
    assert found == [[9, 10, 7, 8], [9, 10], [9]]
