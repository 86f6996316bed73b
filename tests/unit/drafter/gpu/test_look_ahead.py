"""The device's look-ahead against the host's, on the kernels' CPU twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from outrider_drafter.gpu import look_ahead as device_ahead
from outrider_drafter.gpu import outcome_scoring
from outrider_drafter.gpu.eagle import GpuEagleProposer
from outrider_drafter.gpu.paged_kv import BLOCK_TOKENS
from outrider_drafter.gpu.shapes import Buckets
from outrider_drafter.proposers.eagle import EagleProposer
from outrider_drafter.proposers.interface import LookAheadProposer, Outcome

from outrider.engine.heads import DraftHead
from outrider.spec.digest import extend_digest
from outrider.spec.noise import (
    NoiseStream,
    bits_from_keys,
    gumbel_from_bits,
    noise_keys,
    prefix_keys,
)
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import ROOT, depths, path, validate_tree
from outrider.wire.messages import Proposal, Proposals
from tests.factories import make_eagle3_head
from tests.unit.drafter.device_drafting import on_device
from tests.unit.drafter.helpers import CHAIN, TREE, VOCAB, drain
from tests.unit.drafter.look_ahead_sessions import (
    AHEAD,
    ENDS,
    Followed,
    Made,
    assert_captured,
    assert_same,
    launches,
    look_ahead,
    made,
    some_outcomes,
)
from tests.unit.drafter.mixed_sessions import COUPLED, REJECTION
from tests.unit.engine.device.draft_sessions import plain_head


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    return plain_head(make_eagle3_head(tmp_path_factory.mktemp("device-ahead")))


def test_only_what_is_captured_at_the_start_is_launched(
    head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches(monkeypatch)
    look_ahead(on_device(head, bounded=True), AHEAD)
    assert_captured(launched, Buckets())


def both(
    head: DraftHead,
    mix: Sequence[tuple[SpeculationPlan, SamplingParams]] = AHEAD,
    *,
    max_len: int = 512,
) -> tuple[Followed, Followed]:
    """The same sessions on the device and on the host, with the same drafts."""
    device = Followed.begin(on_device(head), mix, max_len=max_len)
    host = Followed.begin(EagleProposer(head, max_rows=8192), mix, max_len=max_len)
    for ends in ENDS:
        for each in (device, host):
            each.tell(ends[: len(mix)])
    return device, host


def test_a_device_source_is_one_that_looks_ahead(head: DraftHead) -> None:
    assert isinstance(on_device(head), LookAheadProposer)


def test_candidates_at_every_place_are_the_hosts(head: DraftHead) -> None:
    device, host = both(head)
    trees = device.trees()
    ours = device.source.score_proposals(device.lives(trees))
    theirs = host.source.score_proposals(host.lives(trees))
    for i, tree in enumerate(trees):
        count = outcome_scoring.NUM_CANDIDATES
        assert ours.tokens[i].shape == (1 + len(tree), count)
        np.testing.assert_allclose(
            ours.logprobs[i], theirs.logprobs[i][:, :count], atol=2e-3, err_msg=str(AHEAD[i])
        )
        np.testing.assert_array_equal(
            ours.tokens[i], theirs.tokens[i][:, :count], err_msg=str(AHEAD[i])
        )


def test_branches_of_every_kind_of_session_are_the_hosts(head: DraftHead) -> None:
    device, host = both(head)
    trees = device.trees()
    scored = device.source.score_proposals(device.lives(trees))
    host.source.score_proposals(host.lives(trees))
    outcomes = some_outcomes(trees, scored.tokens)
    ours, theirs = (
        made(device.source.draft_outcomes(outcomes)),
        made(host.source.draft_outcomes(outcomes)),
    )
    assert sorted(ours) == sorted(theirs) == list(range(len(outcomes)))
    for index, outcome in enumerate(outcomes):
        assert_same(ours[index], theirs[index])
        validate_tree(ours[index].tree, vocab_size=VOCAB, max_nodes=12)
        assert len(ours[index].tree), outcome


def test_sessions_are_drafted_as_if_nobody_had_looked_ahead(head: DraftHead) -> None:
    """Drafts before, between and after look-ahead, of which some is left before its end."""
    plain = Followed.begin(on_device(head), AHEAD)
    looking = Followed.begin(on_device(head), AHEAD)
    for ends in (*ENDS, [end + 4 for end in ENDS[1]]):
        for each in (plain, looking):
            each.tell(ends)
        assert looking.proposals.keys() == plain.proposals.keys()
        for name, proposal in looking.proposals.items():
            expected = plain.proposals[name]
            assert proposal.tree.tokens.tolist() == expected.tree.tokens.tolist()
            assert proposal.tree.parents.tolist() == expected.tree.parents.tolist()
        trees = looking.trees()
        scored = looking.source.score_proposals(looking.lives(trees))
        next(iter(looking.source.draft_outcomes(some_outcomes(trees, scored.tokens))))


def test_a_proposal_that_was_hit_is_scored_without_a_draft(head: DraftHead) -> None:
    device, host = both(head)
    for each in (device, host):
        for script in each.scripts:
            each.engine.handle_message(1, script.verdict(script.told + 3, draft_wanted=True))
    trees = device.trees()
    ours = device.source.score_proposals(device.lives(trees))
    theirs = host.source.score_proposals(host.lives(trees))
    for i in range(len(trees)):
        np.testing.assert_array_equal(
            ours.tokens[i], theirs.tokens[i][:, : ours.tokens[i].shape[1]]
        )


def test_branching_writes_nothing_of_any_session(head: DraftHead) -> None:
    device, _ = both(head)
    source = device.source
    assert isinstance(source, GpuEagleProposer)
    scored = source.score_proposals(device.lives(device.trees()))
    scratch = source.kv_rows.scratch.start * BLOCK_TOKENS
    before = source.kv_rows.storage[..., :scratch, :].clone()
    tables, used = source.kv_rows.tables.clone(), source.used_rows
    assert made(source.draft_outcomes(some_outcomes(device.trees(), scored.tokens)))
    assert torch.equal(source.kv_rows.storage[..., :scratch, :], before)
    assert torch.equal(source.kv_rows.tables, tables)
    assert source.used_rows == used
    assert source.kv_rows.storage[..., scratch:, :].any(), "branches have rows of their own"


def test_what_look_ahead_took_is_given_back_with_the_session(head: DraftHead) -> None:
    device, _ = both(head)
    scored = device.source.score_proposals(device.lives(device.trees()))
    assert made(device.source.draft_outcomes(some_outcomes(device.trees(), scored.tokens)))
    device.end()
    assert isinstance(device.source, GpuEagleProposer)
    assert device.source.used_rows == 0
    assert (device.source.kv_rows.tables == device.source.kv_rows.scratch.start - 1).all()


def test_a_law_of_a_branch_is_drawn_from_by_noise_of_its_prefix(head: DraftHead) -> None:
    """The same prefix gives the same draft, whoever's branch it is; another prefix other noise."""
    plan = replace(CHAIN, look_ahead=1)
    device = Followed.begin(on_device(head), [(plan, REJECTION)])
    device.tell([14])
    tree = device.trees()[0]
    scored = device.source.score_proposals(device.lives([tree]))
    token = next(t for t in scored.tokens[0][0].tolist() if t != tree.tokens[0])
    (branch,) = made(device.source.draft_outcomes([Outcome(0, ROOT, token)])).values()
    assert branch.law is not None
    session = device.session(0)
    digest = extend_digest(session.digest, (token,))
    key = int(prefix_keys(REJECTION.stream_key(NoiseStream.DRAFT), digest))
    for step in range(len(branch.tree)):
        own = slice(branch.law.offsets[step], branch.law.offsets[step + 1])
        ids, counts = branch.law.ids[own], branch.law.counts[own]
        assert drawn(key, len(session.tokens) + 1 + step, ids, counts) == branch.tree.tokens[step]


def drawn(key: int, position: int, ids: NDArray[np.int32], counts: NDArray[np.uint16]) -> int:
    noise = gumbel_from_bits(bits_from_keys(noise_keys(key, position), ids))
    return int(ids[(np.log(counts.astype(np.float64)) + noise).argmax()])


def test_without_look_ahead_a_law_is_drawn_from_by_the_sessions_noise(head: DraftHead) -> None:
    for ahead in (0, 1):
        device = Followed.begin(on_device(head), [(replace(CHAIN, look_ahead=ahead), REJECTION)])
        device.tell([14])
        proposal, session = device.proposals["s0"], device.session(0)
        key = REJECTION.stream_key(NoiseStream.DRAFT)
        if ahead:
            key = int(prefix_keys(key, session.digest))
        distribution = proposal.distribution
        assert distribution is not None
        for step, token in enumerate(proposal.tree.tokens.tolist()):
            own = slice(distribution.offsets[step], distribution.offsets[step + 1])
            assert (
                drawn(
                    key, len(session.tokens) + step, distribution.ids[own], distribution.counts[own]
                )
                == token
            )


@pytest.mark.parametrize("plan", [CHAIN, TREE])
def test_near_the_end_of_a_session_branches_are_cut_or_left_out(
    head: DraftHead, plan: SpeculationPlan
) -> None:
    mix = [(replace(plan, look_ahead=1), SamplingParams())]
    max_len = ENDS[1][0] + 4
    device, host = both(head, mix, max_len=max_len)
    trees = device.trees()
    scored = device.source.score_proposals(device.lives(trees))
    host.source.score_proposals(host.lives(trees))
    outcomes = some_outcomes(trees, scored.tokens)
    ours, theirs = (
        made(device.source.draft_outcomes(outcomes)),
        made(host.source.draft_outcomes(outcomes)),
    )
    assert sorted(ours) == sorted(theirs)
    assert 0 < len(ours) < len(outcomes)
    for index, branch in ours.items():
        assert_same(branch, theirs[index])
        used = len(path(trees[0].parents, outcomes[index].node)) + 1
        room = device.session(0).draft_levels_left - used
        assert int(depths(branch.tree.parents).max()) <= room


def test_a_bounded_source_branches_in_shapes_of_the_family(head: DraftHead) -> None:
    plan = SpeculationPlan(method=CHAIN.method, draft_tokens=6, look_ahead=1)
    found = []
    for bounded in (False, True):
        device = Followed.begin(on_device(head, bounded=bounded), [(plan, COUPLED)])
        device.tell([14])
        trees = device.trees()
        scored = device.source.score_proposals(device.lives(trees))
        found.append(made(device.source.draft_outcomes(some_outcomes(trees, scored.tokens))))
    assert found[0].keys() == found[1].keys()
    for index, branch in found[0].items():
        assert len(branch.tree) == 6
        assert_same(found[1][index], branch)


def test_places_that_cannot_be_held_have_no_candidates_and_no_branches(
    head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = [(replace(CHAIN, look_ahead=1), SamplingParams()), (replace(TREE, look_ahead=1), COUPLED)]
    device = Followed.begin(on_device(head), mix)
    device.tell([14, 18])
    monkeypatch.setattr(device_ahead, "MAX_SCORED_NODES", 8)
    trees = device.trees()
    scored = device.source.score_proposals(device.lives(trees))
    assert np.isfinite(scored.logprobs[0]).all()
    assert np.isneginf(scored.logprobs[1]).all() and (scored.tokens[1] == -1).all()
    outcomes = [Outcome(1, ROOT, 5), Outcome(0, ROOT, 5), Outcome(1, 2, 9)]
    assert list(made(device.source.draft_outcomes(outcomes))) == [1]


def test_a_session_without_room_for_look_ahead_is_still_drafted(head: DraftHead) -> None:
    source = on_device(head, max_rows=2 * BLOCK_TOKENS)
    device = Followed.begin(source, [(replace(TREE, look_ahead=1), SamplingParams())])
    device.tell([19])
    trees = device.trees()
    scored = device.source.score_proposals(device.lives(trees))
    assert np.isneginf(scored.logprobs[0]).all()
    assert list(device.source.draft_outcomes([Outcome(0, ROOT, 3)])) == []
    device.tell([20])
    assert len(device.trees()[0]) == TREE.draft_tokens


def test_a_source_that_will_not_be_asked_scores_nothing(head: DraftHead) -> None:
    source = GpuEagleProposer(
        head, max_rows=512, max_sessions=2, dtype=torch.float32, device="cpu", look_ahead=False
    )
    device = Followed.begin(source, [(CHAIN, SamplingParams())])
    device.tell([14])
    scored = source.score_proposals(device.lives(device.trees()))
    assert np.isneginf(scored.logprobs[0]).all()
    assert list(source.draft_outcomes([Outcome(0, ROOT, 3)])) == []
    assert len(source.kv_rows.scratch) == 0


def test_features_of_nan_harm_no_other_branch(head: DraftHead) -> None:
    mix = [(replace(plan, look_ahead=1), SamplingParams()) for plan in (CHAIN, CHAIN, TREE)]
    found = []
    for spoilt in (False, True):
        device = Followed.begin(on_device(head), mix)
        if spoilt:
            device.scripts[1].features[:] = np.nan
        device.tell([14, 15, 16])
        trees = device.trees()
        outcomes = [Outcome(live, node, 7) for live in range(3) for node in (ROOT, 1)]
        # The second time what the first one wrote lies about.
        for _ in range(2):
            device.source.score_proposals(device.lives(trees))
            found.append(made(device.source.draft_outcomes(outcomes)))
    assert len(found) == 4
    for index in (0, 1, 4, 5):
        for branches in found[1:]:
            assert_same(branches[index], found[0][index])


def test_no_proposals_and_no_outcomes_give_nothing(head: DraftHead) -> None:
    source = on_device(head)
    assert list(source.draft_outcomes([Outcome(0, ROOT, 3)])) == []
    scored = source.score_proposals([])
    assert list(scored.tokens) == [] and list(source.draft_outcomes([])) == []


def ahead_of(followed: Followed) -> dict[int, Proposal]:
    """What an engine drafts ahead of verdicts, by prefix digest."""
    return {
        proposal.prefix_digest: proposal
        for together in followed.engine.run_look_ahead()
        for _, message in together
        if isinstance(message, Proposals)
        for proposal in message.iter_proposals()
    }


def test_an_engine_sends_the_hosts_drafts_ahead_and_answers_a_hit_with_none(
    head: DraftHead,
) -> None:
    mix = [(replace(plan, fan_out=16), sampling) for plan, sampling in AHEAD]
    device, host = both(head, mix)
    ours, theirs = ahead_of(device), ahead_of(host)
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 0.8 * len(theirs) and len(theirs) > 100
    for digest in shared:
        one, other = ours[digest], theirs[digest]
        assert one.prefix_len == other.prefix_len
        assert_same(Made(one.tree, one.distribution), Made(other.tree, other.distribution))
    script, session = device.scripts[0], device.session(0)
    known, next_digest = len(session.tokens), partial(extend_digest, session.digest)
    token = next(t for t in range(VOCAB) if next_digest((t,)) in ours)
    script.tokens[known] = token
    device.engine.handle_message(1, script.verdict(known + 1))
    assert drain(device.engine) == [], "what was sent ahead is the live proposal"
    further = ahead_of(device)
    assert further and all(p.handle == script.handle for p in further.values())
