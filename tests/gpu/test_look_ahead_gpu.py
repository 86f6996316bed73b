"""Look-ahead on a GPU: graphs against eager launches, and the device against the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_drafter.gpu.eagle import GpuEagleProposer
from outrider_drafter.gpu.outcome_scoring import NUM_SWEEPS
from outrider_drafter.proposers.eagle import EagleProposer
from outrider_drafter.proposers.interface import LookAheadProposer, Outcome, OutcomeScores

from outrider.engine.kernels.drafts.proposal_layout import layout_proposals
from outrider.spec.sampling import Rule
from tests.factories import make_eagle3_head
from tests.unit.drafter.look_ahead_sessions import (
    AHEAD,
    ENDS,
    Followed,
    Made,
    assert_same,
    made,
    some_outcomes,
)
from tests.unit.engine.device.draft_sessions import plain_head
from tests.unit.engine.kernels.trees import random_parents

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3_head(tmp_path_factory.mktemp("gpu-ahead-head"))


def on_gpu(
    checkpoint: Path, dtype: torch.dtype, *, graphs: bool, sweeps: int = NUM_SWEEPS
) -> GpuEagleProposer:
    return GpuEagleProposer(
        plain_head(checkpoint, dtype=dtype, device="cuda:0"),
        max_rows=8192,
        max_context=256,
        max_sessions=16,
        dtype=dtype,
        device="cuda:0",
        cuda_graphs=graphs,
        sweeps=sweeps,
    )


Round = tuple[OutcomeScores, list[Outcome], dict[int, Made]]


def look_ahead(source: LookAheadProposer, given: list[Round] | None = None) -> list[Round]:
    """Two rounds of sessions of every kind; outcomes, where given, those of another source."""
    followed, rounds = Followed.begin(source, AHEAD), list[Round]()
    for number, ends in enumerate(ENDS):
        followed.tell(ends)
        trees = followed.trees()
        scored = source.score_proposals(followed.lives(trees))
        outcomes = given[number][1] if given else some_outcomes(trees, scored.tokens)
        rounds.append((scored, outcomes, made(source.draft_outcomes(outcomes))))
    followed.end()
    return rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_look_ahead_as_eager_launches_do(checkpoint: Path, dtype: torch.dtype) -> None:
    eager = look_ahead(on_gpu(checkpoint, dtype, graphs=False))
    source = on_gpu(checkpoint, dtype, graphs=True)
    graphed = look_ahead(source)
    captured = len(source.graphs)
    replayed = look_ahead(source)
    assert len(source.graphs) == captured > 0, "the second time everything is replayed"
    for found in (graphed, replayed):
        for ours, theirs in zip(found, eager, strict=True):
            for one, other in zip(ours[0].tokens, theirs[0].tokens, strict=True):
                np.testing.assert_array_equal(one, other)
            assert ours[1] == theirs[1] and ours[2].keys() == theirs[2].keys()
            for index, branch in ours[2].items():
                assert_same(branch, theirs[2][index])


def test_the_device_looks_ahead_as_the_host_on_a_cpu_does(checkpoint: Path) -> None:
    # With as many sweeps as a tree has levels, or more, scores are exact.
    device = look_ahead(on_gpu(checkpoint, torch.float32, graphs=True, sweeps=64))
    host = look_ahead(EagleProposer(plain_head(checkpoint), max_rows=8192), device)
    for ours, theirs in zip(device, host, strict=True):
        for i, (_, sampling) in enumerate(AHEAD):
            width = ours[0].tokens[i].shape[1]
            if sampling.effective_rule is not Rule.COUPLED:
                # Ranks by estimated noise may change places.
                np.testing.assert_array_equal(ours[0].tokens[i], theirs[0].tokens[i][:, :width])
            np.testing.assert_allclose(
                ours[0].logprobs[i], theirs[0].logprobs[i][:, :width], atol=1e-2
            )
        assert ours[2].keys() == theirs[2].keys()
        for index, branch in ours[2].items():
            assert_same(branch, theirs[2][index])


@torch.inference_mode()
def test_a_warmed_up_source_captures_nothing_more(checkpoint: Path) -> None:
    source = GpuEagleProposer(
        plain_head(checkpoint, dtype=torch.bfloat16, device="cuda:0"),
        max_rows=8192,
        max_context=256,
        max_sessions=16,
        bounded=True,
    )
    source.warm_up()
    source.graphs.sealed = False
    captured = len(source.graphs)
    look_ahead(source)
    assert len(source.graphs) == captured


def test_given_trees_are_laid_out_as_by_the_twin() -> None:
    rng = np.random.default_rng(5)
    for batch, count in ((1, 5), (4, 32), (8, 64)):
        parents = torch.tensor([random_parents(rng, count) for _ in range(batch)]).int()
        live = torch.from_numpy(rng.integers(0, 9999, batch)).int()
        found = layout_proposals(parents.cuda(), live.cuda())
        for ours, theirs in zip(found, layout_proposals(parents, live), strict=True):
            assert torch.equal(ours.cpu(), theirs)
