"""Ranks the most probable token ids at each draft position, as alternatives to the drafted token.

Shapes: R rows, B sessions, c candidate ids per row, Vd draft vocabulary size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from outrider.engine.kernels.drafts.coupled_topk import put_coupled_topk
from outrider.engine.kernels.drafts.topk import log_softmax_topk
from outrider.engine.kernels.session_tensors import SamplingState

NUM_ALTERNATIVES: Final = 4
"""Number of alternative ids per drafted token, if alternatives are requested."""


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
    """Return the c = `count` most probable target ids of each row, int32 [R, c], and their
    log-probabilities, float32 [R, c]. Ids are sorted best first and padded with -1.

    Ids are ranked by softmax(logits / T). For sessions of the coupled rule, the noise that drafter
    and target share is added before ranking.

    logits: float32 or bfloat16 [R, Vd], already processed by the logits processor. Each session has
    the same number of consecutive rows. owners: int32 [B], the sessions' slots. following: int32
    [R], the position of the token that each row predicts. ids: integer [Vd], the target id of each
    column. temperatures: float32 [R], T of each row; None for T = 1.
    """
    logprobs, columns = log_softmax_topk(logits, count, temperatures=temperatures)
    put_coupled_topk(logprobs, columns, logits, state, owners, following, ids=ids)
    found = ids[columns.clamp(min=0).long()].int()
    return torch.where(columns >= 0, found, -1), logprobs


def best_alternatives(
    logits: Tensor, state: SamplingState, owners: Tensor, following: Tensor, *, ids: Tensor
) -> Tensor:
    """Return the NUM_ALTERNATIVES most probable target ids of each row, int32 [R,
    NUM_ALTERNATIVES], ranked as by `ranked_alternatives` with T = 1."""
    return ranked_alternatives(logits, NUM_ALTERNATIVES, state, owners, following, ids=ids)[0]
