"""A small model on the device against the same model on the host, on the kernels' CPU twins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from outrider_drafter.gpu.shapes import MODEL_BUCKETS
from outrider_drafter.gpu.small_model import GpuSmallModelProposer
from outrider_drafter.proposers.interface import LookAheadProposer
from outrider_drafter.proposers.small_model import SmallModelProposer
from outrider_drafter.server.draft_engine import ConnectionClosed

from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import validate_tree
from outrider.wire.messages import PlanChange
from tests.factories import make_target
from tests.unit.drafter.helpers import VOCAB, make_engine
from tests.unit.drafter.look_ahead_sessions import (
    ENDS,
    Followed,
    assert_captured,
    assert_same,
    launches,
    look_ahead,
    made,
    some_outcomes,
)
from tests.unit.drafter.mixed_sessions import MIX, random_ends, told

MODEL_MIX = [(replace(plan, method=DraftMethod.MODEL), sampling) for plan, sampling in MIX]
AHEAD = [(replace(plan, look_ahead=1), sampling) for plan, sampling in MODEL_MIX]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    directory = make_target(tmp_path_factory.mktemp("device-model"), layers=2)
    return load_target(directory, kv_tokens=32768, packed=False)


def on_device(model: TargetModel) -> GpuSmallModelProposer:
    return GpuSmallModelProposer(model, vocab_size=VOCAB, max_rows=8192, max_sessions=16)


def on_host(model: TargetModel) -> SmallModelProposer:
    return SmallModelProposer(model, vocab_size=VOCAB)


def test_every_session_gets_the_hosts_drafts_round_after_round(model: TargetModel) -> None:
    ends = random_ends(4, seed=1)
    engines = [make_engine([source]) for source in (on_device(model), on_host(model))]
    found, expected = (told(engine, MODEL_MIX, ends) for engine in engines)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() and len(ours) == len(MODEL_MIX)
        for name, proposal in ours.items():
            same = theirs[name]
            assert proposal.tree.tokens.tolist() == same.tree.tokens.tolist(), name
            assert proposal.tree.parents.tolist() == same.tree.parents.tolist(), name
            assert (proposal.distribution is None) == (same.distribution is None)
            validate_tree(proposal.tree, vocab_size=VOCAB, max_nodes=12)
    for engine in engines:
        engine.handle_message(1, ConnectionClosed())
        assert engine.num_sessions == 0


def test_candidates_and_branches_are_the_hosts(model: TargetModel) -> None:
    device, host = (Followed.begin(each, AHEAD) for each in (on_device(model), on_host(model)))
    assert isinstance(device.source, LookAheadProposer)
    for ends in ENDS:
        device.tell(ends)
        host.tell(ends)
    trees = device.trees()
    ours = device.source.score_proposals(device.lives(trees))
    theirs = host.source.score_proposals(host.lives(trees))
    for i, tree in enumerate(trees):
        width = ours.tokens[i].shape[1]
        assert len(ours.tokens[i]) == 1 + len(tree)
        np.testing.assert_array_equal(ours.tokens[i], theirs.tokens[i][:, :width], err_msg=str(i))
        np.testing.assert_allclose(ours.logprobs[i], theirs.logprobs[i][:, :width], atol=2e-3)
    outcomes = some_outcomes(trees, ours.tokens)
    mine, others = (
        made(device.source.draft_outcomes(outcomes)),
        made(host.source.draft_outcomes(outcomes)),
    )
    assert sorted(mine) == sorted(others) == list(range(len(outcomes)))
    for index in mine:
        assert_same(mine[index], others[index])
    host.end()


def test_only_what_is_captured_at_the_start_is_launched(
    model: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = launches(monkeypatch)
    source = GpuSmallModelProposer(
        model, vocab_size=VOCAB, max_rows=8192, max_sessions=16, bounded=True
    )
    look_ahead(source, AHEAD)
    assert_captured(launched, MODEL_BUCKETS)


def test_outcomes_of_a_tree_are_left_out_where_a_plan_now_asks_for_chains(
    model: TargetModel,
) -> None:
    """Branches below chains begin with what was scored; below trees their paths would be run."""
    tree_plan = SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=8, top_k=4, look_ahead=1)
    followed = Followed.begin(on_device(model), [(tree_plan, SamplingParams())])
    followed.tell([12])
    trees = followed.trees()
    chain_plan = replace(tree_plan, draft_tokens=3, top_k=1)
    followed.engine.handle_message(
        1, PlanChange(handle=followed.scripts[0].handle, plan=chain_plan)
    )
    scored = followed.source.score_proposals(followed.lives(trees))
    outcomes = some_outcomes(trees, scored.tokens)
    assert outcomes and not made(followed.source.draft_outcomes(outcomes))
