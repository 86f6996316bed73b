"""A small model's drafts on a GPU: graphs against eager launches, and the device against the
host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_drafter.gpu.small_model import GpuSmallModelProposer
from outrider_drafter.proposers.interface import LookAheadProposer, Outcome, OutcomeScores
from outrider_drafter.proposers.small_model import SmallModelProposer

from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from outrider.spec.plan import DraftMethod
from tests.factories import make_target
from tests.unit.drafter.helpers import VOCAB
from tests.unit.drafter.look_ahead_sessions import (
    AHEAD,
    ENDS,
    Followed,
    Made,
    assert_same,
    made,
    some_outcomes,
)

pytestmark = pytest.mark.gpu
MIX = [(replace(plan, method=DraftMethod.MODEL), sampling) for plan, sampling in AHEAD]
Round = tuple[OutcomeScores, list[Outcome], dict[int, Made]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("gpu-model"), layers=2)


def load(checkpoint: Path, dtype: torch.dtype, device: str = "cuda:0") -> TargetModel:
    return load_target(checkpoint, dtype=dtype, device=device, kv_tokens=32768, packed=False)


def on_gpu(checkpoint: Path, dtype: torch.dtype, *, graphs: bool) -> GpuSmallModelProposer:
    return GpuSmallModelProposer(
        load(checkpoint, dtype),
        vocab_size=VOCAB,
        max_rows=8192,
        max_sessions=16,
        cuda_graphs=graphs,
    )


def look_ahead(source: LookAheadProposer, given: list[Round] | None = None) -> list[Round]:
    """Two rounds of sessions of every kind; outcomes, where given, those of another source."""
    followed, rounds = Followed.begin(source, MIX), list[Round]()
    for number, ends in enumerate(ENDS):
        followed.tell(ends)
        trees = followed.trees()
        scored = source.score_proposals(followed.lives(trees))
        outcomes = given[number][1] if given else some_outcomes(trees, scored.tokens)
        rounds.append((scored, outcomes, made(source.draft_outcomes(outcomes))))
    followed.end()
    return rounds


def same(ours: list[Round], theirs: list[Round]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in zip(mine[0].tokens, other[0].tokens, strict=True):
            np.testing.assert_array_equal(one, two[:, : one.shape[1]])
        assert sorted(mine[2]) == sorted(other[2])
        for index in mine[2]:
            assert_same(mine[2][index], other[2][index], counts=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_draft_a_round_ahead_as_eager_launches_do(
    checkpoint: Path, dtype: torch.dtype
) -> None:
    eager = look_ahead(on_gpu(checkpoint, dtype, graphs=False))
    source = on_gpu(checkpoint, dtype, graphs=True)
    for _ in range(2):
        same(look_ahead(source), eager)
    assert len(source.graphs) > 0


def test_the_device_drafts_what_the_host_on_a_cpu_does(checkpoint: Path) -> None:
    cpu = SmallModelProposer(load(checkpoint, torch.float32, "cpu"), vocab_size=VOCAB)
    theirs = look_ahead(cpu)
    same(look_ahead(on_gpu(checkpoint, torch.float32, graphs=True), theirs), theirs)


def test_a_family_is_captured_whole(checkpoint: Path) -> None:
    source = on_gpu(checkpoint, torch.bfloat16, graphs=True)
    source.warm_up()
    captured = len(source.graphs)
    look_ahead(source)
    assert len(source.graphs) == captured
