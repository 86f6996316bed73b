"""PyTorch attention of ragged segments over the KV pool.

R rows of the batch, N rows of a segment, C context slots, G key/value heads, Q query heads,
g = Q / G, d head dimension, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kv_cache import KVPool, KVSequence


@dataclass(slots=True, kw_only=True)
class SegmentPlan:
    """Read and write positions of one segment in the pool, shared by all layers of a forward.

    The views of all layers are cut here in a few calls, for on a CPU a layer's small operators
    cost as much as a good part of its products.
    """

    rows: slice
    keys: tuple[Tensor, ...]
    """Per layer [G, g, C, d]: a view that repeats each head g times; [1, G, C, d] for a single row.
    Empty when fragmented."""
    values: tuple[Tensor, ...]
    new_rows: tuple[Tensor, ...]
    """Per layer [2, G, N, d]: where this segment's keys and values go. Empty when fragmented."""
    storage: tuple[Tensor, ...]
    """Per layer [2, G, S, d], for a fragmented sequence."""
    read_slots: Tensor | None
    """int64 [C], pool slots of a fragmented sequence, in order."""
    mask: Tensor | None
    """[N, C], 0 where visible and -inf elsewhere, in the model's dtype."""
    is_causal: bool


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
    """Lay out the rows announced by `sequence.begin`."""
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


def attend_segment(plan: SegmentPlan, layer: int, qkv_NDd: Tensor, num_heads: int) -> Tensor:
    """Write this segment's keys and values, then attend. Returns [N, G, g, d] (a view).

    All query heads of a single row see the same slots. Those of a group are then rows of one
    product over their keys, which takes three quarters of the time of a product each on a CPU.

    qkv holds Q query heads, then G key heads, then G value heads, of the segment's rows.
    """
    count, _, dim = qkv_NDd.shape
    new_2GNd = qkv_NDd[:, num_heads:].view(count, 2, -1, dim).permute(1, 2, 0, 3)
    if plan.read_slots is None:
        plan.new_rows[layer].copy_(new_2GNd)
        keys, values = plan.keys[layer], plan.values[layer]
    else:
        stored = plan.storage[layer]
        stored.index_copy_(2, plan.read_slots[-count:], new_2GNd)
        gathered = stored.index_select(2, plan.read_slots)
        if count == 1:
            keys, values = gathered[:, None].unbind()
        else:
            group = num_heads // gathered.shape[1]
            keys, values = gathered[:, :, None].expand(-1, -1, group, -1, -1).unbind()
    if count == 1:
        q_1Ggd = qkv_NDd[:, :num_heads].view(1, keys.shape[1], -1, dim)
        return F.scaled_dot_product_attention(q_1Ggd, keys, values, attn_mask=plan.mask)
    q_GgNd = qkv_NDd[:, :num_heads].view(count, keys.shape[0], -1, dim).permute(1, 2, 0, 3)
    context = F.scaled_dot_product_attention(
        q_GgNd, keys, values, attn_mask=plan.mask, is_causal=plan.is_causal
    )
    return context.permute(2, 0, 1, 3)
