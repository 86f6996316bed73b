"""What drafts are worth one round ahead, on a tiny random model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outrider_bench.quality import look_ahead
from outrider_bench.quality.look_ahead import FAN_OUTS, SHAPES, OutcomeHits, emitted
from outrider_drafter.state.outcomes import CandidateLayout, NodeIndex, follow_verdict

from outrider.engine.training.data import TrainingSample
from outrider.engine.training.drafting import CHAIN, TREE, DraftedRows, score_trees, stable_rows
from outrider.engine.training.serving_report import SimulatedRound, simulate_rounds
from outrider.errors import InvalidRequestError
from tests.factories import make_eagle3_head, make_target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("look-ahead")
    return make_target(root / "target"), make_eagle3_head(root / "head")


def parse(models: tuple[Path, Path], *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    look_ahead.add_arguments(parser)
    target, head = models
    return parser.parse_args(["--model", str(target), "--head", str(head), *more])


def test_all_figures_are_written(models: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    more = f"--prompts {prompts} --max-tokens 18 --threads 1 --out {out}"
    look_ahead.run(parse(models, *more.split()))
    found: dict[str, Any] = json.loads(out.read_text())
    assert len(found["accuracy"]) == len(found["conditional"]) == 16
    assert set(found["shapes"]) == set(SHAPES)
    for figures in found["shapes"].values():
        ratio = figures["look_ahead"] / figures["lock_step"]
        assert figures["stale_over_fresh"] == pytest.approx(ratio, abs=1e-3)
        for outcomes in (figures["outcomes"], figures["outcomes_lock_step"]):
            assert outcomes["rounds"] > 0
            rates = [outcomes["hit_rate"][str(m)] for m in FAN_OUTS]
            assert rates == sorted(rates)
            assert 0.0 < rates[-1] <= 1.0
    assert found["commit"]
    assert found["date"]


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_hit_is_an_outcome_that_was_among_the_candidates(
    models: tuple[Path, Path], shape: Any
) -> None:
    loaded = look_ahead.load(parse(models))
    rng = np.random.default_rng(3)
    ids = [rng.integers(3, 384, size=n).astype(np.int32) for n in (40, 30)]
    samples = [TrainingSample(found[:8], found[8:]) for found in ids]
    rows = stable_rows(loaded.target, loaded.head, loaded.projection, samples)
    hits = OutcomeHits(loaded.head)
    within = rounds = 0

    def check(what: SimulatedRound) -> None:
        nonlocal within, rounds
        trees = [verdict.tree for verdict in what.verdicts]
        scored = score_trees(
            DraftedRows(loaded.head, what.rows, what.roots), trees, look_ahead.CANDIDATES
        )
        for verdict, found, ended in zip(what.verdicts, scored, what.ended, strict=True):
            if not ended:
                rounds += 1
                within += verdict.token in found.tokens[verdict.node + 1]
                told = follow_verdict(
                    CandidateLayout.of_candidates(NodeIndex.of_trees([verdict.tree]), found.tokens),
                    0,
                    emitted(verdict),
                )
                assert int(told.places[-1]) == verdict.node + 1
        hits.watch(what)

    simulate_rounds(loaded.head, rows, samples, shape, look_ahead=True, watch=check)
    found = hits.rates()
    assert found["rounds"] == rounds > 0
    rates = found["hit_rate"]
    assert isinstance(rates, dict)
    assert rates[str(FAN_OUTS[-1])] <= within / rounds


def test_answers_that_all_loop_are_refused(models: tuple[Path, Path]) -> None:
    loaded = look_ahead.load(parse(models))
    loop = TrainingSample(np.arange(5, dtype=np.int32), np.full(40, 7, dtype=np.int32))
    with pytest.raises(InvalidRequestError, match="every answer repeats itself"):
        look_ahead.measure(loaded, {"task": [loop]})
