"""Sampling of draft tokens on the device from truncated, quantised distributions.

The distribution of a row is the result of `outrider.engine.draft_sampling.quantise_distribution`,
exactly as it is sent to the verifier. The token is drawn from its integer counts with the random
numbers of the session's DRAFT stream, which depend on the target id.

Shape suffixes: R rows, V columns of the logits, L maximum number of entries of a distribution, P
tiles of a row. A column is an id of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.draft_sampling import (
    MAX_COUNT,
    DistributionLimits,
    distribution_weights,
    quantise_distribution,
)
from outrider.engine.kernels.drafts.distribution_kernels import (
    count_tiles,
    cut_and_draw,
    gather_tiles,
    max_tiles,
)
from outrider.engine.kernels.noise import row_keys
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.engine.kernels.sampling import num_warps_for, scaled_scores, tile_columns
from outrider.engine.kernels.session_tensors import RULE_REJECTION, SamplingState
from outrider.engine.noise import gumbel_from_bits, noise_bits
from outrider.spec.noise import NoiseStream


class DrawnDistributions(NamedTuple):
    """Drawn tokens and the distributions from which they were drawn. In rows of sessions without
    the rejection rule, the column is 0 and the distribution has no entries."""

    columns: Tensor
    """int32 [R]: the drawn column of each row."""
    sizes: Tensor
    """int32 [R]: number of entries of each distribution."""
    entries: Tensor
    """int32 [2, R, L]: entries[0] are columns in increasing order, entries[1] their counts in [1,
    65535]. Values behind the last entry of a distribution are undefined."""


class ChainDistributions(NamedTuple):
    """Draft distributions of chains of K tokens, one chain per row."""

    sizes: Tensor
    """int32 [R, K]: number of entries of each distribution; 0 for sessions without the rejection
    rule."""
    entries: Tensor
    """int32 [2, R, K, L]: entries[0] are columns in increasing order, entries[1] their counts.
    Values behind the last entry of a distribution are undefined."""


def stack_distributions(drawn: Sequence[DrawnDistributions]) -> ChainDistributions:
    """Combine the distributions of K draft steps, of one token of every chain each, into the
    distributions of whole chains."""
    return ChainDistributions(
        sizes=torch.stack([law.sizes for law in drawn], dim=1),
        entries=torch.stack([law.entries for law in drawn], dim=2),
    )


def with_target_ids(
    distributions: ChainDistributions, target_ids: Tensor, *, is_increasing: bool
) -> ChainDistributions:
    """Replace the columns of each distribution by target ids, sorted in increasing order.

    target_ids: integer [V], the target id of each column, all distinct. is_increasing: whether
    target ids increase with the column, so that no sorting is needed.
    """
    columns, counts = distributions.entries
    # Behind its size a row has any words.
    ids = target_ids[columns.clamp(0, len(target_ids) - 1).long()].int()
    if not is_increasing:
        places = torch.arange(columns.shape[-1], dtype=torch.int32, device=columns.device)
        behind = places >= distributions.sizes[..., None]
        ids, order = ids.masked_fill(behind, torch.iinfo(torch.int32).max).sort(dim=-1)
        counts = counts.gather(-1, order)
    return ChainDistributions(distributions.sizes, torch.stack((ids, counts)))


def draw_from_distributions(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    ids: Tensor,
    limits: DistributionLimits,
) -> DrawnDistributions:
    """Draw a token for each row whose session uses the rejection rule with a temperature above 0.

    logits: float32 or bfloat16 [R, V], columns contiguous. NaN counts as -inf, +inf as 1e30. In a
    row without a finite score the first column has probability 1. slots: int32 [R], the session
    slot of each row. positions: int32 [R], the absolute position of the drawn token. ids: integer
    [V], the target id of each column. limits: where to truncate the distributions.
    """
    function = draw_from_distributions_triton if logits.is_cuda else draw_from_distributions_torch
    return function(logits, state, slots, positions, ids=ids, limits=limits)


def draw_from_distributions_torch(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    ids: Tensor,
    limits: DistributionLimits,
) -> DrawnDistributions:
    """Compute `draw_from_distributions` on the host, one row at a time, for CPU tensors only."""
    rows, width = logits.shape[0], _width(limits, logits.shape[1])
    owners = slots.long()
    temperatures = state.temperatures[owners]
    scores = scaled_scores(logits, temperatures)
    scores[scores.amax(dim=-1) == -torch.inf, 0] = 0.0
    weights = distribution_weights(scores).numpy()
    keys = row_keys(state.stream_keys[owners, NoiseStream.DRAFT - 1], positions)
    drawn = _new_distributions(rows, width, logits.device)
    drawing = (temperatures > 0) & (state.rules[owners] == RULE_REJECTION)
    for row in drawing.nonzero()[:, 0].tolist():
        kept, counts = quantise_distribution(weights[row], limits, at_least=1)
        columns = torch.from_numpy(kept)
        noise = gumbel_from_bits(noise_bits(keys[row], ids[columns].long()))
        values = torch.from_numpy(counts.astype(np.int64))
        size = len(kept)
        drawn.entries[0, row, :size], drawn.entries[1, row, :size] = columns, values
        drawn.columns[row] = columns[(values.double().log() + noise).argmax()]
        drawn.sizes[row] = size
    return drawn


def draw_from_distributions_triton(
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    ids: Tensor,
    limits: DistributionLimits,
    tile: int | None = None,
    block: int = 1024,
) -> DrawnDistributions:
    """Compute `draw_from_distributions` with Triton kernels. tile: number of columns per program;
    None for a default that depends on the shape. block: number of entries that the last kernel
    reads in one step."""
    rows, columns = logits.shape
    tile = tile or tile_columns(rows, columns)
    tiles = cdiv(columns, tile)
    drawn = _new_distributions(rows, _width(limits, columns), logits.device)
    if rows == 0:
        return drawn
    maxima = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    found = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    possible = torch.empty(2, rows, columns, dtype=torch.int32, device=logits.device)
    shared = (logits, logits.stride(0), columns, state.temperatures, state.rules, slots, maxima)
    options = {"TILE": tile, "num_warps": num_warps_for(tile)}
    parts = next_power_of_2(tiles)
    max_tiles[(rows, tiles)](*shared, **options)
    count_tiles[(rows, tiles)](*shared, found, TILES=parts, **options)
    gather_tiles[(rows, tiles)](*shared, found, possible[0], possible[1], TILES=parts, **options)
    cut_and_draw[(rows,)](
        state.temperatures,
        state.rules,
        state.stream_keys,
        slots,
        positions,
        ids,
        found,
        tiles,
        possible[0],
        possible[1],
        columns,
        drawn.columns,
        drawn.sizes,
        drawn.entries[0],
        drawn.entries[1],
        drawn.entries.shape[2],
        MASS=limits.mass,
        TILES=parts,
        BLOCK=block,
        num_warps=4,
    )
    return drawn


def _width(limits: DistributionLimits, columns: int) -> int:
    return min(limits.max_ids, columns)


def _new_distributions(rows: int, width: int, device: torch.device) -> DrawnDistributions:
    return DrawnDistributions(
        columns=torch.zeros(rows, dtype=torch.int32, device=device),
        sizes=torch.zeros(rows, dtype=torch.int32, device=device),
        entries=torch.empty(2, rows, width, dtype=torch.int32, device=device),
    )


assert MAX_COUNT == 65535, "the kernels search in 16 bits"
