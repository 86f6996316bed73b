"""Draft distributions: the exact, quantised distributions that draft tokens were drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.spec.tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class DraftDistribution:
    """Distributions from which the tokens of one draft tree were drawn, truncated and quantised.

    Every node with children has a distribution over target ids, stored in a slot. Slot 0 belongs to
    the root and slot i + 1 to node i. The slot of a node without children is empty. N is the number
    of nodes and M the number of entries of all slots.

        offsets: int32 [N + 2]; slot s owns the entries from offsets[s] to offsets[s + 1] - 1.
        ids: int32 [M] target ids, strictly increasing within a slot.
        counts: uint16 [M], >= 1.

    The probability of an entry is its count divided by the sum of its slot's counts, in float64.
    Drafter and verifier thus compute the same number from the same integers.
    """

    offsets: NDArray[np.int32]
    ids: NDArray[np.int32]
    counts: NDArray[np.uint16]

    def entries(self, slot: int) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
        """Return views of a slot's ids and counts; both are empty if the slot is empty."""
        begin, end = int(self.offsets[slot]), int(self.offsets[slot + 1])
        return self.ids[begin:end], self.counts[begin:end]

    def draft_probs(self, slot: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the ids (int64) and probabilities (float64, sum 1) of a slot. Both arrays are
        empty if the slot is empty."""
        ids, counts = self.entries(slot)
        total = int(counts.sum(dtype=np.int64))
        return ids.astype(np.int64), counts.astype(np.float64) / max(total, 1)


DistributionEntries = tuple[NDArray[np.int32], NDArray[np.uint16]]
"""Ids and counts of one slot of a `DraftDistribution`."""


def make_distribution(
    num_nodes: int, slots: Mapping[int, DistributionEntries]
) -> DraftDistribution:
    """Create the `DraftDistribution` of a tree of `num_nodes` nodes. `slots` maps each slot that is
    not empty to its ids and counts."""
    sizes = np.zeros(num_nodes + 2, dtype=np.int64)
    for slot, (ids, _) in slots.items():
        sizes[slot + 1] = len(ids)
    order = sorted(slots)
    no_ids, no_counts = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint16)
    return DraftDistribution(
        offsets=np.cumsum(sizes).astype(np.int32),
        ids=np.concatenate([no_ids, *(slots[s][0] for s in order)]).astype(np.int32),
        counts=np.concatenate([no_counts, *(slots[s][1] for s in order)]).astype(np.uint16),
    )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidMessageError(message, reason="INVALID_DRAFT_LAW")


def validate_distribution(
    distribution: DraftDistribution, tree: DraftTree, vocab_size: int
) -> None:
    """Check a distribution against its tree, which is valid. Raises InvalidMessageError if the
    distribution is not.

    A valid distribution has arrays of the right types and lengths, offsets that rise from 0 to the
    number of ids, ids in [0, vocab_size) that strictly increase within a slot, and counts >= 1. A
    slot has entries if and only if its node has children. Every child's token is among its parent's
    ids, because other tokens cannot have been drawn from that distribution.
    """
    for name, array, dtype in (
        ("offsets", distribution.offsets, np.int32),
        ("ids", distribution.ids, np.int32),
        ("counts", distribution.counts, np.uint16),
    ):
        _require(array.dtype == dtype, f"{name} must be {np.dtype(dtype)}, got {array.dtype}")
        _require(array.ndim == 1, f"{name} must have one dimension, got {array.ndim}")
    num_slots, entries = len(tree) + 1, len(distribution.ids)
    offsets = distribution.offsets.astype(np.int64)
    _require(len(offsets) == num_slots + 1, f"expected {num_slots + 1} offsets")
    _require(
        len(distribution.counts) == entries, f"{entries} ids but {len(distribution.counts)} counts"
    )
    sizes = np.diff(offsets)
    _require(
        int(offsets[0]) == 0 and int(offsets[-1]) == entries and bool((sizes >= 0).all()),
        f"offsets must rise from 0 to {entries}",
    )
    _require(
        bool(((distribution.ids >= 0) & (distribution.ids < vocab_size)).all()),
        f"ids must be in [0, {vocab_size})",
    )
    _require(bool((distribution.counts >= 1).all()), "counts must be >= 1")
    slot_of_entry = np.repeat(np.arange(num_slots), sizes)
    keys = slot_of_entry * vocab_size + distribution.ids
    _require(bool((np.diff(keys) > 0).all()), "ids must strictly increase within a slot")
    slot_of_node = tree.parents.astype(np.int64) + 1
    has_children = np.zeros(num_slots, dtype=np.bool_)
    has_children[slot_of_node] = True
    _require(
        bool(((sizes > 0) == has_children).all()),
        "a slot must have entries if and only if its node has children",
    )
    wanted = slot_of_node * vocab_size + tree.tokens
    _require(bool(np.isin(wanted, keys).all()), "a node's token is not in its parent's draft law")
