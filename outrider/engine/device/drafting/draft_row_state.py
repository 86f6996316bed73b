"""Sampling state of draft rows whose session slot is not the slot of their block table.

Shapes: B sessions or branches, W tokens that the logits-processor state has not counted yet, F
frontier nodes of a tree step, S tree steps so far.
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
    """State with which the rows of a draft batch are sampled, if the session slot of a row is not
    the slot of its block table. The rows of look-ahead branches are an example."""

    owners: Tensor
    """int32 [B]: session slots that index the sampling state and the logits-processor state."""
    draft_keys: Tensor
    """int64 [B]: keys of the DRAFT noise stream, used to draw from distributions."""
    pending_tokens: Tensor | None = None
    """int32 [B, W]: draft ids of tokens before the row that penalties must count as output, but
    that the logits-processor state does not contain yet; -1 for no token. None if no row has such
    tokens."""

    def sampling_state(self, state: SamplingState) -> tuple[SamplingState, Tensor]:
        """Return a sampling state that is indexed by row of the batch instead of session slot, and
        the row indices, int32 [B], to pass as slots together with it. Its DRAFT keys are
        `draft_keys`."""
        owners = self.owners.long()
        keys = state.stream_keys[owners]
        keys[:, NoiseStream.DRAFT - 1] = self.draft_keys
        by_row = SamplingState(keys, state.temperatures[owners], state.rules[owners])
        return by_row, torch.arange(len(owners), dtype=torch.int32, device=owners.device)


def chain_output_path(uncounted: Tensor | None, drafted: Sequence[Tensor]) -> OutputPath | None:
    """Return the tokens that penalties count as output when the next token of each chain is
    drafted; None if there are no such tokens.

    `uncounted`: int32 [B, W], draft ids of tokens before the chain that are not in the
    logits-processor state yet, as in `DraftSampling.pending_tokens`. `drafted`: draft ids of the
    chain's tokens so far, int32 [B] for each position.
    """
    parts = [] if uncounted is None else [uncounted]
    parts += [columns[:, None] for columns in drafted]
    if not parts:
        return None
    columns = torch.cat(parts, dim=1)
    return OutputPath(columns, num_visible=columns.shape[1])


def tree_output_path(
    uncounted: Tensor | None, drafted: Sequence[Tensor], mask: Tensor | None
) -> OutputPath | None:
    """Return the tokens that penalties count as output when the children of each frontier node of a
    tree are drafted; None if there are no such tokens.

    `uncounted`: as in `chain_output_path`. `drafted`: draft ids of the nodes so far, int32 [B, F]
    for each step. `mask`: uint8 [B, F, S * F], 1 where a drafted node is on the path of a frontier
    node; None before the first step.
    """
    if mask is None:
        return chain_output_path(uncounted, ())
    columns = torch.cat(tuple(drafted), dim=1)
    if uncounted is None:
        return OutputPath(columns, mask)
    seen = mask.new_ones((*mask.shape[:2], uncounted.shape[1]))
    return OutputPath(torch.cat((uncounted, columns), dim=1), torch.cat((seen, mask), dim=2))
