"""The launches of the warper's kernels (`edit`, `cut`, `finish`)."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.engine.kernels.sampling import tile_columns, warps_of
from outrider.engine.kernels.state import LegalBits, SamplingState, WarpState
from outrider.engine.kernels.warp import cut, edit, finish
from outrider.engine.kernels.warp.path import TokenPath


def launch_warp(
    logits: Tensor,
    warp: WarpState,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    rows_per_slot: int,
    path: TokenPath | None = None,
    legal: LegalBits | None = None,
    tile: int | None = None,
    block: int = 512,
) -> None:
    """`warp_logits` in six launches. tile: columns a program, a power of two, None picks it;
    block: candidates that the search looks at at once."""
    rows, columns = logits.shape
    if rows == 0:
        return
    tile = tile or tile_columns(rows, columns)
    tiles = cdiv(columns, tile)
    grid, warps = (rows, tiles), warps_of(tile)
    parts = next_power_of_2(tiles)
    device = logits.device
    maxima = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    guides = torch.empty(2, rows, tiles, cut.GUIDES, dtype=torch.float32, device=device)
    brackets = torch.empty(rows, 3, dtype=torch.float32, device=device)
    sums = torch.empty(rows, tiles, 2, dtype=torch.int64, device=device)
    candidates = torch.empty(rows, columns, dtype=torch.float32, device=device)
    found = torch.empty(rows, dtype=torch.int32, device=device)
    lowest = torch.empty(rows, dtype=torch.float32, device=device)
    entries = warp.entry_columns.shape[1]
    mask = None if path is None else path.mask
    edit.edit[grid](
        logits,
        logits.stride(0),
        columns,
        warp.flags,
        warp.penalties,
        warp.counts,
        warp.entry_counts,
        warp.entry_columns,
        warp.entry_amounts,
        warp.entry_ends,
        entries,
        slots,
        positions,
        None if path is None else path.columns,
        0 if path is None else path.columns.stride(0),
        0 if path is None else path.columns.shape[1],
        0 if path is None else path.seen,
        mask,
        0 if mask is None else mask.stride(0),
        0 if mask is None else mask.stride(1),
        *_legal_arguments(legal),
        maxima,
        found,
        rows_per_slot=rows_per_slot,
        HAS_PATH=path is not None,
        HAS_MASK=mask is not None,
        HAS_LEGAL=legal is not None,
        TILE=tile,
        num_warps=warps,
    )
    head = (logits, logits.stride(0), columns, warp.flags, state.temperatures, slots)
    cuts = (warp.top_ks, warp.top_ps)
    shapes = {"rows_per_slot": rows_per_slot, "TILE": tile, "TILES": parts, "num_warps": warps}
    for level in (0, 1):
        cut.guide[grid](
            *head, *cuts, maxima, guides[0], guides[level], brackets, LEVEL=level, **shapes
        )
    cut.gather[grid](*head, *cuts, maxima, guides[1], brackets, sums, candidates, found, **shapes)
    cut.search[(rows,)](
        columns,
        warp.flags,
        state.temperatures,
        slots,
        *cuts,
        warp.min_p_floors,
        maxima,
        sums,
        candidates,
        found,
        lowest,
        tiles,
        rows_per_slot=rows_per_slot,
        TILES=parts,
        BLOCK=block,
        num_warps=8,
    )
    finish.finish[grid](
        *head,
        warp.entry_counts,
        warp.entry_columns,
        warp.entry_ends,
        entries,
        positions,
        *_legal_arguments(legal),
        maxima,
        lowest,
        HAS_LEGAL=legal is not None,
        **shapes,
    )


def _legal_arguments(legal: LegalBits | None) -> tuple[Tensor | None, int, Tensor | None]:
    """Bits, words of a row of them, index."""
    return (None, 0, None) if legal is None else (legal.bits, legal.bits.shape[1], legal.places)


def launch_count(
    tokens: Tensor,
    counts: Tensor,
    warp: WarpState,
    slots: Tensor,
    *,
    columns: Tensor | None = None,
) -> None:
    """`count_tokens`, a program a session."""
    batch, width = tokens.shape
    if batch == 0:
        return
    edit.add_counts[(batch,)](
        tokens,
        tokens.stride(0),
        counts,
        warp.flags,
        warp.counts,
        warp.counts.shape[1],
        slots,
        columns,
        warp.counts.shape[1] if columns is None else len(columns),
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        HAS_COLUMNS=columns is not None,
        num_warps=1,
    )
