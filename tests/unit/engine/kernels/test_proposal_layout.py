"""Positions, attention mask and source indices of draft trees (`layout_proposals_*`).

The reference walks from each node up to the root.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.kernels.drafts.proposal_layout import (
    layout_proposals_torch,
    layout_proposals_triton,
)
from outrider.engine.kernels.runtime import INTERPRETED
from outrider.spec.tree import path
from tests.unit.engine.kernels.trees import ROOT, random_parents

layouts = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout_proposals_torch, id="torch"),
        pytest.param(
            layout_proposals_triton,
            id="triton",
            marks=pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter"),
        ),
    ],
)


@layouts
@pytest.mark.parametrize(("batch", "count"), [(1, 1), (3, 5), (2, 8), (1, 33)])
def test_positions_and_mask_follow_the_paths(layout: object, batch: int, count: int) -> None:
    rng = np.random.default_rng(count)
    trees = [random_parents(rng, count) for _ in range(batch)]
    if batch > 1:
        trees[0] = list(range(ROOT, count - 1))
    live = rng.integers(0, 1000, batch).tolist()
    parents = torch.tensor(trees, dtype=torch.int32)
    found = layout(parents, torch.tensor(live, dtype=torch.int32))  # type: ignore[operator]
    positions, following = found.positions.view(batch, count), found.following.view(batch, -1)
    sources = found.sources.view(batch, count)
    assert found.seen.shape == (batch, 1 + count, count) and not found.seen[:, 0].any()
    for b, tree in enumerate(trees):
        assert following[b, 0] == live[b] + 2
        for node, parent in enumerate(tree):
            own = path(np.array(tree), node)
            assert found.seen[b, 1 + node].nonzero().flatten().tolist() == sorted(own)
            assert positions[b, node] == live[b] + len(own)
            assert following[b, 1 + node] == live[b] + 2 + len(own)
            assert sources[b, node] == b * (1 + count) + 1 + parent
