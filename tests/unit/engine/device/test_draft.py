"""Drafting on device tensors (the kernels' PyTorch references), against the drafter's host path."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from outrider_drafter.proposers.tree_growth import BeamGrowth, ChainGrowth
from torch import Tensor

from outrider.engine.device.drafting.eagle_weights import HeadWeights, can_extract
from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.heads import DraftHead, load_head
from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.engine.linear import Linear, PlainLinear, plain_weights
from outrider.errors import FailedPreconditionError
from outrider.spec.sampling import Rule, SamplingParams
from tests.factories import make_eagle3_head
from tests.unit.engine.device.draft_sessions import (
    BLOCK,
    BLOCKS,
    DETERMINISTIC,
    HIDDEN,
    MIXED,
    ROUNDS,
    VOCAB,
    Sessions,
    plain_head,
    total,
    tree_of,
)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    return plain_head(make_eagle3_head(tmp_path_factory.mktemp("draft-head")))


@torch.inference_mode()
def test_chains_are_the_hosts_round_after_round(head: DraftHead) -> None:
    sessions = Sessions(head, MIXED)
    for starts, counts in ROUNDS:
        chain = sessions.program.draft_chain(
            sessions.rows(starts, counts, 9), state=sessions.state, length=5
        )
        host = sessions.on_host(total(starts, counts), [ChainGrowth(5) for _ in MIXED])
        for b in range(len(MIXED)):
            assert chain.tokens[b].tolist() == host[b].tree.tokens.tolist()
            assert head.target_ids[chain.columns[b].long()].tolist() == chain.tokens[b].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("width", [9, 40])
def test_pruning_dead_rows_changes_no_draft(head: DraftHead, width: int) -> None:
    """Both ways of pruning: few rows share one projection, many are split from their queries."""
    pruned, whole = Sessions(head, MIXED), Sessions(head, MIXED)
    for starts, counts in ROUNDS:
        drafts = [
            s.program.draft_chain(
                s.rows(starts, counts, width), state=s.state, length=4, prune=s is pruned
            ).tokens[:-1]
            for s in (pruned, whole)
        ]
        assert drafts[0].tolist() == drafts[1].tolist()
    x = [
        s.program.catch_up(s.rows([11, 15, 5], [3, 1, 9], width), prune=s is pruned)[:-1]
        for s in (pruned, whole)
    ]
    torch.testing.assert_close(x[0], x[1], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_stable_rows_equal_a_recomputation_and_nothing_else_is_touched(head: DraftHead) -> None:
    grown, fresh = Sessions(head, MIXED), Sessions(head, MIXED)
    for starts, counts in ROUNDS:
        grown.program.draft_chain(grown.rows(starts, counts, 9), state=grown.state, length=5)
    lengths = total(*ROUNDS[-1])
    fresh.forward.write_rows(fresh.rows([0, 0, 0], lengths, max(lengths)))
    for b, length in enumerate(lengths):
        torch.testing.assert_close(grown.kept(b, length), fresh.kept(b, length))
        assert fresh.kept(b, BLOCKS * BLOCK)[:, :, length:].eq(0).all(), "a dead row was written"
        # K - 1 draft rows follow; the furthest of any round here.
        assert grown.kept(b, BLOCKS * BLOCK)[:, :, length + 4 :].eq(0).all()
    assert grown.storage[:, :, :, -BLOCK:].eq(0).all(), "padding rows are written nowhere"


@torch.inference_mode()
def test_laws_are_the_softmax_that_rejection_sessions_draw_from(head: DraftHead) -> None:
    sampling = [SamplingParams(temperature=0.8, rule=Rule.REJECTION, seed=i) for i in range(3)]
    sessions = Sessions(head, sampling)
    rows = sessions.rows([0, 0, 0], [4, 6, 3], 6)
    distributions = torch.zeros(len(sampling) + 1, 4, len(sessions.forward.vocabulary.target_ids))
    chain = sessions.program.draft_chain(
        rows, state=sessions.state, length=3, draft_distributions=distributions
    )
    assert distributions[-1].eq(0).all(), "padding has no law"
    assert distributions[:, 3].eq(0).all()
    probs = distributions[rows.slots.long(), :3]
    x = sessions.program.catch_up(rows)
    expected = (sessions.forward.logits(x) / 0.8).softmax(-1)
    torch.testing.assert_close(probs[:-1, 0], expected[:-1])
    drawn = probs.gather(2, chain.columns[:, :, None].long())
    assert (drawn[:-1] > 0).all()
    modes = probs[:-1].argmax(-1)
    assert modes.tolist() != chain.columns[:-1].tolist(), "noise must decide some of the draws"


@torch.inference_mode()
def test_rejection_sessions_draw_from_distributions_beside_others(head: DraftHead) -> None:
    rejection = SamplingParams(temperature=0.8, rule=Rule.REJECTION, seed=4)
    sessions = Sessions(head, (*MIXED, rejection))
    rows, limits = sessions.rows([0] * 4, [4, 6, 3, 5], 6), DistributionLimits(max_ids=20)
    plain = sessions.program.draft_chain(rows, state=sessions.state, length=3)
    alone = sessions.program.draft_chain(
        rows, state=sessions.state, length=3, distribution_limits=limits
    )
    mixed = sessions.program.draft_chain(
        rows, state=sessions.state, length=3, distribution_limits=limits, mixed_rules=True
    )
    assert mixed.tokens[[0, 1, 2, 4]].tolist() == plain.tokens[[0, 1, 2, 4]].tolist()
    assert mixed.tokens[3].tolist() == alone.tokens[3].tolist()
    assert mixed.distributions is not None and alone.distributions is not None
    sizes = mixed.distributions.sizes
    assert sizes[[0, 1, 2, 4]].eq(0).all() and (sizes[3] > 0).all()
    for step, size in enumerate(sizes[3].tolist()):
        here = (slice(None), 3, step, slice(size))
        assert torch.equal(mixed.distributions.entries[here], alone.distributions.entries[here])
        assert int(mixed.columns[3, step]) in mixed.distributions.entries[here][0].tolist()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("nodes", "top_k", "depth"), [(12, 4, 4), (24, 6, 4), (3, 5, 3), (6, 3, 1), (30, 8, 6)]
)
def test_trees_are_the_hosts(head: DraftHead, nodes: int, top_k: int, depth: int) -> None:
    sessions = Sessions(head, DETERMINISTIC)
    for starts, counts in ROUNDS[:2]:
        draft = sessions.program.draft_tree(
            sessions.rows(starts, counts, 9),
            state=sessions.state,
            num_nodes=nodes,
            top_k=top_k,
            depth=depth,
        )
        growths = [BeamGrowth(num_nodes=nodes, top_k=top_k, depth=depth) for _ in DETERMINISTIC]
        host = sessions.on_host(total(starts, counts), growths)
        for b in range(len(DETERMINISTIC)):
            tokens, parents, logprobs = tree_of(draft, b)
            assert tokens == host[b].tree.tokens.tolist()
            assert parents == host[b].tree.parents.tolist()
            np.testing.assert_allclose(logprobs, host[b].tree.logprobs, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["norm_output", "norm_before_residual"])
def test_every_kind_of_eagle3_head_drafts_as_on_the_host(tmp_path: Path, name: str) -> None:
    make_eagle3_head(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: True}))
    head = plain_head(tmp_path)
    assert getattr(head.config, name)
    sessions = Sessions(head, MIXED)
    chain = sessions.program.draft_chain(
        sessions.rows([0, 0, 0], [5, 9, 2], 9), state=sessions.state, length=4
    )
    host = sessions.on_host([5, 9, 2], [ChainGrowth(4) for _ in MIXED])
    for b in range(len(MIXED)):
        assert chain.tokens[b].tolist() == host[b].tree.tokens.tolist()


def test_features_of_nan_leave_the_other_sessions_alone(head: DraftHead) -> None:
    with torch.inference_mode():
        clean, spoilt = Sessions(head, MIXED), Sessions(head, MIXED)
        spoilt.features[0] = torch.nan
        chains = [
            s.program.draft_chain(s.rows(*ROUNDS[0], 9), state=s.state, length=4).tokens
            for s in (clean, spoilt)
        ]
        assert chains[0][1:3].tolist() == chains[1][1:3].tolist()
        trees = spoilt.program.draft_tree(
            spoilt.rows(*ROUNDS[0], 9), state=spoilt.state, num_nodes=8, top_k=3, depth=3
        )
    assert set(trees.parents[0].tolist()) == {PADDING_NODE}, "nothing is proposed from NaN"


def test_weights_are_shared_with_the_head_and_invert_its_vocabulary(head: DraftHead) -> None:
    weights = HeadWeights.from_head(head)
    assert can_extract(head)
    again = HeadWeights.from_head(head)
    assert again.qkv.data_ptr() == weights.qkv.data_ptr()
    assert torch.equal(weights.qkv, again.qkv)
    assert isinstance(head, Eagle3Head)
    query, kv = (plain_weights(linear) for linear in head.block.weights.qkv)
    for projection, (weight, bias) in ((query, weights.query), (kv, weights.kv)):
        assert projection.weight.data_ptr() == weight.data_ptr()
        assert projection.bias is bias is None
    inverse = weights.draft_columns[weights.target_ids]
    assert inverse.tolist() == list(range(len(weights.target_ids)))
    assert int((weights.draft_columns >= 0).sum()) == len(weights.target_ids)


@torch.inference_mode()
@pytest.mark.parametrize("biased", [(0, 1), (0,), (1,)])
def test_a_bias_of_either_projection_is_kept(tmp_path: Path, biased: tuple[int, ...]) -> None:
    head = plain_head(make_eagle3_head(tmp_path))
    assert isinstance(head, Eagle3Head)
    for index in biased:
        linear = plain_weights(head.block.weights.qkv[index])
        linear.bias = torch.randn(linear.weight.shape[0])
    sessions = Sessions(head, MIXED)
    bias = sessions.forward.weights.qkv_bias
    again = HeadWeights.from_head(head).qkv_bias
    assert bias is not None and again is not None and bias.data_ptr() == again.data_ptr()
    chain = sessions.program.draft_chain(
        sessions.rows([0, 0, 0], [5, 9, 2], 9), state=sessions.state, length=4
    )
    fresh = plain_head(tmp_path)
    assert isinstance(fresh, Eagle3Head)
    for index in biased:
        own = head.block.weights.qkv[index]
        plain_weights(fresh.block.weights.qkv[index]).bias = plain_weights(own).bias
    host = Sessions(fresh, MIXED).on_host([5, 9, 2], [ChainGrowth(4) for _ in MIXED])
    for b in range(len(MIXED)):
        assert chain.tokens[b].tolist() == host[b].tree.tokens.tolist()


class OpaqueLinear:
    """A projection whose weights only it knows, as packed ones are."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._plain = PlainLinear(weight, bias)

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._plain(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._plain.add(x, residual)


NUM_LINEARS = 6
"""Query, KV, output, MLP (two), lm_head."""


@pytest.mark.parametrize("opaque", range(NUM_LINEARS))
def test_a_head_with_a_projection_that_is_not_plain_is_refused(tmp_path: Path, opaque: int) -> None:
    made: list[Linear] = []

    def make(weight: Tensor, bias: Tensor | None = None) -> Linear:
        kind = OpaqueLinear if len(made) == opaque else PlainLinear
        made.append(kind(weight, bias))
        return made[-1]

    make_eagle3_head(tmp_path)
    head = load_head(tmp_path, embedding=torch.zeros(VOCAB, HIDDEN), make_linear=make)
    assert len(made) == NUM_LINEARS
    assert not can_extract(head)
    with pytest.raises(FailedPreconditionError) as caught:
        HeadWeights.from_head(head)
    assert caught.value.reason == "PACKED_WEIGHTS"
