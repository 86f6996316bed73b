"""Batch-invariant attention on CPUs: a row's result does not depend on the other rows of its batch.

Shapes are those of `outrider.engine.attention`. The path of a row consists of all tokens up to it
in its text. In a draft tree these are the committed tokens and the nodes from the root to the row.
Each row attends to the keys of its own path, in the order of their positions.

The rows of one path are computed together, with padding. The number of queries is a multiple of
QUERY_ROWS. The number of keys is a multiple of 512 in float32 and of 64 in bfloat16, the blocks in
which PyTorch multiplies. With these sizes PyTorch's attention on x86 gives a row the same bits
among any other rows and beside any number of hidden keys. This was found by comparison (torch 2.13)
and is not documented by PyTorch, so tests compare it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kv_cache import KVPool, KVSequence

QUERY_ROWS: Final = 8
"""The number of queries of a path is padded to a multiple of QUERY_ROWS."""


@dataclass(slots=True, kw_only=True)
class SegmentPath:
    """Rows of one segment that lie on one path, with the slots that they read.

    These rows follow each other in a text, or lie on one path of a draft tree from the root to a
    leaf.
    """

    rows: Tensor
    """Rows of the segment, int64 [n], in the order of their positions."""
    read_slots: Tensor
    """Pool slots of the path's tokens in the order of their positions, int64 [C]. Padding at the
    end repeats the first slot of the sequence."""
    mask: Tensor
    """Additive mask [n rounded up to a multiple of QUERY_ROWS, C] in the model's dtype: 0 for
    visible slots, -inf for hidden slots."""


@dataclass(slots=True, kw_only=True)
class InvariantSegmentPlan:
    """Pool slots that one segment reads and writes, used by all layers of a forward pass. It
    replaces `outrider.engine.attention.SegmentPlan` in batch-invariant models."""

    rows: slice
    write_slots: Tensor
    """Pool slots of the segment's rows, int64 [N]."""
    storage: tuple[Tensor, ...]
    """Keys and values of the whole pool per layer [2, G, S, d]."""
    paths: tuple[SegmentPath, ...]

    def attend(self, layer: int, qkv_NDd: Tensor, num_heads: int) -> Tensor:
        """Write this segment's keys and values to the pool, then attend. Return the result
        [N, G, g, d].

        qkv [N, Q + 2G, d] holds the query heads, then the key heads, then the value heads.
        """
        count, _, dim = qkv_NDd.shape
        stored = self.storage[layer]
        new_2GNd = qkv_NDd[:, num_heads:].view(count, 2, -1, dim).permute(1, 2, 0, 3)
        stored.index_copy_(2, self.write_slots, new_2GNd)
        group = num_heads // stored.shape[1]
        queries = qkv_NDd[:, :num_heads].view(count, stored.shape[1], group, dim)
        result = torch.empty_like(queries)
        for path in self.paths:
            used, padded = path.rows.shape[0], path.mask.shape[0]
            q_GgNd = F.pad(queries[path.rows].permute(1, 2, 0, 3), (0, 0, 0, padded - used))
            gathered = stored.index_select(2, path.read_slots)
            keys, values = gathered[:, :, None].expand(-1, -1, group, -1, -1).unbind()
            context = F.scaled_dot_product_attention(q_GgNd, keys, values, attn_mask=path.mask)
            result[path.rows] = context[:, :, :used].permute(2, 0, 1, 3)
        return result


def plan_invariant_segment(
    sequence: KVSequence,
    pool: KVPool,
    rows: slice,
    *,
    mask: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
) -> InvariantSegmentPlan:
    """Return the plan of a segment, whose rows `sequence.begin` has reserved.

    `rows` are the segment's rows in the batch. `mask` is that of `outrider.engine.target.Segment`,
    and each of its rows must show the path of that row and nothing else. `window` is the sliding
    window in tokens, or None if there is none.
    """
    start, count = sequence.len, rows.stop - rows.start
    slots = sequence.slots(0, start + count)
    positions = sequence.positions(0, start + count)
    paths = []
    for members, entries in _paths(start, count, mask):
        own = torch.arange(len(entries) - len(members), len(entries))
        path_mask = _path_mask(positions[entries], own, window, dtype)
        # The mask hides the padding, which repeats the first slot.
        hidden = slots[:1].expand(path_mask.shape[1] - len(entries))
        read_slots = torch.cat((slots[entries], hidden))
        paths.append(SegmentPath(rows=members, read_slots=read_slots, mask=path_mask))
    return InvariantSegmentPlan(
        rows=rows,
        write_slots=slots[start:],
        storage=pool.storage.unbind(1),
        paths=tuple(paths),
    )


def _paths(start: int, count: int, mask: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Return the paths of a segment whose sequence has `start` committed slots.

    Each path is a pair (rows, slots). A row of the segment is in exactly one pair. The slots are
    those of the sequence that the path reads, and the last of them are the rows' own.
    """
    if mask is None:
        return [(torch.arange(count), torch.arange(start + count))]
    span = mask.shape[1]
    older = torch.arange(start + count - span)
    found = []
    missing = torch.ones(count, dtype=torch.bool)
    # Children come after their parents, so that a path is found from its end.
    for leaf in range(count - 1, -1, -1):
        if not missing[leaf]:
            continue
        seen = mask[leaf].nonzero().flatten()
        members = seen[seen >= span - count] - (span - count)
        # Rows before the first missing one were computed with another leaf.
        members = members[int(missing[members].nonzero()[0]) :]
        missing[members] = False
        found.append((members, torch.cat((older, seen + len(older)))))
    return found


def _path_mask(positions: Tensor, own: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the padded additive mask of the rows that are the entries `own` of a path.

    `positions` are those of all entries of the path, int64 [c].
    """
    entry = torch.arange(len(positions))
    visible = entry <= own[:, None]
    if window is not None:
        visible &= positions > positions[own][:, None] - window
    # Padding rows see the first entry: a row that sees nothing would be NaN.
    key_block = 512 if dtype.itemsize > 2 else 64
    shape = (len(own) + -len(own) % QUERY_ROWS, len(entry) + -len(entry) % key_block)
    additive = torch.full(shape, float("-inf"), dtype=dtype)
    additive[:, 0] = 0
    additive[: len(own), : len(entry)] = torch.where(visible, 0.0, float("-inf")).to(dtype)
    return additive
