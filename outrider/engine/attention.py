"""PyTorch attention of ragged segments over the KV pool.

A segment is the consecutive rows of a batch that belong to one sequence. Shapes: N rows of a
segment, C context slots (cached tokens and new rows), S slots of the pool, G key/value heads, Q
query heads, g = Q / G query heads per key/value head, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kv_cache import KVPool, KVSequence


@dataclass(slots=True, kw_only=True)
class SegmentPlan:
    """Pool slots that one segment reads and writes, as views or indices for every layer.

    A plan is made once per forward pass. It creates the views of all layers together in a few
    calls, because on a CPU small operators in each layer would take a notable time beside the
    layer's matrix products.
    """

    rows: slice
    keys: tuple[Tensor, ...]
    """Keys of the context per layer: a view [G, g, C, d] that repeats each head g times, or
    [1, G, C, d] for a single row. Empty if the sequence is fragmented (not contiguous)."""
    values: tuple[Tensor, ...]
    """Values of the context per layer, in the shape of `keys`."""
    new_rows: tuple[Tensor, ...]
    """View [2, G, N, d] per layer to which this segment's keys and values are written. Empty if the
    sequence is fragmented."""
    storage: tuple[Tensor, ...]
    """Keys and values of the whole pool per layer [2, G, S, d]. Empty if the sequence is
    contiguous."""
    read_slots: Tensor | None
    """Pool slots of a fragmented sequence in token order, int64 [C]. None if contiguous."""
    mask: Tensor | None
    """Additive mask [N, C] in the model's dtype: 0 for visible slots, -inf for hidden slots. None
    if no mask is needed."""
    is_causal: bool

    def attend(self, layer: int, qkv_NDd: Tensor, num_heads: int) -> Tensor:
        """Write this segment's keys and values to the pool, then attend. Return a view
        [N, G, g, d].

        qkv [N, Q + 2G, d] holds the query heads, then the key heads, then the value heads. If the
        segment has a single row, the query heads of a group are the rows of one matrix product. On
        a CPU this takes three quarters of the time of one product per head.
        """
        count, _, dim = qkv_NDd.shape
        new_2GNd = qkv_NDd[:, num_heads:].view(count, 2, -1, dim).permute(1, 2, 0, 3)
        if self.read_slots is None:
            self.new_rows[layer].copy_(new_2GNd)
            keys, values = self.keys[layer], self.values[layer]
        else:
            stored = self.storage[layer]
            stored.index_copy_(2, self.read_slots[-count:], new_2GNd)
            gathered = stored.index_select(2, self.read_slots)
            if count == 1:
                keys, values = gathered[:, None].unbind()
            else:
                group = num_heads // gathered.shape[1]
                keys, values = gathered[:, :, None].expand(-1, -1, group, -1, -1).unbind()
        if count == 1:
            q_1Ggd = qkv_NDd[:, :num_heads].view(1, keys.shape[1], -1, dim)
            return F.scaled_dot_product_attention(q_1Ggd, keys, values, attn_mask=self.mask)
        q_GgNd = qkv_NDd[:, :num_heads].view(count, keys.shape[0], -1, dim).permute(1, 2, 0, 3)
        context = F.scaled_dot_product_attention(
            q_GgNd, keys, values, attn_mask=self.mask, is_causal=self.is_causal
        )
        return context.permute(2, 0, 1, 3)


def plan_segment(
    sequence: KVSequence,
    pool: KVPool,
    rows: slice,
    *,
    mask: Tensor | None,
    window: int | None,
    num_heads: int,
    dtype: torch.dtype,
) -> SegmentPlan:
    """Return the plan of a segment, whose rows `sequence.begin` has reserved.

    `rows` are the segment's rows in the batch. `mask` is that of `outrider.engine.target.Segment`.
    `window` is the sliding window in tokens, or None if there is none.
    """
    start, count = sequence.len, rows.stop - rows.start
    end = start + count
    window = None if window is None or end <= window else window
    is_causal = window is None and mask is None and start == 0 and count > 1
    additive = None
    if not is_causal and (count > 1 or window is not None or mask is not None):
        additive = _additive_mask(sequence, count, mask, window, dtype)
    storage, first = pool.storage, sequence.start
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()
    new_rows: tuple[Tensor, ...] = ()
    if first is not None:
        if count == 1:
            context = storage[:, :, None, :, first : first + end]
        else:
            context = storage[:, :, :, None, first : first + end]
            # Expanded, not copied: the query heads of a group read the same keys in place.
            context = context.expand(-1, -1, -1, num_heads // storage.shape[2], -1, -1)
        keys, values = context[0].unbind(), context[1].unbind()
        new_rows = storage[:, :, :, first + start : first + end].unbind(1)
    return SegmentPlan(
        rows=rows,
        keys=keys,
        values=values,
        new_rows=new_rows,
        storage=storage.unbind(1) if first is None else (),
        read_slots=sequence.slots(0, end) if first is None else None,
        mask=additive,
        is_causal=is_causal,
    )


def _additive_mask(
    sequence: KVSequence,
    count: int,
    mask: Tensor | None,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    start, end = sequence.len, sequence.len + count
    positions = sequence.positions(0, end)
    device = positions.device
    if mask is None:
        mask = torch.ones((count, count), dtype=torch.bool, device=device).tril_()
    hidden = torch.zeros((count, end), dtype=torch.bool, device=device)
    hidden[:, end - mask.shape[1] :] = ~mask
    if window is not None:
        hidden |= positions <= positions[start:, None] - window
    additive = torch.zeros((count, end), dtype=dtype, device=device)
    return additive.masked_fill_(hidden, float("-inf"))
