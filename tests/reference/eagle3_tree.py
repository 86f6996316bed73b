"""An EAGLE-3 head and its tree in float64 numpy, written for clarity and from scratch.

No cache, no batching, no masks: every node is the end of a path, and a path is an ordinary causal
sequence of draft rows. n real rows, H hidden, K top-k, D expansions below the first level.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]
Path_ = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One draft row after it ran: its output feature, and its key and value heads."""

    x: Array
    key: Array
    value: Array


@dataclass
class HeadOracle:
    """Weights of a head in the original format, and the target's embedding [V, H]."""

    directory: Path
    embedding: Array
    tensors: dict[str, Array] = field(init=False)
    config: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.config = json.loads((self.directory / "config.json").read_text())
        raw = load_file(self.directory / "model.safetensors")
        self.tensors = {name: np.asarray(t, dtype=np.float64) for name, t in raw.items()}

    def _int(self, name: str) -> int:
        return int(str(self.config[name]))

    def _norm(self, x: Array, name: str) -> Array:
        eps = float(str(self.config["rms_norm_eps"]))
        normed: Array = x / np.sqrt(np.mean(x * x) + eps) * self.tensors[name]
        return normed

    def _rotate(self, heads: Array, position: int) -> Array:
        half = heads.shape[-1] // 2
        theta = float(str(self.config["rope_theta"]))
        angle = position * theta ** (-np.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)

    def run(self, token: int, feature: Array, position: int, before: list[Row]) -> Row:
        """One draft row that sees `before` and itself."""
        w, attn = self.tensors, "midlayer.self_attn."
        embedded = self._norm(self.embedding[token], "midlayer.input_layernorm.weight")
        a = np.concatenate((embedded, self._norm(feature, "midlayer.hidden_norm.weight")))
        dim = self._int("head_dim")
        query = self._rotate((w[attn + "q_proj.weight"] @ a).reshape(-1, dim), position)
        key = self._rotate((w[attn + "k_proj.weight"] @ a).reshape(-1, dim), position)
        value = (w[attn + "v_proj.weight"] @ a).reshape(-1, dim)
        keys = np.stack([row.key for row in before] + [key])
        values = np.stack([row.value for row in before] + [value])
        group = query.shape[0] // key.shape[0]
        heads = []
        for head in range(query.shape[0]):
            scores = keys[:, head // group] @ query[head] / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            heads.append(weights / weights.sum() @ values[:, head // group])
        h = feature + w[attn + "o_proj.weight"] @ np.concatenate(heads)
        m = self._norm(h, "midlayer.post_attention_layernorm.weight")
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ m, w["midlayer.mlp.up_proj.weight"] @ m
        x = h + w["midlayer.mlp.down_proj.weight"] @ (gate / (1.0 + np.exp(-gate)) * up)
        return Row(x=x, key=key, value=value)

    def real_rows(self, tokens: NDArray[np.int32], features: Array) -> list[Row]:
        """Rows (f_i, t_{i+1}) at positions i, every one of them in full."""
        rows: list[Row] = []
        for i in range(len(tokens) - 1):
            rows.append(self.run(int(tokens[i + 1]), features[i], i, rows))
        return rows

    def logprobs(self, x: Array) -> Array:
        """Log-probs over the draft vocabulary below a row."""
        logits = self.tensors["lm_head.weight"] @ self._norm(x, "norm.weight")
        shifted: Array = logits - logits.max()
        return np.asarray(shifted - np.log(np.exp(shifted).sum()))

    def target_id(self, draft_id: int) -> int:
        """d2t is an offset."""
        return draft_id + int(self.tensors["d2t"][draft_id])


def path_rows(head: HeadOracle, real: list[Row], path: Path_) -> list[Row]:
    """The draft rows of a path of target ids below the root."""
    rows: list[Row] = []
    for depth, token in enumerate(path):
        feature = (rows or real)[-1].x
        rows.append(head.run(token, feature, len(real) + depth, real + rows))
    return rows


def grow_tree(
    head: HeadOracle, real: list[Row], *, num_nodes: int, top_k: int, expansions: int
) -> tuple[list[int], list[int], list[float]]:
    """EAGLE's tree by its flat candidate layout: tokens, parents (-1: root), scores.

    Level 1 holds the top K of the root; then, `expansions` times, the frontier's K nodes get K
    children each, ALL of which become candidates, and the best K of which the next frontier. The
    `num_nodes` best candidates of all, sorted by candidate index, are the tree.
    """
    paths: list[Path_] = []
    scores: list[float] = []
    parents: list[int] = []

    def extend(parent: int, prefix: Path_, score: float) -> None:
        rows = path_rows(head, real, prefix)
        logp = head.logprobs((rows or real)[-1].x)
        for draft_id in np.argsort(-logp, kind="stable")[:top_k]:
            paths.append((*prefix, head.target_id(int(draft_id))))
            scores.append(score + float(logp[draft_id]))
            parents.append(parent)

    extend(-1, (), 0.0)
    frontier = list(range(len(paths)))
    for _ in range(expansions):
        first = len(paths)
        for node in frontier:
            extend(node, paths[node], scores[node])
        level = sorted(range(first, len(paths)), key=lambda i: (-scores[i], i))
        frontier = level[:top_k]
    chosen = sorted(sorted(range(len(paths)), key=lambda i: (-scores[i], i))[:num_nodes])
    place = {candidate: i for i, candidate in enumerate(chosen)} | {-1: -1}
    return (
        [paths[c][-1] for c in chosen],
        [place[parents[c]] for c in chosen],
        [scores[c] for c in chosen],
    )
