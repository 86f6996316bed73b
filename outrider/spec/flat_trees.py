"""Validates draft trees and draft distributions of many sessions at once, in flat arrays.

Makes every check of `outrider.spec.tree` and `outrider.spec.draft_distribution`. S trees with N
nodes together, tree s owning node_counts[s] of them in turn; parents count within their tree. Peers
send these arrays: nothing in them is trusted, and an invalid tree affects no other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_TOKEN_BITS = 24
"""Ids are below 2^24 (the wire's bound), so that a slot and an id fit one word."""


def valid_trees(
    node_counts: NDArray[np.int64],
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    *,
    vocab_size: int,
    max_nodes: int,
) -> NDArray[np.bool_]:
    """[S]: which trees keep every rule of `validate_tree`, with finite log-probs. Never raises.

    The flat arrays must have the sum of `node_counts` entries.
    """
    sound = node_counts <= max_nodes
    if not len(tokens):
        return sound
    # One comparison for both bounds.
    bad = tokens.view(np.uint32) >= vocab_size
    # Of the usual drafts, chains without scores, only tokens can be wrong.
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
    """[N]: nodes without a parent before them, with a twin, or with a log-prob that cannot be."""
    owners, firsts, places = _layout(node_counts)
    bad = (parents < -1) | (parents >= places)
    # Where a parent is no good, any node of the tree stands in for it.
    above = np.clip(parents, -1, places - 1).astype(np.int64)
    ceiling = np.where(above < 0, np.float32(0.0), logprobs[np.maximum(firsts + above, 0)])
    # A NaN fails the comparison.
    bad |= ~(logprobs <= ceiling) | np.isinf(logprobs)
    if not bool((above == places - 1).all()):
        keys = (firsts + owners + above + 1) << _TOKEN_BITS | _masked(tokens)
        order = np.argsort(keys, kind="stable")
        twins = order[1:][np.diff(keys[order]) == 0]
        bad[twins] = True
    return bad


def chain_parents(node_counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """[N]: the parents of chains of so many nodes each."""
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
    """[S]: which trees have no distribution, or one that keeps every rule of
    `validate_distribution`. Never raises.

    `given` [S] says who has one; `sizes` holds node_counts + 1 slots of each, `ids` and `counts`
    the sum of `sizes` entries. `trees` [S] are the sound ones; the others' distributions are not
    looked at.
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
    # Nodes of trees with a distribution: their parents' slots, and whether those hold their tokens.
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
    """Of each element: its owner, where the owner's part begins, and its place in that part."""
    owners = np.repeat(np.arange(len(counts)), counts)
    firsts = (np.cumsum(counts) - counts)[owners]
    return owners, firsts, np.arange(len(owners)) - firsts


def _masked(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    return tokens.astype(np.int64) & ((1 << _TOKEN_BITS) - 1)
