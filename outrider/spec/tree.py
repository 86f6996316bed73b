"""Draft trees as parallel arrays, and the validation that every received tree must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError

ROOT = -1
"""Parent index of a node that hangs off the root."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """N draft nodes below a root that is not itself in the arrays.

    tokens: int32 [N]; parents: int32 [N], parents[i] < i, ROOT for the first level; logprobs:
    float32 [N], cumulative log-prob of the path, <= 0 and never above the parent's. Siblings are
    ordered best first, except where a draft distribution comes with the tree: there they are in the
    order in which they were drawn.

    A tree that is judged with its draft distribution must have a *shape* that was fixed without
    looking at the sampled tokens of the node's own level and below (which nodes have how many
    children, by rank of drawing): choosing among drawn tokens would change the distribution they
    were drawn from.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def chain(cls, tokens: NDArray[np.int32]) -> DraftTree:
        """Nodes below one another, with log-probs of 0: nothing that ranks them is known."""
        count = len(tokens)
        return cls(tokens, np.arange(-1, count - 1, dtype=np.int32), np.zeros(count, np.float32))

    def __len__(self) -> int:
        return len(self.tokens)


def _refuse(message: str) -> NoReturn:
    raise InvalidMessageError(message, reason="INVALID_TREE")


def validate_tree(tree: DraftTree, *, vocab_size: int, max_nodes: int) -> None:
    """Check everything a peer could get wrong. Raises InvalidMessageError.

    Types and lengths of the arrays, at most `max_nodes` nodes, ids in [0, vocab_size), parents
    before children, no two siblings with one token, log-probs <= 0 that never rise on a path.
    """
    count = len(tree.tokens)
    for name, array, dtype in (
        ("tokens", tree.tokens, np.int32),
        ("parents", tree.parents, np.int32),
        ("logprobs", tree.logprobs, np.float32),
    ):
        if array.dtype != dtype:
            _refuse(f"{name} must be {np.dtype(dtype)}, got {array.dtype}")
        if array.shape != (count,):
            _refuse(f"{name} has shape {array.shape}, expected ({count},)")
    if count > max_nodes:
        _refuse(f"tree has {count} nodes, at most {max_nodes} are allowed")
    # Trees are small: a loop over plain numbers takes a fraction of what array operations do.
    seen: set[tuple[int, int]] = set()
    logprobs = tree.logprobs.tolist()
    for node, (token, parent) in enumerate(
        zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
    ):
        if not 0 <= token < vocab_size:
            _refuse(f"token ids must be in [0, {vocab_size}), got {token}")
        if not ROOT <= parent < node:
            _refuse("every parent index must be -1 or the index of an earlier node")
        if (parent, token) in seen:
            _refuse("two siblings carry the same token")
        seen.add((parent, token))
        # A NaN fails the comparison; the root's own log-prob is 0.
        if not logprobs[node] <= (0.0 if parent == ROOT else logprobs[parent]):
            _refuse("log-probs must be <= 0, not NaN, and never above the parent's")


def is_chain(parents: Sequence[int] | NDArray[np.int32]) -> bool:
    """Whether node i hangs off node i - 1 throughout (also true of no nodes)."""
    # Trees are small: a list is compared in a fraction of what array operations take.
    ids: list[int] = np.asarray(parents).tolist()
    return ids == list(range(-1, len(ids) - 1))


def children(parents: Sequence[int] | NDArray[np.int32]) -> list[list[int]]:
    """Children by slot, in node order: entry 0 is the root's, entry i + 1 is node i's."""
    result: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(np.asarray(parents).tolist()):
        result[parent + 1].append(node)
    return result


def depths(parents: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Depth of every node, int32 [N]; 1 for the first level (the root's depth is 0)."""
    result = [0] * (len(parents) + 1)  # the last entry is the root's, reached by index -1
    for node, parent in enumerate(np.asarray(parents).tolist()):
        result[node] = result[parent] + 1
    return np.array(result[:-1], dtype=np.int32)


def ancestor_mask(parents: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
    """bool [N, N]: row i marks node i and its ancestors among the nodes (not the root)."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(np.asarray(parents).tolist()):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def path(parents: Sequence[int] | NDArray[np.int32], node: int) -> tuple[int, ...]:
    """Nodes from the first level down to `node`; empty for ROOT."""
    result = []
    while node != ROOT:
        result.append(node)
        node = int(parents[node])
    return tuple(reversed(result))
