"""The EAGLE head as a draft source, against the float64 oracle and against itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_drafter.proposers import eagle as head_source_module
from outrider_drafter.proposers import kv_proposer
from outrider_drafter.proposers.eagle import EagleProposer

from outrider.spec.draft_distribution import validate_distribution
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import ancestor_mask, depths, validate_tree
from outrider.wire.messages import Proposal, TensorDtype, Verdicts, WireTensor
from tests.reference.eagle3_tree import HeadOracle, grow_tree
from tests.unit.drafter.helpers import (
    CHAIN,
    TREE,
    VOCAB,
    Script,
    counted,
    double,
    drain,
    embedding,
    head_source,
    make_engine,
    name_of,
)


def oracle_tree(
    directory: Path, script: Script, end: int, plan: SpeculationPlan
) -> tuple[list[int], list[int], list[float]]:
    head = HeadOracle(directory, embedding().numpy())
    real = head.real_rows(script.tokens[:end], double(script.features))
    expansions = (plan.depth or plan.draft_tokens) - 1
    return grow_tree(
        head, real, num_nodes=plan.draft_tokens, top_k=plan.top_k, expansions=expansions
    )


def propose(
    source: EagleProposer, script: Script, ends: list[int], plan: SpeculationPlan
) -> Proposal:
    """The proposal after the last of the verdicts."""
    engine = make_engine([source])
    engine.handle_message(1, script.start(plan=plan))
    proposals: list[Proposal] = []
    for end in ends:
        engine.handle_message(1, script.verdict(end))
        proposals = drain(engine)
    assert len(proposals) == 1
    return proposals[0]


WIDE = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=24, top_k=6, depth=4)


@pytest.mark.parametrize(("plan", "seed"), [(CHAIN, 3), (TREE, 3), (WIDE, 5), (WIDE, 8)])
def test_the_draft_is_the_oracles(tmp_path: Path, plan: SpeculationPlan, seed: int) -> None:
    script = Script(seed=seed)
    proposal = propose(head_source(tmp_path), script, [9, 12, 13], plan)
    tokens, parents, scores = oracle_tree(tmp_path, script, 13, plan)
    assert proposal.tree.tokens.tolist() == tokens
    assert proposal.tree.parents.tolist() == parents
    if plan is WIDE:
        assert branches_below_branches(parents), "no test of what a branch may not see"
    if plan.top_k > 1:
        np.testing.assert_allclose(proposal.tree.logprobs, scores, atol=1e-4)
    assert proposal.prefix_len == 13
    assert proposal.prefix_digest == script.digest(13)


def branches_below_branches(parents: list[int]) -> bool:
    """Whether nodes of the third level hang below different nodes of the first."""
    grandparents = {parents[parents[p]] for p in parents if p >= 0 and parents[p] >= 0}
    return len(grandparents) > 1


def test_draft_ids_are_mapped_to_target_ids_once(tmp_path: Path) -> None:
    source, script = head_source(tmp_path), Script(seed=4)
    proposal = propose(source, script, [20], TREE)
    members = HeadOracle(tmp_path, embedding().numpy()).tensors["t2d"]
    assert all(members[token] for token in proposal.tree.tokens)
    validate_tree(proposal.tree, vocab_size=VOCAB, max_nodes=12)


def test_a_tree_is_ancestor_closed_and_its_mask_counts_the_depth(tmp_path: Path) -> None:
    tree = propose(head_source(tmp_path), Script(seed=5), [10], TREE).tree
    parents = tree.parents.tolist()
    assert all(parent < node for node, parent in enumerate(parents))
    assert ancestor_mask(tree.parents).sum(axis=1).tolist() == list(depths(tree.parents))


def test_stable_rows_equal_a_recomputation_from_scratch(tmp_path: Path) -> None:
    script, whole = Script(seed=6), Script(seed=6)
    source = head_source(tmp_path)
    grown = propose(source, script, [3, 4, 9, 10, 11, 17, 30], TREE)
    fresh_source = head_source(tmp_path)
    fresh = propose(fresh_source, whole, [30], TREE)
    assert grown.tree.tokens.tolist() == fresh.tree.tokens.tolist()
    assert grown.tree.parents.tolist() == fresh.tree.parents.tolist()
    grown_kv = source.kv(script.handle, 1)
    fresh_kv = fresh_source.kv(script.handle, 1)
    assert grown_kv[0].shape[1] == 29
    torch.testing.assert_close(grown_kv, fresh_kv)
    oracle = HeadOracle(tmp_path, embedding().numpy())
    rows = oracle.real_rows(script.tokens[:30], double(script.features))
    keys = np.stack([row.key for row in rows], axis=1)
    np.testing.assert_allclose(grown_kv[0].numpy(), keys, atol=1e-4)


def test_draft_rows_leave_no_trace(tmp_path: Path) -> None:
    source, script = head_source(tmp_path), Script(seed=7)
    propose(source, script, [12], TREE)
    assert source.kv(script.handle, 1)[0].shape[1] == 11


def test_dropping_dead_rows_changes_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all rows through the whole block, as an undropped catch-up would; same drafts."""
    script = Script(seed=8)
    dropped = propose(head_source(tmp_path), script, [9, 14], TREE)
    source = head_source(tmp_path)
    calls = []
    finish = source.head.finish

    def count_rows(residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        calls.append(residual.shape[0])
        return finish(residual, attended)

    monkeypatch.setattr(source.head, "finish", count_rows)
    again = propose(source, Script(seed=8), [9, 14], TREE)
    assert calls[0] == 1, "only the live row goes past the KV write"
    assert again.tree.tokens.tolist() == dropped.tree.tokens.tolist()
    tokens, parents, _ = oracle_tree(tmp_path, script, 14, TREE)
    assert (dropped.tree.tokens.tolist(), dropped.tree.parents.tolist()) == (tokens, parents)


def test_many_sessions_in_one_batch_get_what_each_gets_alone(tmp_path: Path) -> None:
    plans = [CHAIN, TREE, SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=7, top_k=1), TREE]
    samplings = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=4),
        SamplingParams(temperature=1.0, rule=Rule.REJECTION, seed=5),
        SamplingParams(temperature=0.7, rule=Rule.REJECTION, seed=6, top_p=0.9),
    ]
    ends = [9, 30, 12, 21]

    def scripts() -> list[Script]:
        return [Script(f"s{i}", seed=20 + i) for i in range(4)]

    together = make_engine([head_source(tmp_path)])
    for script, plan, sampling, end in zip(scripts(), plans, samplings, ends, strict=True):
        together.handle_message(1, script.start(plan=plan, sampling=sampling))
        together.handle_message(1, script.verdict(end))
    batched = {name_of(p): p for p in drain(together)}
    assert counted(together, "outrider_drafter_batch_sessions_count") == 1
    assert counted(together, "outrider_drafter_batch_sessions_sum") == 4
    for script, plan, sampling, end in zip(scripts(), plans, samplings, ends, strict=True):
        alone = make_engine([head_source(tmp_path)])
        alone.handle_message(1, script.start(plan=plan, sampling=sampling))
        alone.handle_message(1, script.verdict(end))
        (expected,) = drain(alone)
        found = batched[script.session_id]
        assert found.tree.tokens.tolist() == expected.tree.tokens.tolist()
        assert found.tree.parents.tolist() == expected.tree.parents.tolist()
        np.testing.assert_allclose(found.tree.logprobs, expected.tree.logprobs, atol=1e-5)
        assert (found.distribution is None) == (expected.distribution is None)
        if found.distribution is not None and expected.distribution is not None:
            validate_distribution(found.distribution, found.tree, VOCAB)
            np.testing.assert_array_equal(found.distribution.ids, expected.distribution.ids)


def test_chunks_of_a_prompt_are_taken_in_before_the_draft_is_wanted(tmp_path: Path) -> None:
    source, script = head_source(tmp_path), Script(seed=9)
    engine = make_engine([source])
    engine.handle_message(1, script.start(prompt_len=20))
    for end in (8, 16, 20):
        engine.handle_message(1, script.verdict(end, draft_wanted=False))
        assert drain(engine) == []
        assert source.kv(script.handle, 1)[0].shape[1] == end - 1
    engine.handle_message(1, script.verdict(21, draft_wanted=True))
    (proposal,) = drain(engine)
    assert proposal.tree.tokens.tolist() == oracle_tree(tmp_path, script, 21, CHAIN)[0]


def test_a_long_prompt_is_written_in_bounded_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (head_source_module, kv_proposer):
        monkeypatch.setattr(module, "MAX_ROWS_PER_WRITE", 7)
    script = Script(seed=10)
    proposal = propose(head_source(tmp_path), script, [40, 41], CHAIN)
    assert proposal.tree.tokens.tolist() == oracle_tree(tmp_path, script, 41, CHAIN)[0]


def test_the_same_verdict_again_gives_the_same_draft(tmp_path: Path) -> None:
    script = Script(seed=11)
    engine = make_engine([head_source(tmp_path)])
    engine.handle_message(1, script.start(plan=TREE))
    verdict = script.verdict(15)
    engine.handle_message(1, verdict)
    (first,) = drain(engine)
    engine.handle_message(1, verdict)
    (second,) = drain(engine)
    assert first.tree.tokens.tolist() == second.tree.tokens.tolist()
    assert first.prefix_digest == second.prefix_digest


def test_a_session_beyond_the_budget_is_not_drafted_and_harms_no_other(tmp_path: Path) -> None:
    source = head_source(tmp_path, max_rows=300)
    engine = make_engine([source])
    small, large = Script("small", seed=1), Script("large", seed=2)
    engine.handle_message(1, small.start(max_len=40))
    engine.handle_message(1, small.verdict(10))
    assert len(drain(engine)) == 1
    engine.handle_message(1, large.start(max_len=500))
    engine.handle_message(1, large.verdict(20))
    engine.handle_message(1, small.verdict(12))
    assert [name_of(p) for p in drain(engine)] == ["small"]
    assert counted(engine, "outrider_drafter_no_proposal_total", method="eagle3") == 1
    engine.handle_message(1, large.verdict(22))
    assert drain(engine) == []


def test_a_session_beyond_the_heads_context_is_not_drafted(tmp_path: Path) -> None:
    source = EagleProposer(
        head_source(tmp_path).head, max_rows=4096, max_context=16, dtype=torch.float64
    )
    engine = make_engine([source])
    script = Script(seed=1)
    engine.handle_message(1, script.start())
    engine.handle_message(1, script.verdict(14))
    assert len(drain(engine)) == 1
    for end in (15, 30):
        engine.handle_message(1, script.verdict(end))
        assert drain(engine) == []
    assert source.used_rows == 0


def test_the_end_of_a_session_frees_its_rows(tmp_path: Path) -> None:
    source, script = head_source(tmp_path), Script(seed=1)
    propose(source, script, [14], CHAIN)
    engine = make_engine([source])
    engine.handle_message(2, script.start())
    script.told = script.features_told = 0
    engine.handle_message(2, script.verdict(14))
    drain(engine)
    before = source.used_rows
    engine.handle_message(2, script.start())
    assert source.used_rows < before


def test_features_in_every_float_type_are_understood(tmp_path: Path) -> None:
    script = Script(seed=12)
    script.features = torch.from_numpy(script.features).bfloat16().float().numpy()
    plain = script.entry(12)
    assert plain.features is not None
    half = torch.from_numpy(plain.features.data).bfloat16().view(torch.int16).numpy()
    wires = [
        plain.features,
        WireTensor(dtype=TensorDtype.BFLOAT16, data=half.view(np.uint16)),
        WireTensor(dtype=TensorDtype.FLOAT16, data=plain.features.data.astype(np.float16)),
    ]
    drafts = []
    for wire in wires:
        engine = make_engine([head_source(tmp_path)])
        engine.handle_message(1, script.start())
        engine.handle_message(1, Verdicts.of_verdicts([replace(plain, features=wire)]))
        drafts.append(drain(engine)[0].tree.tokens.tolist())
    assert drafts[0] == drafts[1] == drafts[2]


def test_features_of_nothing_but_nan_still_give_a_valid_tree(tmp_path: Path) -> None:
    for plan in (CHAIN, TREE):
        script = Script(seed=13)
        script.features[:] = np.nan
        proposal = propose(head_source(tmp_path), script, [12], plan)
        validate_tree(proposal.tree, vocab_size=VOCAB, max_nodes=12)
