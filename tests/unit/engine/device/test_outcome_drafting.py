"""Scoring and branching on device tensors (the kernels' PyTorch references): against sessions that
really are where a branch would be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows, ProposalNodes
from outrider.engine.device.drafting.look_ahead_program import OutcomeRows
from outrider.engine.heads import DraftHead
from tests.factories import make_eagle3_head
from tests.unit.engine.device.draft_sessions import (
    BLOCK,
    BLOCKS,
    MIXED,
    VOCAB,
    Sessions,
    plain_head,
    tree_of,
)

OWN, BRANCHES = 4, 3
EXACT = 64
"""Sweeps, as many as any tree has levels."""
LENGTHS = (6, 9, 12)
"""Real rows of the sessions: blocks that are partly filled, and one that is full."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    return plain_head(make_eagle3_head(tmp_path_factory.mktemp("ahead-head")))


def sessions(head: DraftHead) -> Sessions:
    return Sessions(head, MIXED, scratch=OWN * BRANCHES)


def scratch(s: Sessions) -> Tensor:
    first = len(MIXED) * BLOCKS + 1
    own = torch.arange(first, first + OWN * BRANCHES, dtype=torch.int32).view(BRANCHES, OWN)
    return torch.cat((own, torch.full((BRANCHES, 1), first - 1, dtype=torch.int32)), dim=1)


def given(tokens: Sequence[int], batch: int) -> ProposalNodes:
    """The same chain for every session."""
    rows = torch.tensor([tokens, range(-1, len(tokens) - 1)], dtype=torch.int32)
    chains = rows[:, None].expand(-1, batch, -1).contiguous()
    return ProposalNodes(chains[0], chains[1], are_chains=True)


def score(s: Sessions, tokens: Sequence[int], *, count: int = 6) -> Tensor:
    """The places' features [B, P, H], after all real rows were taken in."""
    rows = s.rows([0] * len(LENGTHS), LENGTHS, 16)
    nodes = given(tokens, rows.slots.shape[0])
    return s.program.score_proposals(rows, nodes, state=s.state, count=count, sweeps=EXACT).features


def branch_rows(paths: Sequence[Sequence[int]], places: int) -> OutcomeRows:
    """A branch of each session, after the first of its places."""
    width = 4
    tokens = torch.full((BRANCHES, width), -1, dtype=torch.int32)
    sources = torch.zeros((BRANCHES, width), dtype=torch.int32)
    for b, path in enumerate(paths):
        tokens[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
        sources[b] = b * places + torch.arange(width).clamp(max=len(path) - 1)
    return OutcomeRows(
        owners=torch.arange(BRANCHES, dtype=torch.int32),
        counts=torch.tensor([len(path) for path in paths], dtype=torch.int32),
        starts=torch.tensor(LENGTHS, dtype=torch.int32),
        tokens=tokens,
        sources=sources,
        draft_keys=torch.zeros(BRANCHES, dtype=torch.int64),
    )


def really_there(s: Sessions, features: Tensor, paths: Sequence[Sequence[int]]) -> NewRows:
    """Sessions to which these tokens were committed, with the given features for them."""
    rows = s.rows(LENGTHS, [len(path) for path in paths], 4)
    for b, path in enumerate(paths):
        rows.tokens[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
        rows.features[b, : len(path)] = features[b, : len(path)]
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_a_branch_is_drafted_like_a_session_that_came_there(head: DraftHead, kind: str) -> None:
    tokens, paths = [40, 41, 42], [[40, 41, 90], [77], [40, 41, 42, 91]]
    ahead, there = sessions(head), sessions(head)
    features = score(ahead, tokens)
    there.forward.write_rows(there.rows([0, 0, 0], LENGTHS, 16))
    before = ahead.storage[..., : (len(MIXED) * BLOCKS + 1) * BLOCK, :].clone()
    forked, drawing = ahead.program.fork_outcomes(
        branch_rows(paths, features.shape[1]),
        tables=ahead.tables,
        scratch=scratch(ahead),
        held=features.flatten(0, 1),
        counted=False,
        below_chains=kind == "chain",
    )
    real = really_there(there, features, paths)
    if kind == "chain":
        found = ahead.program.draft_chain(
            forked, state=ahead.state, length=4, drawing=drawing
        ).tokens
        expected = there.program.draft_chain(real, state=there.state, length=4).tokens
        assert found.tolist() == expected[: len(paths)].tolist()
    else:
        grow = partial(ahead.program.draft_tree, num_nodes=9, top_k=3, depth=3)
        grown = grow(forked, state=ahead.state, drawing=drawing)
        grow = partial(there.program.draft_tree, num_nodes=9, top_k=3, depth=3)
        other = grow(real, state=there.state)
        for b in range(len(paths)):
            (*tree, scores), (*expected, others) = tree_of(grown, b), tree_of(other, b)
            assert tree == expected
            # Products of other shapes add up in another order.
            assert scores == pytest.approx(others, abs=1e-4)
    assert torch.equal(ahead.storage[..., : before.shape[3], :], before)


@torch.inference_mode()
def test_scoring_leaves_the_rows_that_catching_up_does(head: DraftHead) -> None:
    scored, caught_up = sessions(head), sessions(head)
    score(scored, [40, 41])
    x = caught_up.program.catch_up(caught_up.rows([0, 0, 0], LENGTHS, 16))
    for b, length in enumerate(LENGTHS):
        assert torch.equal(scored.kept(b, length), caught_up.kept(b, length))
    torch.testing.assert_close(score(sessions(head), [40])[:3, 0], x[:3])


@torch.inference_mode()
def test_each_place_offers_what_a_chain_that_came_there_takes(head: DraftHead) -> None:
    """Along the greedy session's own chain: every place's best candidate is the next token."""
    s = sessions(head)
    rows = s.rows([0, 0, 0], LENGTHS, 16)
    chain = s.program.draft_chain(rows, state=s.state, length=4).tokens
    nodes = given([0, 0, 0], chain.shape[0])._replace(tokens=chain[:, :3].contiguous())
    scores = sessions(head).program.score_proposals(
        rows, nodes, state=s.state, count=6, sweeps=EXACT
    )
    for b in range(len(MIXED)):
        assert scores.tokens[b, :, 0].tolist() == chain[b].tolist(), MIXED[b]
    assert (scores.logprobs.diff(dim=2) <= 0).all()


@torch.inference_mode()
def test_what_is_not_on_a_nodes_path_is_not_seen(head: DraftHead) -> None:
    """A chain alone, and as a path of a tree whose other nodes lie between its own."""
    rng = np.random.default_rng(3)
    tokens, batch, places = [40, 41, 42], 4, [0, 2, 4, 7]
    wide = torch.from_numpy(rng.integers(0, VOCAB, (batch, 8))).int()
    wide[:, 5] = -1
    wide[:, [1, 3, 6]] = torch.tensor(tokens, dtype=torch.int32)
    above = torch.tensor([-1, -1, 0, 1, 1, -1, 3, 6], dtype=torch.int32)
    found = []
    for nodes in (given(tokens, batch), ProposalNodes(wide, above.repeat(batch, 1))):
        s = sessions(head)
        rows = s.rows([0, 0, 0], LENGTHS, 16)
        found.append(s.program.score_proposals(rows, nodes, state=s.state, count=6, sweeps=EXACT))
    assert torch.equal(found[1].tokens[:3, places], found[0].tokens[:3])
    torch.testing.assert_close(found[1].features[:3, places], found[0].features[:3])


@torch.inference_mode()
@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_after_k_sweeps_k_levels_are_exact(head: DraftHead, sweeps: int) -> None:
    """And what is below them is not, so that a sweep less would be noticed."""
    rows = sessions(head).rows([0, 0, 0], LENGTHS, 16)
    nodes, found = given([40, 41, 42, 43, 44], rows.slots.shape[0]), []
    for count in (sweeps, EXACT):
        s = sessions(head)
        found.append(
            s.program.score_proposals(rows, nodes, state=s.state, count=6, sweeps=count).features
        )
    near, exact = (features[:3] for features in found)
    torch.testing.assert_close(near[:, : 1 + sweeps], exact[:, : 1 + sweeps])
    apart = (near - exact).abs().amax(dim=(0, 2))
    assert bool((apart[1 + sweeps :] > 1e-3).all()), apart
