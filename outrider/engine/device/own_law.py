"""The laws that the drafts of a verifier's own head are drawn from.

B rows, Vd draft vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.engine.kernels.acceptance.coin_kernels import HUGE_SCORE
from outrider.engine.kernels.sampling import scaled_scores
from outrider.engine.kernels.state import SamplingState


def own_law(logits: Tensor, state: SamplingState, slots: Tensor) -> Tensor:
    """The law that `choose_tokens` draws from, float32 [B, Vd]; T = 0 counts as 1.

    A row is zero where there is no such law: where no score is finite, or where several are so
    large that noise does not tell them apart and always the first of them is drawn.
    """
    heat = state.temperatures[slots.long()]
    scores = scaled_scores(logits, torch.where(heat > 0, heat, torch.ones_like(heat)))
    law, tops = scores.softmax(dim=-1), scores.amax(dim=-1)
    sound = (tops > -math.inf) & ((tops <= HUGE_SCORE) | (law.amax(dim=-1) == 1.0))
    return law.where(sound[:, None], 0.0)
