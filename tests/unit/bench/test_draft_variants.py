"""Drafts that choose otherwise, beside those that are measured: on a CPU, in a tiny shape."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from outrider_bench.gpu.support.benchmark_context import Bench, add_arguments
from outrider_bench.gpu.support.draft_ablation import (
    TREE_SESSIONS,
    chains_by_choice,
    choices_by,
    scores_by,
    trees_by_score,
)
from outrider_bench.gpu.support.steps import DraftBench

from outrider.engine.kernels.drafts.tree_rank import TreeDraft

FLAGS = "--device cpu --dtype float32 --shape tiny --batches 1 --repeats 1"
LENGTHS = "--prompt-tokens 8 --output-tokens 72"


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    made = Bench(parser.parse_args(f"{FLAGS} {LENGTHS}".split()))
    yield made
    made.close()


@pytest.fixture(scope="module")
def draft(bench: Bench) -> Iterator[DraftBench]:
    with closing(DraftBench(bench, bench.random(), max_rows=1)) as made:
        yield made


@torch.inference_mode()
def test_a_softmax_changes_what_is_chosen_from_and_no_choice(draft: DraftBench) -> None:
    run, seen = draft.chain(1, 3, new_rows=2), []
    x = torch.randn(4, draft.weights.config.hidden_size)
    for name in ("argmax", "softmax"):
        with choices_by(draft, name):
            seen.append((draft.program.forward.logits(x).exp().sum(-1), run().tokens.tolist()))
            sums = draft.program.forward.logits(x).sum(-1)
            assert torch.allclose(sums, torch.ones(4)) == (name == "softmax")
    assert seen[0][1] == seen[1][1]
    torch.testing.assert_close(draft.program.forward.logits(x).exp().sum(-1), seen[0][0])


@torch.inference_mode()
def test_trees_by_products_have_the_same_candidates(draft: DraftBench) -> None:
    run = draft.tree(1, new_rows=2, num_nodes=2, top_k=2, depth=1)

    def grown(name: str) -> TreeDraft:
        with scores_by(name):
            return run()

    sums, products, after = grown("sums"), grown("products"), run()
    assert sorted(sums.tokens[0].tolist()) == sorted(products.tokens[0].tolist())
    assert (sums.logprobs < 0).all() and not (products.logprobs < 0).any()
    assert torch.equal(sums.logprobs, after.logprobs)


def test_every_case_is_measured(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    chains, trees = chains_by_choice(bench), trees_by_score(bench)
    assert [(row["draft_vocab"], row["sessions"]) for row in chains] == [(341, 1), (512, 1)]
    assert all(row[f"{name}_chain5_ms"] > 0 for row in chains for name in ("softmax", "argmax"))
    assert [row["sessions"] for row in trees] == [TREE_SESSIONS[0]]
    assert all(trees[0][f"{name}_ms"] > 0 for name in ("sums", "products"))
    assert "idea 1" in capsys.readouterr().out
