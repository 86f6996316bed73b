"""Tokens a round of a finished head, drafted by the serving pieces over known greedy answers.

The target runs once over prompt and answer; every root of the walk is then drafted from as a
drafter would: real features for the stable rows, the head's own outputs below. A draft stands if
it is the answer's next token. R rows, L key/value rows, K frontier nodes, M nodes run so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.heads import DraftHead, FeatureProjection
from outrider.engine.training.data import Sample, repeated_share
from outrider.engine.training.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Shape of the drafts; a chain has `top_k` 1."""

    draft_tokens: int
    top_k: int
    depth: int


CHAIN = DraftShape(draft_tokens=4, top_k=1, depth=4)
TREE = DraftShape(draft_tokens=32, top_k=8, depth=6)


@dataclass(frozen=True, slots=True)
class StableRows:
    """Everything the head computed from real features, one row a position."""

    keys_L: Tensor
    values_L: Tensor
    inputs_L: Tensor
    residual_L: Tensor


@torch.no_grad()
def stable_rows(
    target: Target, head: DraftHead, projection: FeatureProjection, sample: Sample
) -> StableRows:
    """Run the target over the whole sample and write all the head's rows."""
    tokens = torch.tensor([*sample.prompt.tolist(), *sample.answer.tolist()], device=target.device)
    size = len(tokens) - 1
    positions = torch.arange(size, device=target.device)
    mask = torch.ones(1, size, size, dtype=torch.bool, device=target.device).tril()
    taps = projection.tap_layers
    _, raw = target.forward(tokens[None, :-1], positions[None], mask, taps)
    features = projection(raw[0])
    inputs = head.inputs(tokens[1:], features)
    keys, values = head.kv(inputs, features, positions)
    return StableRows(keys, values, inputs, head.residual(inputs, features))


@torch.no_grad()
def draft(head: DraftHead, rows: StableRows, row: int, shape: DraftShape) -> dict[int, Any]:
    """Draft from the root that `row` reads; the selected tree as nested dicts of target ids."""
    at = torch.tensor([row], device=rows.keys_L.device)
    query = head.query(rows.inputs_L[at], at)
    keys, values = rows.keys_L[: row + 1], rows.values_L[: row + 1]
    x = head.finish(rows.residual_L[at], masked_rows(query, keys, values, None))
    scores, tokens, parents = torch.zeros(1, device=x.device), [], []
    all_scores: list[Tensor] = []
    ancestors = torch.zeros(1, 0, dtype=torch.bool, device=x.device)
    # Candidate ids of the frontier; the root is -1.
    frontier = torch.tensor([-1], device=x.device)
    for depth in range(shape.depth):
        best = head.logits(x).log_softmax(-1).topk(shape.top_k, dim=-1)
        children = head.to_target_ids(best.indices).flatten()
        child_scores = (scores[:, None] + best.values).flatten()
        first = sum(len(s) for s in all_scores)
        tokens.append(children)
        all_scores.append(child_scores)
        parents.append(frontier.repeat_interleave(shape.top_k))
        if depth + 1 == shape.depth:
            break
        chosen = child_scores.topk(min(shape.top_k, len(child_scores))).indices.sort().values
        parent = chosen // shape.top_k
        features, scores, frontier = x[parent], child_scores[chosen], chosen + first
        width = len(chosen)
        own = torch.eye(width, dtype=torch.bool, device=x.device)
        ancestors = torch.cat((ancestors[parent], own), dim=1)
        position = torch.full((width,), row + 1 + depth, device=x.device)
        inputs = head.inputs(children[chosen], features)
        new_keys, new_values = head.kv(inputs, features, position)
        keys, values = torch.cat((keys, new_keys)), torch.cat((values, new_values))
        stable = torch.ones(width, row + 1, dtype=torch.bool, device=x.device)
        mask = torch.cat((stable, ancestors), dim=1)
        attended = masked_rows(head.query(inputs, position), keys, values, mask)
        x = head.finish(head.residual(inputs, features), attended)
    return _select(torch.cat(all_scores), torch.cat(tokens), torch.cat(parents), shape.draft_tokens)


def _select(scores: Tensor, tokens: Tensor, parents: Tensor, size: int) -> dict[int, Any]:
    """The best `size` candidates, ties to the lower index, as nested dicts."""
    order = torch.sort(scores, descending=True, stable=True).indices[:size].sort().values
    root: dict[int, Any] = {}
    nodes = {-1: root}
    for index in order.tolist():
        node: dict[int, Any] = {}
        nodes[int(parents[index])].setdefault(int(tokens[index]), node)
        nodes[index] = node
    return root


def masked_rows(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of queries [R, nq, hd] over [L, nkv, hd] under a bool mask [R, L]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("rhd,lhd->rhl", query, keys) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(wide).softmax(-1).to(values.dtype)
    return torch.einsum("rhl,lhd->rhd", weights, values)


def walk(head: DraftHead, rows: StableRows, sample: Sample, shape: DraftShape) -> tuple[int, int]:
    """(rounds, emitted tokens) over the answer, whose first token the prefill emits."""
    answer = sample.answer.tolist()
    root, rounds = 0, 0
    while root < len(answer) - 1:
        node = draft(head, rows, len(sample.prompt) - 1 + root, shape)
        accepted = 0
        while root + accepted + 1 < len(answer) - 1 and answer[root + accepted + 1] in node:
            node = node[answer[root + accepted + 1]]
            accepted += 1
        root, rounds = root + accepted + 1, rounds + 1
    return rounds, len(answer) - 1


def serving_report(
    target: Target,
    head: DraftHead,
    projection: FeatureProjection,
    tasks: Mapping[str, Sequence[Sample]],
    shapes: Mapping[str, DraftShape],
) -> dict[str, dict[str, float]]:
    """Mean tokens a round by task and over all tasks; looping answers are left out."""
    totals: dict[str, dict[str, tuple[int, int]]] = {}
    for task, samples in tasks.items():
        for sample in samples:
            if len(sample.answer) < 2 or repeated_share(sample.answer) > 0.5:
                continue
            rows = stable_rows(target, head, projection, sample)
            for name, shape in shapes.items():
                counted = walk(head, rows, sample, shape)
                for key in (task, "all"):
                    old = totals.setdefault(key, {}).get(name, (0, 0))
                    totals[key][name] = (old[0] + counted[0], old[1] + counted[1])
    return {
        task: {name: tokens / max(1, rounds) for name, (rounds, tokens) in by_shape.items()}
        for task, by_shape in totals.items()
    }
