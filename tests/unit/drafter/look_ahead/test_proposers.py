"""What the sources of this host say of a live proposal's places, and their drafts for outcomes.

The head against an oracle without cache, batch or mask; the small model against itself after the
outcome has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_drafter.proposers.eagle import EagleProposer
from outrider_drafter.proposers.interface import (
    LookAheadProposer,
    Outcome,
    OutcomeScores,
    PendingProposal,
)
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.proposers.small_model import SmallModelProposer
from outrider_drafter.server.draft_engine import DraftEngine

from outrider.engine.draft_sampling import propose_children
from outrider.engine.logits_processor import TokenHistory
from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from outrider.spec.digest import extend_digest
from outrider.spec.draft_distribution import validate_distribution
from outrider.spec.noise import NoiseStream, prefix_keys
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import ROOT, DraftTree, path
from outrider.wire.messages import Proposal, Proposals
from tests.factories import make_target
from tests.reference.eagle3_tree import HeadOracle, Row, grow_tree, path_rows
from tests.unit.drafter.helpers import (
    CHAIN,
    TREE,
    VOCAB,
    Script,
    answers,
    double,
    embedding,
    head_source,
    make_engine,
)
from tests.unit.drafter.proposers.test_small_model import logits_after

END, C = 13, 32
HEAD_PLANS = [replace(CHAIN, look_ahead=1), replace(TREE, look_ahead=1)]
PENALISED = SamplingParams(
    temperature=0.8, seed=6, repetition_penalty=1.8, presence_penalty=1.0, top_k=20
)
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=5),
    PENALISED,
    SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=7),
]
IDS = ["greedy", "coupled", "penalised", "rejection"]


def told(
    engine: DraftEngine,
    script: Script,
    plan: SpeculationPlan,
    sampling: SamplingParams,
    end: int = END,
) -> PendingProposal:
    """A session's live proposal after a prefix."""
    engine.handle_message(1, script.start(plan=plan, sampling=sampling))
    engine.handle_message(1, script.verdict(end))
    found = {p.handle: p for p in answers(engine)}
    session = engine.sessions_of_connection(1)[-1]
    return PendingProposal(session, found[script.handle].tree)


def expected_candidates(
    live: PendingProposal, node: int, logits: torch.Tensor, target_ids: torch.Tensor | None
) -> tuple[list[int], list[float]]:
    """The candidates at a place, alone, of these logits [Vd]."""
    session, tree = live
    nodes = path(tree.parents, node)
    tokens = session.tokens.view
    history = TokenHistory(
        prompt_ids=tokens[: session.prompt_len],
        output_ids=tokens[session.prompt_len :],
        path_ids=tuple(tree.tokens[list(nodes)].tolist()),
    )
    sampling = session.sampling
    if sampling.rule is Rule.REJECTION:
        sampling = replace(sampling, rule=Rule.TARGET_ONLY)
    at = [len(tokens) + len(nodes)]
    found = propose_children(logits[None].float(), target_ids, [sampling], at, C, [history])
    return found.tokens[0].tolist(), found.logprobs[0].tolist()


def check_scores(
    scored: OutcomeScores, index: int, live: PendingProposal, logits: list[torch.Tensor]
) -> None:
    """Row by row; `logits` of each place."""
    target_ids = live_ids(logits[0])
    assert scored.tokens[index].shape == (len(live.tree) + 1, C)
    for place, row in enumerate(logits):
        tokens, logprobs = expected_candidates(live, place - 1, row, target_ids)
        assert scored.tokens[index][place].tolist() == tokens
        np.testing.assert_allclose(scored.logprobs[index][place], logprobs, atol=1e-3)


_TARGET_IDS: dict[int, torch.Tensor] = {}


def live_ids(logits: torch.Tensor) -> torch.Tensor | None:
    return _TARGET_IDS.get(logits.shape[0])


def head_rows(oracle: HeadOracle, script: Script, end: int = END) -> list[Row]:
    return oracle.real_rows(script.tokens[:end], double(script.features))


@pytest.mark.parametrize("plan", HEAD_PLANS, ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_a_heads_candidates_are_the_oracles_at_every_place(
    tmp_path: Path, plan: SpeculationPlan, sampling: SamplingParams
) -> None:
    source, scripts = head_source(tmp_path), [Script("a", seed=3), Script("b", seed=4)]
    engine = make_engine([source])
    lives = [told(engine, script, plan, sampling) for script in scripts]
    scored = source.score_proposals(lives)
    oracle = HeadOracle(tmp_path, embedding().numpy())
    assert source.head.target_ids is not None
    _TARGET_IDS[source.head.config.draft_vocab_size] = source.head.target_ids
    for index, (script, live) in enumerate(zip(scripts, lives, strict=True)):
        real = head_rows(oracle, script)
        logits = []
        for node in range(-1, len(live.tree)):
            nodes = path(live.tree.parents, node)
            rows = path_rows(oracle, real, tuple(live.tree.tokens[list(nodes)].tolist()))
            x = (rows or real)[-1].x
            final = oracle._norm(x, "norm.weight")
            logits.append(torch.from_numpy(oracle.tensors["lm_head.weight"] @ final))
        check_scores(scored, index, live, logits)


def outcomes_of(live: PendingProposal, scored: OutcomeScores, index: int) -> list[Outcome]:
    """Two of every place."""
    pairs = set(zip(live.tree.parents.tolist(), live.tree.tokens.tolist(), strict=True))
    found = []
    for node in range(-1, len(live.tree)):
        free = [int(t) for t in scored.tokens[index][node + 1] if (node, int(t)) not in pairs]
        found += [Outcome(index, node, token) for token in free[:2]]
    return found


def suffix_of(live: PendingProposal, outcome: Outcome) -> list[int]:
    nodes = path(live.tree.parents, outcome.node)
    return [*live.tree.tokens[list(nodes)].tolist(), outcome.token]


def branches_of(source: LookAheadProposer, outcomes: Sequence[Outcome]) -> dict[int, Proposal]:
    """The drafts, by index of their outcomes."""
    found: dict[int, Proposal] = {}
    for made in source.draft_outcomes(outcomes):
        none = np.zeros(len(made.outcomes), np.int64)
        flat = Proposals(
            handles=none,
            digests=none.astype(np.uint64),
            prefix_lens=none + 1,
            node_counts=made.node_counts,
            tokens=made.tokens,
            parents=made.parents,
            logprobs=made.logprobs,
            distributions=made.distributions,
        )
        found |= dict(zip(made.outcomes.tolist(), flat.iter_proposals(), strict=True))
    return found


@pytest.mark.parametrize("plan", HEAD_PLANS, ids=["chain", "tree"])
def test_a_heads_branches_are_the_trees_that_its_own_features_give(
    tmp_path: Path, plan: SpeculationPlan
) -> None:
    source, scripts = head_source(tmp_path), [Script("a", seed=3), Script("b", seed=8)]
    engine = make_engine([source])
    lives = [told(engine, script, plan, SamplingParams()) for script in scripts]
    before = [[t.clone() for t in source.kv(script.handle, 1)] for script in scripts]
    scored = source.score_proposals(lives)
    outcomes = [o for i, live in enumerate(lives) for o in outcomes_of(live, scored, i)]
    # In any order.
    outcomes = outcomes[::2] + outcomes[1::2]
    found = branches_of(source, outcomes)
    assert sorted(found) == list(range(len(outcomes)))
    oracle = HeadOracle(tmp_path, embedding().numpy())
    real = [head_rows(oracle, script) for script in scripts]
    expansions = (plan.depth or plan.draft_tokens) - 1
    for index, proposal in found.items():
        live = lives[outcomes[index].live]
        rows = real[outcomes[index].live]
        rows = rows + path_rows(oracle, rows, tuple(suffix_of(live, outcomes[index])))
        tokens, parents, scores = grow_tree(
            oracle,
            rows,
            num_nodes=plan.draft_tokens,
            top_k=plan.top_k,
            expansions=expansions,
        )
        assert proposal.tree.tokens.tolist() == tokens
        assert proposal.tree.parents.tolist() == parents
        if plan.top_k > 1:
            np.testing.assert_allclose(proposal.tree.logprobs, scores, atol=1e-4)
    # A second launch from the same scores, and the session's own rows as they were.
    again = branches_of(source, outcomes[:3])
    assert all((again[i].tree.tokens == found[i].tree.tokens).all() for i in range(3))
    for script, rows_before in zip(scripts, before, strict=True):
        torch.testing.assert_close(list(source.kv(script.handle, 1)), rows_before)


def test_drafts_after_a_look_ahead_are_those_without(tmp_path: Path) -> None:
    texts = []
    for looks in (False, True):
        source, script = head_source(tmp_path), Script(seed=5)
        engine = make_engine([source])
        drafted = []
        engine.handle_message(1, script.start(plan=HEAD_PLANS[1]))
        for end in (9, 12, 13, 20):
            engine.handle_message(1, script.verdict(end))
            drafted += [p.tree.tokens.tolist() for p in answers(engine)]
            if looks:
                assert sum(len(together) for together in engine.run_look_ahead())
        texts.append(drafted)
        assert source.kv(script.handle, 1)[0].shape[1] == 19
    assert texts[0] == texts[1]


def test_look_ahead_takes_nothing_of_a_heads_budget(tmp_path: Path) -> None:
    source, script = head_source(tmp_path, max_rows=256), Script(seed=5)
    engine = make_engine([source])
    live = told(engine, script, HEAD_PLANS[1], SamplingParams())
    used = source.used_rows
    outcomes = outcomes_of(live, source.score_proposals([live]), 0)
    assert len(branches_of(source, outcomes)) == len(outcomes)
    assert source.used_rows == used


def test_a_head_says_nothing_of_a_session_that_it_cannot_draft(tmp_path: Path) -> None:
    source, good, bad = head_source(tmp_path), Script("a", seed=1), Script("b", seed=2)
    engine = make_engine([source])
    live = told(engine, good, HEAD_PLANS[0], SamplingParams())
    engine.handle_message(1, bad.start(plan=HEAD_PLANS[0]))
    engine.handle_message(1, bad.verdict(9, with_features=False))
    answers(engine)
    session = next(s for s in engine.sessions_of_connection(1) if s.key.handle == bad.handle)
    lives = [PendingProposal(session, DraftTree.chain(np.array([1, 2], np.int32))), live]
    scored = source.score_proposals(lives)
    assert [len(t) for t in scored.tokens] == [3, 5]
    assert (scored.logprobs[0] == -np.inf).all() and (scored.logprobs[1] > -np.inf).any()
    found = branches_of(source, [Outcome(0, ROOT, 5), Outcome(1, ROOT, 5)])
    assert list(found) == [1]


def test_a_heads_context_bounds_its_branches(tmp_path: Path) -> None:
    """Outcomes whose drafts would lie beyond it are left out, as fresh drafts are."""
    script = Script(seed=3)
    head = head_source(tmp_path).head
    source = EagleProposer(head, max_rows=4096, max_context=18, dtype=torch.float64)
    engine = make_engine([source])
    live = told(engine, script, HEAD_PLANS[0], SamplingParams())
    outcomes = outcomes_of(live, source.score_proposals([live]), 0)
    found = branches_of(source, outcomes)
    # Rows 0 .. 11 are real; four levels below an outcome end at 12 + path + 4 at most.
    fitting = [i for i, o in enumerate(outcomes) if len(suffix_of(live, o)) + 4 <= 18 - 11]
    assert sorted(found) == fitting and 0 < len(fitting) < len(outcomes)


MODEL_PLANS = [
    SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=4, look_ahead=1),
    SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=10, top_k=3, depth=4, look_ahead=1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    directory = make_target(tmp_path_factory.mktemp("small"), layers=2)
    return load_target(directory, kv_tokens=8192)


@pytest.mark.parametrize("plan", MODEL_PLANS, ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_a_models_candidates_are_those_of_a_forward_of_each_path(
    model: TargetModel, plan: SpeculationPlan, sampling: SamplingParams
) -> None:
    source, script = SmallModelProposer(model, vocab_size=VOCAB), Script(seed=2)
    engine = make_engine([source])
    live = told(engine, script, plan, sampling)
    scored = source.score_proposals([live])
    logits = []
    for node in range(-1, len(live.tree)):
        nodes = path(live.tree.parents, node)
        text = [*script.tokens[:END].tolist(), *live.tree.tokens[list(nodes)].tolist()]
        logits.append(logits_after(model, text)[:VOCAB])
    check_scores(scored, 0, live, logits)
    source.release_session(live.session)


@pytest.mark.parametrize("plan", MODEL_PLANS, ids=["chain", "tree"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_a_models_branches_are_what_it_drafts_when_the_outcome_has_happened(
    model: TargetModel, plan: SpeculationPlan, sampling: SamplingParams
) -> None:
    source, script = SmallModelProposer(model, vocab_size=VOCAB), Script(seed=2)
    engine = make_engine([source])
    live = told(engine, script, plan, sampling)
    outcomes = outcomes_of(live, source.score_proposals([live]), 0)
    found = branches_of(source, outcomes)
    # More of them than there are slots for at a time.
    assert sorted(found) == list(range(len(outcomes)))
    source.release_session(live.session)
    for index in range(0, len(outcomes), 3):
        happened, branch = Script(seed=2), found[index]
        suffix = suffix_of(live, outcomes[index])
        happened.tokens[END : END + len(suffix)] = suffix
        engine = make_engine([source])
        engine.handle_message(1, happened.start(plan=plan, sampling=sampling))
        engine.handle_message(1, happened.verdict(END + len(suffix)))
        (fresh,) = answers(engine)
        assert branch.tree.tokens.tolist() == fresh.tree.tokens.tolist()
        assert branch.tree.parents.tolist() == fresh.tree.parents.tolist()
        np.testing.assert_allclose(branch.tree.logprobs, fresh.tree.logprobs, atol=1e-4)
        assert (branch.distribution is None) == (fresh.distribution is None)
        if branch.distribution is not None and fresh.distribution is not None:
            validate_distribution(branch.distribution, branch.tree, VOCAB)
            assert branch.distribution.ids.tolist() == fresh.distribution.ids.tolist()
        (session,) = engine.sessions_of_connection(1)
        source.release_session(session)


def test_drafts_of_a_model_after_a_look_ahead_are_those_without(model: TargetModel) -> None:
    texts = []
    for looks in (False, True):
        source, script = SmallModelProposer(model, vocab_size=VOCAB), Script(seed=5)
        engine = make_engine([source])
        drafted = []
        engine.handle_message(1, script.start(plan=MODEL_PLANS[1]))
        for end in (9, 12, 13, 20):
            engine.handle_message(1, script.verdict(end))
            drafted += [p.tree.tokens.tolist() for p in answers(engine)]
            if looks:
                assert sum(len(together) for together in engine.run_look_ahead())
        texts.append(drafted)
        (session,) = engine.sessions_of_connection(1)
        source.release_session(session)
    assert texts[0] == texts[1]


def test_each_prefix_has_draft_noise_of_its_own_where_drafts_are_made_ahead(
    tmp_path: Path,
) -> None:
    """And the usual one in lock-step: its drafts are as they always were."""
    rejection, key = SAMPLINGS[3], SAMPLINGS[3].stream_key(NoiseStream.DRAFT)
    drafted = []
    for plan, own in ((replace(CHAIN, look_ahead=1), True), (CHAIN, False)):
        script = Script(seed=3)
        sampling = rejection
        for by_hand in (False, True):
            if by_hand:
                digest = extend_digest(script.digest(END), ())
                mixed = int(prefix_keys(key, digest)) if own else key
                sampling = replace(rejection, seed=0, draft_key=mixed)
            again = Script(seed=3)
            engine = make_engine([head_source(tmp_path)])
            live = told(engine, again, plan if not by_hand else CHAIN, sampling)
            drafted.append(live.tree.tokens.tolist())
    assert drafted[0] == drafted[1] and drafted[2] == drafted[3] and drafted[0] != drafted[2]


def test_a_lookup_goes_on_after_its_whole_proposal() -> None:
    source, script = NgramProposer(min_match=1), Script()
    script.tokens[:] = [i % 7 for i in range(len(script.tokens))]
    plan = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=3, look_ahead=1)
    engine = make_engine([source])
    for end in (10, 14, 18):
        engine.handle_message(1, script.start(plan=plan)) if end == 10 else None
        engine.handle_message(1, script.verdict(end, with_features=False))
        # The first is drafted for, the others were made ahead.
        fresh = answers(engine)
        assert len(fresh) == (end == 10)
        (ahead,) = [
            p
            for together in engine.run_look_ahead()
            for _, m in together
            for p in m.iter_proposals()
        ]
        assert ahead.prefix_digest == script.digest(end + 4)
        assert ahead.tree.tokens.tolist() == script.tokens[end + 4 : end + 7].tolist()


def test_a_lookup_that_finds_nothing_looks_no_further() -> None:
    source, script = NgramProposer(min_match=1), Script()
    script.tokens[:] = np.arange(len(script.tokens))
    plan = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=3, look_ahead=1)
    engine = make_engine([source])
    engine.handle_message(1, script.start(plan=plan))
    engine.handle_message(1, script.verdict(10, with_features=False))
    assert [len(p.tree) for p in answers(engine)] == [0]
    assert not engine.has_look_ahead_work
