"""The device's draft source against the host's, on the kernels' CPU twins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_drafter.__main__ import parse_args
from outrider_drafter.gpu import proposer
from outrider_drafter.gpu.paged_kv import BLOCK_TOKENS
from outrider_drafter.gpu.shapes import (
    CHAIN_LENGTHS,
    EXCHANGE_BUCKETS,
    TREES,
    batch_sizes,
    draft_shapes,
    scoring_shapes,
)
from outrider_drafter.proposers import kv_proposer
from outrider_drafter.proposers.eagle import EagleProposer
from outrider_drafter.server.build import build_head_proposer

from outrider.engine.device.transfer.buffers import DownloadBuffer
from outrider.engine.heads import DraftHead
from outrider.spec.draft_distribution import validate_distribution
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.token_limits import TokenLimits
from outrider.spec.tree import is_chain, validate_tree
from outrider.wire.messages import PlanChange, Proposal, Proposals, SessionEnd
from tests.factories import make_eagle3_head
from tests.unit.drafter.device_drafting import on_device
from tests.unit.drafter.helpers import (
    CHAIN,
    TREE,
    VOCAB,
    Script,
    answers,
    drain,
    make_engine,
    name_of,
)
from tests.unit.drafter.look_ahead_sessions import launches
from tests.unit.drafter.mixed_sessions import (
    COUPLED,
    HOSTED,
    MIX,
    REJECTION,
    random_ends,
    side_by_side,
    together,
    told,
)
from tests.unit.drafter.shm_verdicts import Lender
from tests.unit.engine.device.draft_sessions import plain_head


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    return plain_head(make_eagle3_head(tmp_path_factory.mktemp("device-head")))


def assert_same(found: Proposal, expected: Proposal) -> None:
    assert found.prefix_len == expected.prefix_len
    assert found.tree.tokens.tolist() == expected.tree.tokens.tolist()
    assert found.tree.parents.tolist() == expected.tree.parents.tolist()
    atol = 1e-4 if found.distribution is None else 1e-3
    np.testing.assert_allclose(found.tree.logprobs, expected.tree.logprobs, atol=atol)
    assert (found.distribution is None) == (expected.distribution is None)
    if found.distribution is not None and expected.distribution is not None:
        np.testing.assert_array_equal(found.distribution.ids, expected.distribution.ids)
        # Logits differ by their order of summation, and so may a count where it is rounded.
        np.testing.assert_allclose(
            found.distribution.counts.astype(np.int64),
            expected.distribution.counts.astype(np.int64),
            atol=1,
        )


def assert_the_hosts(
    found: list[dict[str, Proposal]], expected: list[dict[str, Proposal]], sessions: int
) -> None:
    """Every session got the host's drafts in every round."""
    for _, ours, theirs in side_by_side(found, expected, sessions):
        assert_same(ours, theirs)
        validate_tree(ours.tree, vocab_size=VOCAB, max_nodes=12)


def test_every_session_gets_the_hosts_drafts_round_after_round(head: DraftHead) -> None:
    ends = random_ends(5, seed=1)
    source = on_device(head)
    found = told(make_engine([source]), MIX, ends)
    expected = told(make_engine([EagleProposer(head, max_rows=8192)]), MIX, ends)
    assert_the_hosts(found, expected, len(MIX))
    assert source.num_on_host == HOSTED


def test_features_that_lie_in_a_lane_are_read_by_the_device_where_they_lie(
    head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = [(CHAIN, sampling) for plan, sampling in MIX if plan is CHAIN and sampling != REJECTION]
    rng = np.random.default_rng(4)
    # Prompts, then one to four rows of each session a round.
    ends = np.cumsum([[12] * len(mix), *rng.integers(1, 5, (6, len(mix)))], axis=0).tolist()
    source, lender = on_device(head), Lender(gap=2)
    lent_while_it_drafts: list[int] = []
    wait = DownloadBuffer.wait_copy

    def count_and_wait(buffer: DownloadBuffer, like: torch.Tensor) -> torch.Tensor:
        lent_while_it_drafts.append(lender.lent)
        return wait(buffer, like)

    monkeypatch.setattr(DownloadBuffer, "wait_copy", count_and_wait)
    found = told(make_engine([source]), mix, ends, lender)
    assert lent_while_it_drafts == [1] * 7, "its memory is used until the launch is over"
    assert lender.lent == 0, "and no longer"
    expected = told(make_engine([EagleProposer(head, max_rows=8192)]), mix, ends, together)
    assert_the_hosts(found, expected, len(mix))


def test_features_in_a_lane_of_sessions_that_are_drafted_apart_are_put_in_order(
    head: DraftHead,
) -> None:
    ends, lender = random_ends(5, seed=5), Lender(gap=1)
    found = told(make_engine([on_device(head)]), MIX, ends, lender)
    expected = told(make_engine([EagleProposer(head, max_rows=8192)]), MIX, ends, together)
    assert lender.lent == 0
    assert_the_hosts(found, expected, len(MIX))


def test_stable_rows_are_the_hosts(head: DraftHead) -> None:
    source, host = on_device(head), EagleProposer(head, max_rows=8192)
    for each in (source, host):
        told(make_engine([each]), [(TREE, SamplingParams())], [[22], [23], [40]])
    (ours, theirs) = (each.kv(Script("s0").handle, 1) for each in (source, host))
    assert ours[0].shape[1] == 39
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_chunks_of_a_prompt_are_taken_in_before_the_draft_is_wanted(
    head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_proposer, "MAX_ROWS_PER_WRITE", 5)
    proposals = []
    for source in (on_device(head), EagleProposer(head, max_rows=8192)):
        engine, script = make_engine([source]), Script("s0", seed=9)
        engine.handle_message(1, script.start(prompt_len=48, plan=CHAIN, sampling=COUPLED))
        for end in (18, 36, 48):
            engine.handle_message(1, script.verdict(end, draft_wanted=False))
            assert drain(engine) == []
            assert source.kv(script.handle, 1)[0].shape[1] == end - 1
        engine.handle_message(1, script.verdict(49))
        proposals += drain(engine)
    assert_same(*proposals)


def test_a_session_that_has_its_prompt_to_read_holds_up_no_other(head: DraftHead) -> None:
    engine, old, new = make_engine([on_device(head)]), Script("s0"), Script("s1", seed=4)
    engine.handle_message(1, old.start(prompt_len=20, plan=CHAIN))
    engine.handle_message(1, old.verdict(21))
    (first,) = drain(engine)
    engine.handle_message(1, new.start(prompt_len=60, plan=CHAIN))
    engine.handle_message(1, new.verdict(61))
    engine.handle_message(1, old.verdict(23))
    batches = [
        message.handles.tolist()
        for batch in engine.draft_wanted()
        for _, message in batch
        if isinstance(message, Proposals)
    ]
    assert first.handle == old.handle
    assert batches == [[old.handle], [new.handle]]


def test_the_same_verdict_again_gives_the_same_draft(head: DraftHead) -> None:
    engine, script = make_engine([on_device(head)]), Script(seed=11)
    engine.handle_message(1, script.start(plan=TREE))
    verdict = script.verdict(15)
    drafts = []
    for _ in range(2):
        engine.handle_message(1, verdict)
        drafts += drain(engine)
    assert_same(*drafts)


@pytest.mark.parametrize(
    ("plan", "sampling"), [(CHAIN, SamplingParams()), (TREE, SamplingParams()), (CHAIN, REJECTION)]
)
def test_near_its_end_a_session_gets_what_still_fits(
    head: DraftHead, plan: SpeculationPlan, sampling: SamplingParams
) -> None:
    proposals = []
    for source in (on_device(head), EagleProposer(head, max_rows=8192)):
        engine, script = make_engine([source]), Script(seed=12)
        engine.handle_message(1, script.start(plan=plan, sampling=sampling, max_len=20))
        for end in (16, 17, 18, 19):
            engine.handle_message(1, script.verdict(end))
            proposals += drain(engine)
    assert len(proposals) == 6, "room for 3, 2, 1 and 0 levels"
    for ours, theirs in zip(proposals[:3], proposals[3:], strict=True):
        assert_same(ours, theirs)


def test_a_coupled_session_whose_plan_becomes_a_tree_gets_trees(head: DraftHead) -> None:
    proposals = []
    for source in (on_device(head), EagleProposer(head, max_rows=8192)):
        engine, script = make_engine([source]), Script(seed=13)
        engine.handle_message(1, script.start(plan=CHAIN, sampling=COUPLED))
        engine.handle_message(1, script.verdict(12))
        (before,) = drain(engine)
        assert len(before.tree) == CHAIN.draft_tokens
        engine.handle_message(1, PlanChange(handle=script.handle, plan=TREE))
        engine.handle_message(1, script.verdict(14))
        proposals += drain(engine)
    assert_same(*proposals)
    assert not is_chain(proposals[0].tree.parents)


def test_a_rejection_session_whose_plan_becomes_a_tree_keeps_its_laws(head: DraftHead) -> None:
    source = on_device(head)
    engine, script = make_engine([source]), Script(seed=13)
    engine.handle_message(1, script.start(plan=CHAIN, sampling=REJECTION))
    engine.handle_message(1, script.verdict(12))
    (before,) = drain(engine)
    engine.handle_message(1, PlanChange(handle=script.handle, plan=TREE))
    engine.handle_message(1, script.verdict(14))
    (after,) = drain(engine)
    assert len(before.tree) == CHAIN.draft_tokens
    assert after.tree.parents.tolist() == [-1, 0, 1, 2], "a chain as deep as the tree"
    for proposal in (before, after):
        assert proposal.distribution is not None
        validate_distribution(proposal.distribution, proposal.tree, VOCAB)
    assert source.num_on_host == 0


def test_a_session_with_limits_of_its_ids_is_drafted_for_by_the_host(head: DraftHead) -> None:
    free, source = on_device(head), on_device(head)
    drafted = []
    for each in (free, source):
        engine, script = make_engine([each]), Script(seed=13)
        start = script.start(plan=TREE, sampling=SamplingParams())
        if each is source:
            # All that was drafted before, it may not draft.
            banned = {(int(token),) for token in drafted[0].tree.tokens}
            start = replace(start, token_limits=TokenLimits(bad_words=tuple(sorted(banned))))
        engine.handle_message(1, start)
        engine.handle_message(1, script.verdict(12))
        drafted += drain(engine)
    before, after = (set(each.tree.tokens.tolist()) for each in drafted)
    assert before and after and not before & after
    assert (source.num_on_host, free.num_on_host) == (1, 0)


def test_features_of_nan_harm_no_other_session(head: DraftHead) -> None:
    clean, spoilt = (make_engine([on_device(head)]) for _ in range(2))
    found = []
    for engine, bad in ((clean, False), (spoilt, True)):
        scripts = [Script("good", seed=1), Script("bad", seed=2), Script("tree", seed=3)]
        if bad:
            scripts[1].features[:] = np.nan
        for script, plan in zip(scripts, (CHAIN, CHAIN, TREE), strict=True):
            engine.handle_message(1, script.start(plan=plan))
            engine.handle_message(1, script.verdict(15))
        found.append({name_of(p): p for p in answers(engine)})
    for name in ("good", "tree"):
        assert_same(found[1][name], found[0][name])
    validate_tree(found[1]["bad"].tree, vocab_size=VOCAB, max_nodes=12)


def test_a_session_beyond_the_budget_is_not_drafted_and_harms_no_other(head: DraftHead) -> None:
    source = on_device(head, max_rows=4 * BLOCK_TOKENS)
    engine = make_engine([source])
    small, large = Script("small", seed=1), Script("large", seed=2)
    engine.handle_message(1, small.start(max_len=40))
    engine.handle_message(1, small.verdict(10))
    assert len(drain(engine)) == 1
    engine.handle_message(1, large.start(max_len=500))
    engine.handle_message(1, large.verdict(60))
    engine.handle_message(1, small.verdict(12))
    assert [name_of(p) for p in drain(engine)] == ["small"]
    engine.handle_message(1, large.verdict(62))
    assert drain(engine) == []
    engine.handle_message(1, SessionEnd(handle=small.handle))
    assert source.used_rows == 0


def test_a_session_beyond_the_heads_context_is_not_drafted(head: DraftHead) -> None:
    source = on_device(head, max_context=16)
    engine, script = make_engine([source]), Script(seed=1)
    engine.handle_message(1, script.start())
    engine.handle_message(1, script.verdict(14))
    assert len(drain(engine)) == 1
    for end in (15, 40):
        engine.handle_message(1, script.verdict(end))
        assert drain(engine) == []
    assert source.used_rows == 0


def test_more_sessions_than_slots_and_freed_slots_are_used_again(head: DraftHead) -> None:
    source = on_device(head)
    engine = make_engine([source])
    for number in range(20):
        script = Script(f"s{number}", seed=number)
        engine.handle_message(1, script.start())
        engine.handle_message(1, script.verdict(10))
    assert len(drain(engine)) == 16
    for number in range(20):
        engine.handle_message(1, SessionEnd(handle=Script(f"s{number}").handle))
    assert source.used_rows == 0
    again = Script("again", seed=3)
    engine.handle_message(1, again.start())
    engine.handle_message(1, again.verdict(10))
    (proposal,) = drain(engine)
    fresh = make_engine([EagleProposer(head, max_rows=999)])
    other = Script("again", seed=3)
    fresh.handle_message(1, other.start())
    fresh.handle_message(1, other.verdict(10))
    assert_same(proposal, drain(fresh)[0])


def test_warming_up_leaves_no_trace(head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest chains and the smallest trees of every kind: a CPU is slow at all of them."""
    least = {1: min(CHAIN_LENGTHS), TREES[min(TREES)]: min(TREES)}
    kinds = [
        (shape, g)
        for shape, g in draft_shapes(CHAIN_LENGTHS)
        if shape.num_nodes == least.get(shape.top_k)
    ]
    assert len(kinds) == 6
    monkeypatch.setattr(proposer, "draft_shapes", lambda *_, **__: iter(kinds))
    forms = [(nodes, warps) for nodes, warps in scoring_shapes() if nodes.depth <= 4]
    assert {nodes.is_chain for nodes, _ in forms} == {True, False}
    monkeypatch.setattr(proposer, "scoring_shapes", lambda: iter(forms))
    source = on_device(head)
    source.warm_up()
    assert source.used_rows == 0
    assert not source.kv_rows.storage.any()
    assert len(source.graphs) == 0, "a CPU captures nothing"


def test_a_drafter_that_exchanges_launches_what_its_few_graphs_are_for(
    head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = {
        (shape, size, rows, general)
        for shape, general in draft_shapes(EXCHANGE_BUCKETS.chains)
        for size in batch_sizes(shape, EXCHANGE_BUCKETS.sessions)
        for rows in EXCHANGE_BUCKETS.rows
    }
    assert len(captured) < 80
    source = on_device(head, bounded=True, buckets=EXCHANGE_BUCKETS, look_ahead=False)
    launched = launches(monkeypatch)
    rounds = told(make_engine([source]), MIX, random_ends(3, seed=5))
    assert rounds[-1]
    drafts = {key for key in launched if isinstance(key, tuple) and key[0] != "write"}
    assert drafts and drafts <= captured


def test_a_cpu_gets_the_hosts_source_and_graphs_can_be_switched_off(
    head: DraftHead, tmp_path: Path
) -> None:
    plain = ["--model", "m", "--head", str(tmp_path)]
    config = parse_args(plain)
    assert config.cuda_graphs
    assert not parse_args([*plain, "--no-cuda-graphs"]).cuda_graphs
    assert type(build_head_proposer(head, config, torch.float32)) is EagleProposer


@pytest.mark.parametrize("sampling", [SamplingParams(), COUPLED])
def test_a_bounded_source_cuts_its_longer_chains_to_what_was_asked(
    head: DraftHead, sampling: SamplingParams
) -> None:
    plan = SpeculationPlan(method=CHAIN.method, draft_tokens=6)
    proposals = []
    for bounded in (False, True):
        source = on_device(head, bounded=bounded)
        engine, script = make_engine([source]), Script(seed=13)
        engine.handle_message(1, script.start(plan=plan, sampling=sampling))
        engine.handle_message(1, script.verdict(12))
        proposals += drain(engine)
    assert len(proposals[1].tree) == 6
    assert_same(*proposals)


@pytest.mark.parametrize("sampling", [SamplingParams(), COUPLED])
@pytest.mark.parametrize("nodes", [2, 4, 6])
def test_a_bounded_source_drafts_a_tree_of_few_nodes_as_a_chain(
    head: DraftHead, sampling: SamplingParams, nodes: int
) -> None:
    """A verifier need not take more nodes than the plan has."""
    proposals = []
    for top_k in (1, 4):
        plan = SpeculationPlan(method=CHAIN.method, draft_tokens=nodes, top_k=top_k)
        engine, script = make_engine([on_device(head, bounded=True)]), Script(seed=13)
        engine.handle_message(1, script.start(plan=plan, sampling=sampling))
        engine.handle_message(1, script.verdict(12))
        proposals += drain(engine)
    assert len(proposals[1].tree) == nodes
    assert_same(*proposals)


def test_who_is_new_holds_up_nobody(head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its seat nor its draft comes before those of the others have left."""
    source = on_device(head)
    engine = make_engine([source])
    scripts = [Script(f"s{number}", seed=number) for number in range(4)]
    for script in scripts[:3]:
        engine.handle_message(1, script.start())
        engine.handle_message(1, script.verdict(10))
    drain(engine)
    order = list[str]()
    seat = source.kv_rows.open_slot

    def seated(sampling: SamplingParams) -> int:
        order.append("seated")
        return seat(sampling)

    def drafted() -> None:
        for batch in engine.draft_wanted():
            messages = [message for _, message in batch if isinstance(message, Proposals)]
            order.append(f"{sum(map(len, messages))} drafted")
        while engine.is_behind:
            engine.catch_up_session()

    monkeypatch.setattr(source.kv_rows, "open_slot", seated)
    engine.handle_message(1, scripts[3].start())
    engine.handle_message(1, scripts[3].verdict(8))
    for script in scripts[:3]:
        engine.handle_message(1, script.verdict(12))
    drafted()
    assert order == ["3 drafted", "seated", "1 drafted"]
    order.clear()
    for script in scripts:
        engine.handle_message(1, script.verdict(14))
    drafted()
    assert order == ["4 drafted"]
