"""A separate small model as a draft source, on a tiny random checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_drafter.proposers import small_model
from outrider_drafter.proposers.small_model import SmallModelProposer
from outrider_drafter.server.draft_engine import ConnectionClosed, DraftEngine

from outrider.engine.model_loader import load_target
from outrider.engine.target import ForwardBatch, Segment, TargetModel
from outrider.spec.draft_distribution import validate_distribution
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import validate_tree
from outrider.wire.messages import Proposal, SessionEnd
from tests.factories import make_target
from tests.unit.drafter.helpers import VOCAB, Script, counted, drain, make_engine, name_of

CHAIN = SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=4)
TREE = SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=10, top_k=3, depth=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("small"), layers=2)


@pytest.fixture
def model(checkpoint: Path) -> TargetModel:
    return load_target(checkpoint, kv_tokens=2048)


def engine_of(model: TargetModel, vocab_size: int = VOCAB) -> DraftEngine:
    return make_engine([SmallModelProposer(model, vocab_size=vocab_size)])


def told(
    engine: DraftEngine,
    script: Script,
    ends: list[int],
    plan: SpeculationPlan,
    rule: SamplingParams,
) -> Proposal:
    engine.handle_message(1, script.start(plan=plan, sampling=rule))
    proposals: list[Proposal] = []
    for end in ends:
        engine.handle_message(1, script.verdict(end, with_features=False))
        proposals = drain(engine)
    (proposal,) = proposals
    engine.handle_message(1, SessionEnd(handle=script.handle))
    return proposal


def logits_after(model: TargetModel, tokens: list[int]) -> torch.Tensor:
    """The model's own answer, in one causal forward."""
    sequence = model.pool.allocate(len(tokens))
    try:
        segment = Segment(
            sequence=sequence, num_rows=len(tokens), positions=torch.arange(len(tokens))
        )
        batch = ForwardBatch(token_ids=torch.tensor(tokens), segments=[segment])
        return model.forward(batch).logits[-1]
    finally:
        sequence.release()


def test_the_chain_is_the_models_own_greedy_text(model: TargetModel) -> None:
    script = Script(seed=1)
    proposal = told(engine_of(model), script, [9, 11, 12], CHAIN, SamplingParams())
    tokens = script.tokens[:12].tolist()
    for drafted in proposal.tree.tokens.tolist():
        assert drafted == int(logits_after(model, tokens).argmax())
        tokens.append(drafted)


def test_a_tree_scores_every_path_as_the_model_does(model: TargetModel) -> None:
    script = Script(seed=2)
    tree = told(engine_of(model), script, [9, 14], TREE, SamplingParams()).tree
    validate_tree(tree, vocab_size=VOCAB, max_nodes=10)
    assert len(set(tree.parents.tolist())) < len(tree)
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.parents.tolist()):
        above = paths[parent] if parent >= 0 else script.tokens[:14].tolist()
        logprobs = logits_after(model, above).log_softmax(-1)
        score = float(logprobs[tree.tokens[node]]) + (tree.logprobs[parent] if parent >= 0 else 0)
        np.testing.assert_allclose(tree.logprobs[node], score, atol=1e-4)
        paths.append([*above, int(tree.tokens[node])])


def test_no_trace_of_a_draft_stays_in_the_cache(model: TargetModel) -> None:
    for plan in (CHAIN, TREE):
        grown = told(engine_of(model), Script(seed=3), [5, 8, 9, 20], plan, SamplingParams())
        fresh = told(engine_of(model), Script(seed=3), [20], plan, SamplingParams())
        assert grown.tree.tokens.tolist() == fresh.tree.tokens.tolist()
        np.testing.assert_allclose(grown.tree.logprobs, fresh.tree.logprobs, atol=1e-5)


def test_a_rejection_draft_carries_its_law(model: TargetModel) -> None:
    rejection = SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=7)
    for plan in (CHAIN, TREE):
        proposal = told(engine_of(model), Script(seed=4), [12], plan, rejection)
        assert proposal.distribution is not None
        validate_distribution(proposal.distribution, proposal.tree, VOCAB)
        assert len(proposal.tree) == plan.draft_tokens


def test_many_sessions_in_one_batch_get_what_each_gets_alone(model: TargetModel) -> None:
    engine = engine_of(model)
    for i in range(3):
        script = Script(f"s{i}", seed=i)
        engine.handle_message(1, script.start(plan=[CHAIN, TREE, CHAIN][i]))
        engine.handle_message(1, script.verdict(10 + i, with_features=False))
    batched = {name_of(p): p for p in drain(engine)}
    engine.handle_message(1, ConnectionClosed())
    for i in range(3):
        script = Script(f"s{i}", seed=i)
        alone = told(engine_of(model), script, [10 + i], [CHAIN, TREE, CHAIN][i], SamplingParams())
        found = batched[script.session_id]
        assert found.tree.tokens.tolist() == alone.tree.tokens.tolist()
        assert found.tree.parents.tolist() == alone.tree.parents.tolist()


def test_a_long_prompt_runs_in_bounded_passes_before_the_draft(
    model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_model, "MAX_ROWS_PER_FORWARD", 16)
    monkeypatch.setattr(small_model, "MIN_ROWS_AHEAD", 4)
    script = Script(seed=5)
    proposal = told(engine_of(model), script, [60], CHAIN, SamplingParams())
    expected = int(logits_after(model, script.tokens[:60].tolist()).argmax())
    assert proposal.tree.tokens[0] == expected


def test_a_session_that_does_not_fit_is_drafted_once_there_is_room(model: TargetModel) -> None:
    engine = engine_of(model)
    first, second = Script("first", seed=1), Script("second", seed=2)
    for script in (first, second):
        engine.handle_message(1, script.start(plan=CHAIN, max_len=1600))
        engine.handle_message(1, script.verdict(10, with_features=False))
    assert [name_of(p) for p in drain(engine)] == ["first"]
    assert counted(engine, "outrider_drafter_no_proposal_total", method="model") == 1
    engine.handle_message(1, SessionEnd(handle=first.handle))
    engine.handle_message(1, second.verdict(11, with_features=False))
    assert [name_of(p) for p in drain(engine)] == ["second"]
    engine.handle_message(1, SessionEnd(handle=second.handle))
    assert model.pool.free_blocks == model.pool.total_blocks


def test_ids_beyond_the_targets_vocabulary_are_never_drafted(model: TargetModel) -> None:
    script = Script(seed=6)
    script.tokens %= 100
    engine = engine_of(model, vocab_size=100)
    proposal = told(engine, script, [20], TREE, SamplingParams())
    assert proposal.tree.tokens.max() < 100


def test_the_same_verdict_again_gives_the_same_draft(model: TargetModel) -> None:
    engine, script = engine_of(model), Script(seed=8)
    engine.handle_message(1, script.start(plan=TREE))
    verdict = script.verdict(15, with_features=False)
    drafts = []
    for _ in range(2):
        engine.handle_message(1, verdict)
        drafts += [p.tree.tokens.tolist() for p in drain(engine)]
    assert len(drafts) == 2
    assert drafts[0] == drafts[1]
