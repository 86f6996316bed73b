"""Drives whole rounds through the production code: draft a tree, verify it, for many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.acceptance import AcceptRow
from outrider.engine.draft_sampling import (
    DEFAULT_DISTRIBUTION_LIMITS,
    DistributionLimits,
    propose_children,
)
from outrider.spec.draft_distribution import (
    DistributionEntries,
    DraftDistribution,
    make_distribution,
)
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import ROOT, DraftTree, validate_tree

Logits = Callable[[NDArray[np.int64]], Tensor]
"""Contexts int64 [n, depth] (tokens since the prefix, columns by depth) -> logits [n, V]."""


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Trees of one common shape for n rows."""

    parents: NDArray[np.int32]
    tokens: NDArray[np.int32]
    """[n, N]; trees made by `draft` are valid: no place of theirs is empty (-1)."""
    laws: list[dict[int, DistributionEntries]]
    """By row, by slot."""

    def tree(self, row: int) -> DraftTree:
        """The row's tree."""
        logprobs = np.zeros(len(self.parents), dtype=np.float32)
        return DraftTree(self.tokens[row], self.parents, logprobs)

    def law(self, row: int) -> DraftDistribution | None:
        """The row's distribution; None unless the rule made one."""
        return make_distribution(len(self.parents), self.laws[row]) if self.laws[row] else None

    def context(self, node: int) -> NDArray[np.int64]:
        """Tokens [n, depth] on the path to a node."""
        columns = []
        while node != ROOT:
            columns.append(self.tokens[:, node])
            node = int(self.parents[node])
        empty = np.zeros((len(self.tokens), 0), dtype=np.int64)
        return np.column_stack([empty, *columns[::-1]]).astype(np.int64)


def tree_shape(widths: Sequence[int]) -> NDArray[np.int32]:
    """Parents of a full tree in level order: every node of level d has widths[d] children."""
    parents, level = list[int](), [ROOT]
    for width in widths:
        first = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return np.array(parents, dtype=np.int32)


def draft(
    draft_logits: Logits,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    widths: Sequence[int],
    *,
    limits: DistributionLimits = DEFAULT_DISTRIBUTION_LIMITS,
) -> Drafts:
    """Grow a tree for every row with `propose_children`: widths[d] children a node of level d.

    A child that is missing in all rows is left out, as is all below it. One that is missing in
    some rows only raises InvalidMessageError: those rows' trees would not be valid.
    """
    rows = len(params)
    drafts = Drafts(np.zeros(0, np.int32), np.zeros((rows, 0), np.int32), [{} for _ in params])
    level, vocab = [ROOT], 0
    for depth, width in enumerate(widths):
        first = len(drafts.parents)
        for node in level:
            logits = draft_logits(drafts.context(node))
            vocab = logits.shape[1]
            here = [position + depth for position in positions]
            found = propose_children(logits, None, params, here, width, distribution_limits=limits)
            for slots, distribution in zip(drafts.laws, found.distributions, strict=True):
                if distribution is not None:
                    slots[node + 1] = distribution
            for tokens in found.tokens.numpy().T:
                if (tokens != -1).any():
                    drafts = _with_child(drafts, node, tokens)
        level = list(range(first, len(drafts.parents)))
    for row in range(rows):
        validate_tree(drafts.tree(row), vocab_size=vocab, max_nodes=len(drafts.parents))
    return drafts


def _with_child(drafts: Drafts, parent: int, tokens: NDArray[np.int64]) -> Drafts:
    """The drafts with one node more, its token int64 [n] by row."""
    return Drafts(
        np.append(drafts.parents, np.int32(parent)),
        np.column_stack([drafts.tokens, tokens.astype(np.int32)]),
        drafts.laws,
    )


def verify_logits(target_logits: Logits, drafts: Drafts) -> Tensor:
    """Target logits at root and nodes of every row, [n * (1 + N), V], rows of a tree together."""
    nodes = [ROOT, *range(len(drafts.parents))]
    levels = [target_logits(drafts.context(node)) for node in nodes]
    return torch.stack(levels, dim=1).flatten(0, 1)


def accept_rows(
    drafts: Drafts, params: Sequence[SamplingParams], positions: Sequence[int], *, stride: int
) -> list[AcceptRow]:
    """Rows for `accept`; stride: 1 + N if every row has its own logits, 0 if all share one set."""
    return [
        AcceptRow(
            logits_start=row * stride,
            tree=drafts.tree(row),
            distribution=drafts.law(row),
            sampling=params[row],
            position=positions[row],
        )
        for row in range(len(params))
    ]


def seeded(base: SamplingParams, count: int, first: int = 0) -> list[SamplingParams]:
    """`count` copies with seeds first, first + 1, ..."""
    return [replace(base, seed=first + index) for index in range(count)]
