"""Launch of the logits-processor kernels (`penalties`, `truncation`, `cutoff_mask`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.kernels.logits_processor import cutoff_mask, penalties, truncation
from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.engine.kernels.sampling import num_warps_for, tile_columns
from outrider.engine.kernels.session_tensors import (
    AllowedTokenBits,
    LogitsProcessorState,
    SamplingState,
)


def launch_process(
    logits: Tensor,
    warp: LogitsProcessorState,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    rows_per_slot: int,
    path: OutputPath | None = None,
    allowed_tokens: AllowedTokenBits | None = None,
    tile: int | None = None,
    block: int = 512,
) -> None:
    """Compute `process_logits` with six launches of Triton kernels. tile: number of columns per
    program, a power of two; None for a default that depends on the shape. block: number of
    candidates that the threshold search reads in one step."""
    rows, columns = logits.shape
    if rows == 0:
        return
    launches = _Launches(
        _Sampling(warp, state, slots, positions, rows_per_slot, allowed_tokens),
        logits,
        tile or tile_columns(rows, columns),
    )
    launches.edit(path)
    launches.cut(block)
    launches.finish()


class _Sampling(NamedTuple):
    """Sampling parameters of the rows of one call; see `process_logits`."""

    warp: LogitsProcessorState
    state: SamplingState
    slots: Tensor
    positions: Tensor
    rows_per_slot: int
    allowed: AllowedTokenBits | None


class _Launches:
    """The kernel launches of one call, and the tensors that one kernel passes to another."""

    def __init__(self, sampling: _Sampling, logits: Tensor, tile: int) -> None:
        rows, columns = logits.shape
        tiles, device = cdiv(columns, tile), logits.device
        self._sampling = sampling
        self._grid, self._tile = (rows, tiles), tile
        self._parts = next_power_of_2(tiles)
        self._logits = logits, logits.stride(0), columns
        self._maxima = torch.empty(rows, tiles, dtype=torch.float32, device=device)
        self._found = torch.empty(rows, dtype=torch.int32, device=device)
        self._lowest = torch.empty(rows, dtype=torch.float32, device=device)

    def edit(self, path: OutputPath | None) -> None:
        """Apply penalties, biases, bans and grammar masks, and compute the maximum of each tile."""
        warp, _, slots, positions, rows_per_slot, allowed_tokens = self._sampling
        mask = None if path is None else path.mask
        penalties.edit[self._grid](
            *self._logits,
            warp.flags,
            warp.penalties,
            warp.counts,
            warp.entry_counts,
            warp.entry_columns,
            warp.entry_amounts,
            warp.entry_ends,
            warp.entry_columns.shape[1],
            slots,
            positions,
            None if path is None else path.columns,
            0 if path is None else path.columns.stride(0),
            0 if path is None else path.columns.shape[1],
            0 if path is None else path.num_visible,
            mask,
            0 if mask is None else mask.stride(0),
            0 if mask is None else mask.stride(1),
            *_allowed_arguments(allowed_tokens),
            self._maxima,
            self._found,
            rows_per_slot=rows_per_slot,
            HAS_PATH=path is not None,
            HAS_MASK=mask is not None,
            HAS_LEGAL=allowed_tokens is not None,
            TILE=self._tile,
            num_warps=num_warps_for(self._tile),
        )

    def cut(self, block: int) -> None:
        """Compute for each row the lowest score that top-k, top-p and min-p keep."""
        warp, state, slots, _, rows_per_slot, _ = self._sampling
        (rows, tiles), columns, device = self._grid, self._logits[2], self._maxima.device
        guides = torch.empty(
            2, rows, tiles, truncation.NUM_BRACKET_SUMS, dtype=torch.float32, device=device
        )
        brackets = torch.empty(rows, 3, dtype=torch.float32, device=device)
        sums = torch.empty(rows, tiles, 2, dtype=torch.int64, device=device)
        candidates = torch.empty(rows, columns, dtype=torch.float32, device=device)
        cuts = (warp.top_ks, warp.top_ps)
        head = (*self._head, *cuts, self._maxima)
        for level in (0, 1):
            truncation.bracket_sums[self._grid](
                *head, guides[0], guides[level], brackets, LEVEL=level, **self._shapes
            )
        truncation.collect_candidates[self._grid](
            *head, guides[1], brackets, sums, candidates, self._found, **self._shapes
        )
        truncation.find_threshold[(rows,)](
            columns,
            warp.flags,
            state.temperatures,
            slots,
            *cuts,
            warp.min_p_floors,
            self._maxima,
            sums,
            candidates,
            self._found,
            self._lowest,
            tiles,
            rows_per_slot=rows_per_slot,
            TILES=self._parts,
            BLOCK=block,
            num_warps=8,
        )

    def finish(self) -> None:
        """Set all removed logits to -inf."""
        warp, _, _, positions, _, allowed_tokens = self._sampling
        cutoff_mask.finish[self._grid](
            *self._head,
            warp.entry_counts,
            warp.entry_columns,
            warp.entry_ends,
            warp.entry_columns.shape[1],
            positions,
            *_allowed_arguments(allowed_tokens),
            self._maxima,
            self._lowest,
            HAS_LEGAL=allowed_tokens is not None,
            **self._shapes,
        )

    @property
    def _head(self) -> tuple[Tensor | int, ...]:
        """First arguments of all kernels after that of `edit`."""
        warp, state, slots, *_ = self._sampling
        return (*self._logits, warp.flags, state.temperatures, slots)

    @property
    def _shapes(self) -> dict[str, int]:
        """Last arguments of all kernels after that of `edit`."""
        return {
            "rows_per_slot": self._sampling.rows_per_slot,
            "TILE": self._tile,
            "TILES": self._parts,
            "num_warps": num_warps_for(self._tile),
        }


def _allowed_arguments(
    allowed_tokens: AllowedTokenBits | None,
) -> tuple[Tensor | None, int, Tensor | None]:
    """Return the mask bits, the number of words of a row of bits, and the row indices."""
    return (
        (None, 0, None)
        if allowed_tokens is None
        else (allowed_tokens.bits, allowed_tokens.bits.shape[1], allowed_tokens.row_indices)
    )


def launch_count(
    tokens: Tensor,
    counts: Tensor,
    warp: LogitsProcessorState,
    slots: Tensor,
    *,
    columns: Tensor | None = None,
) -> None:
    """Compute `count_tokens` with one Triton kernel, one program per session."""
    batch, width = tokens.shape
    if batch == 0:
        return
    penalties.add_counts[(batch,)](
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
