"""What else might have been drafted.

B rows, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from outrider.engine.kernels.drafts.coupled_topk import put_coupled_topk
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.state import SamplingState

NUM_OTHERS: Final = 4
"""Ids told beside each drafted one, where they are asked for; each costs a pass over the logits."""


def best_ids(
    logits: Tensor, state: SamplingState, owners: Tensor, following: Tensor, *, ids: Tensor
) -> Tensor:
    """int32 [B, NUM_OTHERS]: the best target ids by each session's rule (draws of the rejection
    rule have no such), best first, -1 where there are no more.

    logits: float32 [B, Vd], warped; owners, following: int32 [B], the slot of each row and the
    position that it drafts for; ids: integer [Vd], the target id of each column.
    """
    scores, columns = log_softmax_topk(logits, NUM_OTHERS)
    put_coupled_topk(scores, columns, logits, state, owners, following, ids=ids)
    found = ids[columns.clamp(min=0).long()].int()
    return torch.where(columns >= 0, found, -1)
