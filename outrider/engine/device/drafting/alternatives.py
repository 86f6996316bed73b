"""Alternative candidate ids for each drafted token, ranked from draft logits.

R rows, B sessions, c ids a row, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from outrider.engine.kernels.drafts.coupled_topk import put_coupled_topk
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.session_tensors import SamplingState

NUM_ALTERNATIVES: Final = 4
"""Ids told beside each drafted one, where they are asked for; each costs a pass over the logits."""


def ranked_alternatives(
    logits: Tensor,
    count: int,
    state: SamplingState,
    owners: Tensor,
    following: Tensor,
    *,
    ids: Tensor,
    temperatures: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best target ids int32 [R, c] by the distribution of softmax(logits / T), those of coupled
    sessions by shared noise, best first, -1 where there are no more; and their log-probs float32
    [R, c].

    logits: float32 or bfloat16 [R, Vd], processed by the logits processor, as many rows of each
    session as of the others; owners: int32 [B], their slots; following: int32 [R], the position
    that each row drafts for; ids: integer [Vd], the target id of each column; temperatures: float32
    [R]; None: 1.
    """
    logprobs, columns = log_softmax_topk(logits, count, temperatures=temperatures)
    put_coupled_topk(logprobs, columns, logits, state, owners, following, ids=ids)
    found = ids[columns.clamp(min=0).long()].int()
    return torch.where(columns >= 0, found, -1), logprobs


def best_alternatives(
    logits: Tensor, state: SamplingState, owners: Tensor, following: Tensor, *, ids: Tensor
) -> Tensor:
    """int32 [R, NUM_ALTERNATIVES]: see `ranked_alternatives`; draws of the rejection rule have no
    such."""
    return ranked_alternatives(logits, NUM_ALTERNATIVES, state, owners, following, ids=ids)[0]
