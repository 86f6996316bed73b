# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
"""Launch of the randomized acceptance kernels: arguments, workspace and grids.

Shape suffixes are those of `outrider.engine.kernels.acceptance.randomized`. P is the number of
tiles of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.kernels.acceptance.matching import DeviceAcceptance, new_acceptance
from outrider.engine.kernels.acceptance.randomized_kernels import (
    DENSE_DISTRIBUTION,
    NO_DISTRIBUTION,
    SPARSE_DISTRIBUTION,
    draw_in_tile,
    put_drawn,
    sum_tiles,
    walk,
)
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.engine.kernels.sampling import num_warps_for, tile_columns
from outrider.engine.kernels.session_tensors import SamplingState


class DistributionTensors(NamedTuple):
    """Tensors of a `SparseDistribution` (ids, counts, ranges) or of a `DenseChainDistribution`
    (probs, draft_columns). The tensors of the other kind are None."""

    ids: Tensor | None = None
    counts: Tensor | None = None
    ranges: Tensor | None = None
    probs: Tensor | None = None
    draft_columns: Tensor | None = None

    @property
    def kind(self) -> int:
        """The kind of the distributions: NO_DISTRIBUTION, SPARSE_DISTRIBUTION or
        DENSE_DISTRIBUTION."""
        if self.ids is not None:
            return SPARSE_DISTRIBUTION
        return NO_DISTRIBUTION if self.probs is None else DENSE_DISTRIBUTION

    @property
    def entries(self) -> int:
        """Total number of entries of all sparse distributions."""
        return 0 if self.ids is None else self.ids.shape[0]

    @property
    def range_strides(self) -> tuple[int, int]:
        """Strides of `ranges` along its first dimension (sessions) and its second one (rows)."""
        return (0, 0) if self.ranges is None else (self.ranges.stride(0), self.ranges.stride(1))


class LaunchArguments(NamedTuple):
    """Arguments of `accept_sampled`, in its order."""

    logits: Tensor
    chosen: Tensor
    tokens: Tensor
    parents: Tensor | None
    num_nodes: int
    state: SamplingState
    slots: Tensor
    positions: Tensor
    distributions: DistributionTensors


class _Workspace(NamedTuple):
    maxima: Tensor
    """float32 [M, P]: maximum of each tile."""
    sums: Tensor
    """float32 [M, P]: sums of exp(score - maximum)."""
    inside: Tensor
    """float64 [E]: the residual of the target distribution on the ids of the draft distribution.
    `finish_residual` replaces it by log-probabilities."""
    draft: Tensor
    """float64 [E]: the draft distribution without the rejected tokens, normalised."""
    modes: Tensor
    """int32 [B]: how the target distribution at the last accepted node changed."""
    nodes: Tensor
    """int32 [B]: row of the last accepted node."""
    tops: Tensor
    """float32 [B]: largest score of the last accepted node."""
    logs: Tensor
    """float32 [B]: log-sum-exp of the scores of the last accepted node, minus the largest score."""
    scores: Tensor
    """float64 [B, P]: largest perturbed score of each tile."""
    winners: Tensor
    """int32 [B, P]: column of the largest perturbed score of each tile."""


def _workspace(rows: int, batch: int, tiles: int, entries: int, device: torch.device) -> _Workspace:
    shapes = {
        torch.float32: [(rows, tiles), (rows, tiles), (batch,), (batch,)],
        torch.float64: [(max(entries, 1),), (max(entries, 1),), (batch, tiles)],
        torch.int32: [(batch,), (batch,), (batch, tiles)],
    }
    floats, doubles, ints = (
        [torch.empty(shape, dtype=dtype, device=device) for shape in shapes[dtype]]
        for dtype in (torch.float32, torch.float64, torch.int32)
    )
    return _Workspace(
        maxima=floats[0],
        sums=floats[1],
        inside=doubles[0],
        draft=doubles[1],
        modes=ints[0],
        nodes=ints[1],
        tops=floats[2],
        logs=floats[3],
        scores=doubles[2],
        winners=ints[2],
    )


def launch_accept_sampled(arguments: LaunchArguments, *, tile: int | None) -> DeviceAcceptance:
    """Run the kernels of `accept_sampled` and return their result. tile: number of columns per
    program, a power of two; None for a default that depends on the shape."""
    logits, num_nodes, distributions = (
        arguments.logits,
        arguments.num_nodes,
        arguments.distributions,
    )
    rows, columns = logits.shape
    batch = rows // num_nodes
    result = new_acceptance(batch, num_nodes, logits.device)
    if batch == 0:
        return result
    tile = tile or tile_columns(rows, columns)
    tiles = cdiv(columns, tile)
    work = _workspace(rows, batch, tiles, distributions.entries, logits.device)
    state, slots = arguments.state, arguments.slots
    sum_tiles[(rows, tiles)](
        logits,
        logits.stride(0),
        columns,
        state.temperatures,
        state.rules,
        slots,
        work.maxima,
        work.sums,
        NODES=num_nodes,
        TILE=tile,
        num_warps=num_warps_for(tile),
    )
    _launch_walks(arguments, work, result, tiles)
    _launch_draws(arguments, work, (batch, tiles), tile)
    put_drawn[(batch,)](
        work.modes,
        work.scores,
        work.winners,
        result.counts,
        result.tokens,
        tiles,
        NODES=num_nodes,
        BLOCK=next_power_of_2(tiles),
        num_warps=1,
    )
    return result


def _launch_walks(
    arguments: LaunchArguments, work: _Workspace, result: DeviceAcceptance, tiles: int
) -> None:
    distributions, state = arguments.distributions, arguments.state
    walk[(len(arguments.slots),)](
        arguments.logits,
        arguments.logits.stride(0),
        arguments.logits.shape[1],
        arguments.chosen,
        arguments.tokens,
        arguments.parents,
        state.stream_keys,
        state.temperatures,
        state.rules,
        arguments.slots,
        arguments.positions,
        work.maxima,
        work.sums,
        tiles,
        distributions.ids,
        distributions.counts,
        distributions.ranges,
        *distributions.range_strides,
        work.inside,
        work.draft,
        distributions.probs,
        0 if distributions.probs is None else distributions.probs.stride(0),
        0 if distributions.probs is None else distributions.probs.stride(1),
        distributions.draft_columns,
        result.counts,
        result.rows,
        result.tokens,
        result.flags,
        work.modes,
        work.nodes,
        work.tops,
        work.logs,
        NODES=arguments.num_nodes,
        BLOCK=next_power_of_2(arguments.num_nodes),
        TILES=next_power_of_2(tiles),
        CHAIN=arguments.parents is None,
        DISTRIBUTION=distributions.kind,
        ENTRIES=min(max(next_power_of_2(distributions.entries), 16), 1024),
        num_warps=4 if distributions.kind == SPARSE_DISTRIBUTION else 1,
    )


def _launch_draws(
    arguments: LaunchArguments, work: _Workspace, grid: tuple[int, int], tile: int
) -> None:
    logits, distributions, state = arguments.logits, arguments.distributions, arguments.state
    draw_in_tile[grid](
        logits,
        logits.stride(0),
        logits.shape[1],
        arguments.tokens,
        arguments.parents,
        state.stream_keys,
        state.temperatures,
        arguments.slots,
        arguments.positions,
        distributions.ids,
        distributions.ranges,
        *distributions.range_strides,
        work.inside,
        distributions.probs,
        0 if distributions.probs is None else distributions.probs.stride(0),
        0 if distributions.probs is None else distributions.probs.stride(1),
        distributions.draft_columns,
        work.modes,
        work.nodes,
        work.tops,
        work.logs,
        work.scores,
        work.winners,
        NODES=arguments.num_nodes,
        CHAIN=arguments.parents is None,
        DISTRIBUTION=distributions.kind,
        # A node's entries are distinct columns.
        SEARCH_STEPS=min(distributions.entries, logits.shape[1]).bit_length(),
        TILE=tile,
        num_warps=num_warps_for(tile),
    )
