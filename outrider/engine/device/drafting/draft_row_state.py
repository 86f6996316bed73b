"""Sampling state of draft rows that differs from the state of their KV slots.

B sessions or branches, W tokens that the logits-processor state has not counted yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.session_tensors import SamplingState
from outrider.spec.noise import NoiseStream


class DraftSampling(NamedTuple):
    """Sampling slots, noise keys and uncounted tokens of the rows of a draft batch."""

    owners: Tensor
    """int32 [B]: slots of the sampling state and of the logits processor's."""
    draft_keys: Tensor
    """int64 [B]: keys of the DRAFT noise that distributions are drawn with."""
    pending_tokens: Tensor | None = None
    """int32 [B, W]: draft ids of tokens that count as output beside those that the logits
    processor's state knows; -1: none. None: there are none."""

    def sampling_state(self, state: SamplingState) -> tuple[SamplingState, Tensor]:
        """The sampling state by row of the batch, under the rows' own keys, and slots int32 [B]."""
        owners = self.owners.long()
        keys = state.stream_keys[owners]
        keys[:, NoiseStream.DRAFT - 1] = self.draft_keys
        by_row = SamplingState(keys, state.temperatures[owners], state.rules[owners])
        return by_row, torch.arange(len(owners), dtype=torch.int32, device=owners.device)


def chain_output_path(uncounted: Tensor | None, drafted: Sequence[Tensor]) -> OutputPath | None:
    """What counts as output at the next row of chains: drafted int32 [B], one a level so far."""
    parts = [] if uncounted is None else [uncounted]
    parts += [columns[:, None] for columns in drafted]
    if not parts:
        return None
    columns = torch.cat(parts, dim=1)
    return OutputPath(columns, num_visible=columns.shape[1])


def tree_output_path(
    uncounted: Tensor | None, drafted: Sequence[Tensor], mask: Tensor | None
) -> OutputPath | None:
    """As `chain_output_path` of a tree's frontier: drafted int32 [B, F], one a step; mask uint8
    [B, F, S * F] of all of them, None before the first step."""
    if mask is None:
        return chain_output_path(uncounted, ())
    columns = torch.cat(tuple(drafted), dim=1)
    if uncounted is None:
        return OutputPath(columns, mask)
    seen = mask.new_ones((*mask.shape[:2], uncounted.shape[1]))
    return OutputPath(torch.cat((uncounted, columns), dim=1), torch.cat((seen, mask), dim=2))
