"""Log-probabilities of emitted tokens under the target's unprocessed logits.

They do not depend on temperature, penalties, biases, masks or the acceptance rule: with or without
drafts, a token's values come from the forward that verified its position.

n tokens, V vocabulary, K most probable ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.logits_processor import MAX_LOGIT
from outrider.spec.sampling import LOWEST_LOGPROB

MAX_ROWS = 64
"""Rows of logits handled in one piece: they are as wide as the vocabulary."""


class PathLogprobs(NamedTuple):
    """Natural logarithms in [LOWEST_LOGPROB, 0] for the tokens of one row of a round."""

    values: NDArray[np.float32]
    """[n, 1 + K]: the token's own, then the most probable first."""
    top_ids: NDArray[np.int32]
    """[n, K]: whose the others are."""

    def first_tokens(self, count: int) -> PathLogprobs:
        """Those of the first `count` tokens."""
        return PathLogprobs(self.values[:count], self.top_ids[:count])


class LogprobPath(NamedTuple):
    """Rows at which a session chose its tokens in a round, and the logprobs requested for them."""

    rows: Sequence[int]
    """Of the logits, one for each token."""
    tokens: Sequence[int]
    top: int
    """K; at most V are given."""


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Logarithms of the softmax of logits float32 [n, V] for tokens int64 [n].

    Returns values float32 [n, 1 + K] and ids int32 [n, K] as `PathLogprobs` has them, K at most
    `top` and V. NaN counts as nought, as everywhere. Never waits for the device.
    """
    tamed = logits.float().nan_to_num(nan=-math.inf, posinf=MAX_LOGIT, neginf=-math.inf)
    best = tamed.topk(min(top, logits.shape[1]), dim=-1)
    own = tamed.gather(1, tokens[:, None])
    values = torch.cat((own, best.values), dim=1) - tamed.logsumexp(dim=-1, keepdim=True)
    # A row without any finite logit has NaN for a sum.
    values = values.nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)
    return values.clamp(LOWEST_LOGPROB, 0.0), best.indices.int()


def path_logprobs(logits: Tensor, paths: Sequence[LogprobPath]) -> list[PathLogprobs]:
    """What is asked of each of `paths`, from logits float32 [L, V] as the target gave them."""
    if not paths:
        return []
    rows = torch.tensor([row for path in paths for row in path.rows], device=logits.device)
    tokens = torch.tensor([token for path in paths for token in path.tokens], device=logits.device)
    top = max(path.top for path in paths)
    pieces = [slice(first, first + MAX_ROWS) for first in range(0, len(rows), MAX_ROWS)]
    parts = [token_logprobs(logits[rows[piece]], tokens[piece], top) for piece in pieces]
    values = torch.cat([part[0] for part in parts]).cpu().numpy()
    top_ids = torch.cat([part[1] for part in parts]).cpu().numpy()
    return split_paths(values, top_ids, [(len(path.tokens), path.top) for path in paths])


def split_paths(
    values: NDArray[np.float32], top_ids: NDArray[np.int32], paths: Sequence[tuple[int, int]]
) -> list[PathLogprobs]:
    """Rows of several paths, one after the other, as a piece for each; `paths`: each one's tokens
    and how many ids it asks for, of those that are there."""
    found: list[PathLogprobs] = []
    first = 0
    for count, top in paths:
        end = first + count
        found.append(PathLogprobs(values[first:end, : 1 + top], top_ids[first:end, :top]))
        first = end
    return found
