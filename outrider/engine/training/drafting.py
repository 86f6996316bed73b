"""Batched drafting for known answers with the serving code, for offline evaluation of a head.

As in a drafter, the head's rows (one per token) up to a root read features of the target, and the
rows below the root read the head's own outputs. The latter are first a path of tokens that were
accepted but whose features have not arrived, and then a draft tree.

Shapes: B answers, L rows with target features, M rows with the head's own outputs, W rows of one
level, K children of a node, C candidates, N nodes, nq query heads, nkv key/value heads, hd head
dimension, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.heads import DraftHead, FeatureProjection
from outrider.engine.training.data import TrainingSample
from outrider.engine.training.target import TrainingTarget
from outrider.spec.tree import DraftTree, depths


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Shape of the draft trees: number of draft tokens, children per node (1 for a chain), and
    depth."""

    draft_tokens: int
    top_k: int
    depth: int


CHAIN = DraftShape(draft_tokens=5, top_k=1, depth=5)
TREE = DraftShape(draft_tokens=32, top_k=8, depth=6)


class StableRows(NamedTuple):
    """Tensors that the head computes from target features, each [B, L, ...] with one row per
    position. Shorter answers are padded with zeros, which are masked."""

    keys: Tensor
    values: Tensor
    inputs: Tensor
    residual: Tensor

    def select_answers(self, answers: Sequence[int]) -> StableRows:
        """Return the rows of the answers with these indices."""
        index = torch.tensor(answers, device=self.keys.device)
        return StableRows(*(part[index] for part in self))


@torch.no_grad()
def stable_rows(
    target: TrainingTarget,
    head: DraftHead,
    projection: FeatureProjection,
    samples: Sequence[TrainingSample],
) -> StableRows:
    """Run the target over whole samples, and return what the head computes from the target's
    features."""
    each = [_rows_of(target, head, projection, sample) for sample in samples]
    longest = max(len(rows[0]) for rows in each)
    parts = zip(*each, strict=True)
    return StableRows(*(torch.stack([_padded(part, longest) for part in group]) for group in parts))


def _padded(part: Tensor, size: int) -> Tensor:
    return torch.cat((part, part.new_zeros(size - len(part), *part.shape[1:])))


def _rows_of(
    target: TrainingTarget, head: DraftHead, projection: FeatureProjection, sample: TrainingSample
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = torch.tensor([*sample.prompt.tolist(), *sample.answer.tolist()], device=target.device)
    size = len(tokens) - 1
    positions = torch.arange(size, device=target.device)
    mask = torch.ones(1, size, size, dtype=torch.bool, device=target.device).tril()
    _, raw = target.forward(tokens[None, :-1], positions[None], mask, projection.tap_layers)
    features = projection(raw[0])
    inputs = head.inputs(tokens[1:], features)
    keys, values = head.kv(inputs, features, positions)
    return keys, values, inputs, head.residual(inputs, features)


class DraftedRows:
    """Draft trees of B answers, one tree per answer, and the head's KV and outputs for their nodes.
    Node 0 of a tree is its root."""

    @torch.no_grad()
    def __init__(self, head: DraftHead, stable: StableRows, roots: Sequence[int]) -> None:
        """`roots` [B]: index of the row in `stable` that reads each answer's root token."""
        self._head = head
        device = stable.keys.device
        self._roots = torch.tensor(roots, device=device)
        at = torch.arange(len(roots), device=device)
        self._real = torch.arange(stable.keys.shape[1], device=device) < self._roots[:, None]
        # The root's row is real: its KV are there already, and come behind like own ones.
        self._keys = _behind(stable.keys, stable.keys[at, self._roots])
        self._values = _behind(stable.values, stable.values[at, self._roots])
        self._sees = torch.ones(len(roots), 1, 1, dtype=torch.bool, device=device)
        self._depths = torch.zeros(len(roots), 1, dtype=torch.int64, device=device)
        query = head.query(stable.inputs[at, self._roots], self._roots)
        attended = self._attend(query[:, None], self._sees)
        residual = stable.residual[at, self._roots]
        self.x = head.finish(residual, attended)[:, None]
        """[B, M, H]: output of the head for each node."""

    @torch.no_grad()
    def extend(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Add W nodes to each of the B draft trees, and run the head for them.

        tokens: [B, W], the tokens of the new nodes. parents: [B, W], the indices of their parents.
        Returns the indices of the new nodes, [B, W].
        """
        answers, width = tokens.shape
        depth = self._depths.gather(1, parents) + 1
        features = _take(self.x, parents).flatten(0, 1)
        positions = (self._roots[:, None] + depth).flatten()
        inputs = self._head.inputs(tokens.flatten(), features)
        keys, values = self._head.kv(inputs, features, positions)
        self._keys = _behind(self._keys, keys)
        self._values = _behind(self._values, values)
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(answers, -1, -1)
        sees = torch.cat((_take(self._sees, parents), own), dim=2)
        self._sees = torch.cat((F.pad(self._sees, (0, width)), sees), dim=1)
        self._depths = torch.cat((self._depths, depth), dim=1)
        query = self._head.query(inputs, positions)
        residual = self._head.residual(inputs, features)
        attended = self._attend(query.view(answers, width, *query.shape[1:]), sees)
        first = self.x.shape[1]
        self.x = _behind(self.x, self._head.finish(residual, attended))
        return torch.arange(first, first + width, device=tokens.device).expand(answers, -1)

    def logprobs(self, columns: Tensor) -> Tensor:
        """Return the log-probabilities of the token after each of the nodes `columns` [B, W], [B,
        W, Vd], where Vd is the draft vocabulary size."""
        x = _take(self.x, columns)
        logits = self._head.logits(x.flatten(0, 1))
        return logits.log_softmax(-1).view(*columns.shape, -1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft token ids, a tensor of any shape, to target token ids."""
        return self._head.to_target_ids(draft_ids)

    def _attend(self, query: Tensor, sees: Tensor) -> Tensor:
        """Return the attention output [B * W, nq, hd] of queries [B, W, nq, hd]. They attend to the
        rows with target features before the root, and to the nodes for which `sees` [B, W, M] is
        True."""
        answers, width, num_heads, size = query.shape
        num_kv = self._keys.shape[2]
        grouped = query.view(answers, width, num_kv, -1, size).permute(0, 2, 3, 1, 4)
        mask = torch.cat((self._real[:, None].expand(-1, width, -1), sees), dim=2)
        out = F.scaled_dot_product_attention(
            grouped.reshape(answers, num_kv, -1, size),
            self._keys.transpose(1, 2),
            self._values.transpose(1, 2),
            attn_mask=mask.repeat(1, num_heads // num_kv, 1)[:, None],
        )
        rows = out.view(answers, num_kv, -1, width, size).permute(0, 3, 1, 2, 4)
        return rows.reshape(-1, num_heads, size)


def _behind(rows: Tensor, new: Tensor) -> Tensor:
    """Append new rows [B * W, ...] to rows [B, M, ...]. The result is [B, M + W, ...]."""
    return torch.cat((rows, new.view(len(rows), -1, *rows.shape[2:])), dim=1)


def _take(rows: Tensor, columns: Tensor) -> Tensor:
    """Select W of the M rows of each answer: rows [B, M, X], columns [B, W], result [B, W, X]."""
    return rows.gather(1, columns[:, :, None].expand(-1, -1, rows.shape[-1]))


@torch.no_grad()
def run_paths(rows: DraftedRows, paths: Sequence[Sequence[int]]) -> Tensor:
    """Add one path of tokens below each root, run the head for it, and return the index of the last
    node of each path, [B, 1]."""
    device = rows.x.device
    lens = torch.tensor([len(path) for path in paths], device=device)[:, None]
    tip = torch.zeros_like(lens)
    for step in range(max(len(path) for path in paths)):
        tokens = [path[step] if step < len(path) else 0 for path in paths]
        column = rows.extend(tip, torch.tensor(tokens, device=device)[:, None])
        tip = torch.where(step < lens, column, tip)
    return tip


@torch.no_grad()
def grow_drafts(rows: DraftedRows, tips: Tensor, shape: DraftShape) -> list[DraftTree]:
    """Grow a draft tree of the given shape below each of the nodes `tips` [B, 1], with the head's
    best tokens. Return the B trees."""
    columns, frontier = tips, torch.full_like(tips, -1)  # candidate ids; the root's is -1
    scores = torch.zeros(tips.shape, device=tips.device)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    first = 0
    for depth in range(shape.depth):
        best = rows.logprobs(columns).topk(shape.top_k, dim=-1)
        tokens = rows.to_target_ids(best.indices).flatten(1)
        children = (scores[..., None] + best.values).flatten(1)
        levels.append((children, tokens, frontier.repeat_interleave(shape.top_k, dim=1)))
        if depth + 1 == shape.depth:
            break
        chosen = children.topk(min(shape.top_k, children.shape[1])).indices.sort(-1).values
        columns = rows.extend(columns.gather(1, chosen // shape.top_k), tokens.gather(1, chosen))
        scores, frontier = children.gather(1, chosen), chosen + first
        first += children.shape[1]
    every = [torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)]
    return _select(every[0], every[1], every[2], shape.draft_tokens)


def _select(scores: Tensor, tokens: Tensor, parents: Tensor, size: int) -> list[DraftTree]:
    """Return the `size` candidates with the highest scores as trees. All tensors are [B, C]. Of
    equal scores, the one with the lower index is better, so no node is chosen without its
    parent."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    order = order[:, :size].sort(-1).values
    node_of = torch.full((len(scores), scores.shape[1] + 1), -1, device=scores.device)
    nodes = torch.arange(order.shape[1], device=scores.device)
    node_of.scatter_(1, order + 1, nodes.expand_as(order))
    chosen = node_of.gather(1, parents.gather(1, order) + 1)
    columns = (tokens.gather(1, order).int(), chosen.int(), scores.gather(1, order).float())
    each = zip(*(column.cpu().numpy() for column in columns), strict=True)
    return [DraftTree(*tree) for tree in each]


class NodeCandidates(NamedTuple):
    """The head's most probable next tokens after each node of a tree. Row 0 is for the root, row
    i + 1 for node i."""

    tokens: NDArray[np.int32]
    """[1 + N, C]: target ids, best first."""
    logprobs: NDArray[np.float32]
    """[1 + N, C]: log-probabilities of `tokens`."""


@torch.no_grad()
def score_trees(rows: DraftedRows, trees: Sequence[DraftTree], count: int) -> list[NodeCandidates]:
    """Run the head for the nodes of B given trees, level by level, and return the `count` most
    probable tokens after each root and node."""
    device = rows.x.device
    columns = np.zeros((len(trees), 1 + max(len(tree) for tree in trees)), dtype=np.int64)
    levels = [depths(tree.parents) for tree in trees]
    for level in range(1, 1 + max(int(found.max(initial=0)) for found in levels)):
        nodes = [np.flatnonzero(found == level) for found in levels]
        width = max(len(found) for found in nodes)
        parents, tokens = np.zeros((2, len(trees), width), dtype=np.int64)
        for row, (tree, found) in enumerate(zip(trees, nodes, strict=True)):
            parents[row, : len(found)] = columns[row, tree.parents[found] + 1]
            tokens[row, : len(found)] = tree.tokens[found]
        for row, found in enumerate(nodes):
            columns[row, found + 1] = rows.x.shape[1] + np.arange(len(found))
        rows.extend(*(torch.from_numpy(part).to(device) for part in (parents, tokens)))
    best = rows.logprobs(torch.from_numpy(columns).to(device)).topk(count, dim=-1)
    ids = rows.to_target_ids(best.indices).int().cpu().numpy()
    values = best.values.float().cpu().numpy()
    return [
        NodeCandidates(ids[row, : 1 + len(tree)], values[row, : 1 + len(tree)])
        for row, tree in enumerate(trees)
    ]
