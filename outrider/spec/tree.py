"""Draft trees as parallel arrays, and the validation that every received tree must pass.

`validate_tree` checks one tree. `valid_trees` and `valid_distributions` check the draft trees and
draft distributions of many sessions at once, with the same rules as `validate_tree` and
`outrider.spec.draft_distribution`. They take flat arrays of S trees with N nodes in total: the
first node_counts[0] nodes belong to tree 0, the next node_counts[1] to tree 1, and so on, and
parent indices count within their tree. The arrays come from peers and are not trusted; an invalid
tree does not affect the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError

ROOT = -1
"""Parent index of a node on the first level, whose parent is the root."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Draft tree of N nodes. The root, which is the last accepted token, is not a node and not in
    the arrays.

    tokens: token ids, int32 [N]. parents: index of each node's parent, int32 [N], with parents[i] <
    i, and ROOT for the first level. logprobs: cumulative log-prob of the path to each node, float32
    [N], <= 0 and never above that of the parent. Siblings are ordered by log-prob, best first; if
    the tree has a draft distribution, they are in the order in which they were drawn.

    Under the rejection rule, the number of children of a node must be decided before they are
    sampled, because a selection among sampled tokens would change their distribution.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def chain(cls, tokens: NDArray[np.int32]) -> DraftTree:
        """Return a chain in which every node is the child of the node before, with log-probs of
        0."""
        count = len(tokens)
        return cls(tokens, np.arange(-1, count - 1, dtype=np.int32), np.zeros(count, np.float32))

    def __len__(self) -> int:
        return len(self.tokens)


def _refuse(message: str) -> NoReturn:
    raise InvalidMessageError(message, reason="INVALID_TREE")


def validate_tree(tree: DraftTree, *, vocab_size: int, max_nodes: int) -> None:
    """Check a received tree. Raises InvalidMessageError if it is invalid.

    A valid tree has arrays of the right types and lengths, at most `max_nodes` nodes, ids in [0,
    vocab_size), parents before children, no two siblings with the same token, and log-probs <= 0
    that never rise along a path.
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
    # Trees are small, so a loop over Python numbers is much faster than array operations.
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
        # NaN fails this comparison. The root's log-prob is 0.
        if not logprobs[node] <= (0.0 if parent == ROOT else logprobs[parent]):
            _refuse("log-probs must be <= 0, not NaN, and never above the parent's")


def is_chain(parents: Sequence[int] | NDArray[np.int32]) -> bool:
    """Return whether every node is the child of the node before; True if there are no nodes."""
    # Trees are small, so comparing lists is much faster than array operations.
    ids: list[int] = np.asarray(parents).tolist()
    return ids == list(range(-1, len(ids) - 1))


def children(parents: Sequence[int] | NDArray[np.int32]) -> list[list[int]]:
    """Return the children of the root (entry 0) and of each node i (entry i + 1), in node order."""
    result: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(np.asarray(parents).tolist()):
        result[parent + 1].append(node)
    return result


def depths(parents: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the depth of every node, int32 [N]. Children of the root have depth 1."""
    result = [0] * (len(parents) + 1)  # the last entry is the root's, reached by index -1
    for node, parent in enumerate(np.asarray(parents).tolist()):
        result[node] = result[parent] + 1
    return np.array(result[:-1], dtype=np.int32)


def ancestor_mask(parents: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return the ancestor mask, bool [N, N]: row i marks node i and its ancestors, without the
    root."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(np.asarray(parents).tolist()):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask


def path(parents: Sequence[int] | NDArray[np.int32], node: int) -> tuple[int, ...]:
    """Return the nodes on the path from the first level down to `node`; empty for ROOT."""
    result = []
    while node != ROOT:
        result.append(node)
        node = int(parents[node])
    return tuple(reversed(result))


_TOKEN_BITS = 24
"""Number of bits of a token id: ids are below 2^24, so that a slot and an id fit into one word."""


def valid_trees(
    node_counts: NDArray[np.int64],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    *,
    vocab_size: int,
    max_nodes: int,
) -> NDArray[np.bool_]:
    """Return whether each tree passes every check of `validate_tree` and has finite log-probs, bool
    [S].

    The arguments are flat arrays of S trees, as explained in `outrider.spec.tree`, and must have as
    many entries as the sum of `node_counts`. Never raises.
    """
    sound = node_counts <= max_nodes
    if not len(tokens):
        return sound
    # One comparison for both bounds.
    bad = tokens.view(np.uint32) >= vocab_size
    # The usual drafts are chains without log-probs, of which only tokens can be wrong.
    if logprobs.any() or not bool((parents == chain_parents(node_counts)).all()):
        bad |= _misplaced(node_counts, tokens, parents, logprobs)
    if bool(bad.any()):
        sound[np.arange(len(node_counts)).repeat(node_counts)[bad]] = False
    return sound


def _misplaced(
    node_counts: NDArray[np.int64],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    logprobs: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """Return which nodes have an invalid parent, a duplicate sibling or an impossible log-prob,
    bool [N]."""
    owners, firsts, places = _layout(node_counts)
    bad = (parents < -1) | (parents >= places)
    # An invalid parent index is replaced by any valid one, to keep the indexing safe.
    above = np.clip(parents, -1, places - 1).astype(np.int64)
    ceiling = np.where(above < 0, np.float32(0.0), logprobs[np.maximum(firsts + above, 0)])
    # A NaN fails the comparison.
    bad |= ~(logprobs <= ceiling) | np.isinf(logprobs)
    if not bool((above == places - 1).all()):
        keys = (firsts + owners + above + 1) << _TOKEN_BITS | _masked(tokens)
        order = np.argsort(keys, kind="stable")
        duplicates = order[1:][np.diff(keys[order]) == 0]
        bad[duplicates] = True
    return bad


def chain_parents(node_counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the parent indices of chains, one chain after the other, int32 [N]. `node_counts` [S]
    is the number of nodes of each chain."""
    ends = node_counts.cumsum()
    parents = np.arange(-1, int(ends[-1]) - 1 if len(ends) else -1, dtype=np.int32)
    parents -= (ends - node_counts).astype(np.int32).repeat(node_counts)
    return parents


def valid_distributions(
    node_counts: NDArray[np.int64],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    given: NDArray[np.bool_],
    sizes: NDArray[np.int64],
    ids: NDArray[np.int32],
    counts: NDArray[np.uint16],
    *,
    trees: NDArray[np.bool_],
    vocab_size: int,
) -> NDArray[np.bool_]:
    """Return whether each tree has either no distribution or a valid one, bool [S]. Never raises.

    A valid distribution passes every check of `validate_distribution`. `given` [S] says which trees
    have a distribution. For each of these, `sizes` has node_counts + 1 entries: the number of ids
    at the root and at each node. `ids` and `counts` hold the entries of all slots, as many as the
    sum of `sizes`. `trees` [S] says which trees are valid; the result is not meaningful for invalid
    trees.
    """
    sound = np.ones(len(node_counts), dtype=np.bool_)
    checked = given & trees
    if not bool(given.any()):
        return sound
    slot_counts = np.where(given, node_counts + 1, 0)
    slot_owners, _, _ = _layout(slot_counts)
    entry_slots = np.repeat(np.arange(len(sizes)), sizes)
    entry_owners = slot_owners[entry_slots]
    bad = (ids < 0) | (ids >= vocab_size) | (counts < 1)
    keys = entry_slots.astype(np.int64) << _TOKEN_BITS | _masked(ids)
    bad[1:] |= np.diff(keys) <= 0
    sound[entry_owners[bad]] = False
    # For nodes of trees with a distribution: find the parent's slot, and check that the slot
    # contains the node's token.
    owners, _, _ = _layout(node_counts)
    judged = checked[owners]
    owners, above = owners[judged], parents[judged].astype(np.int64)
    slot_starts = np.cumsum(slot_counts) - slot_counts
    slots = slot_starts[owners] + above + 1
    has_children = np.zeros(len(sizes), dtype=np.bool_)
    has_children[slots] = True
    uneven = ((sizes > 0) != has_children) & checked[slot_owners]
    sound[slot_owners[uneven]] = False
    wanted = slots << _TOKEN_BITS | _masked(tokens[judged])
    sound[owners[~np.isin(wanted, keys)]] = False
    return sound | ~given


def _layout(
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return three arrays with one entry for each element of groups of `counts` elements: the index
    of its group, the index of the group's first element, and its index in the group."""
    owners = np.repeat(np.arange(len(counts)), counts)
    firsts = (np.cumsum(counts) - counts)[owners]
    return owners, firsts, np.arange(len(owners)) - firsts


def _masked(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    return tokens.astype(np.int64) & ((1 << _TOKEN_BITS) - 1)
