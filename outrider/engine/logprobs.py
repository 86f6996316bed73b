"""Log-probabilities of emitted tokens under the target's unprocessed logits.

The log-probabilities do not depend on temperature, penalties, biases, masks or the acceptance rule.
With or without drafts, they come from the forward pass that verified the token's position.

Shapes: n tokens, L rows of logits, V vocabulary size, K most probable ids per token.
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
"""Maximum number of rows of logits that are processed together, to limit temporary memory."""


class PathLogprobs(NamedTuple):
    """Natural log-probabilities in [LOWEST_LOGPROB, 0] of a session's tokens in one round."""

    values: NDArray[np.float32]
    """Log-probs [n, 1 + K]: of the emitted token, then of the K most probable ids, best first."""
    top_ids: NDArray[np.int32]
    """The K most probable ids [n, K], in the order of `values[:, 1:]`."""

    def first_tokens(self, count: int) -> PathLogprobs:
        """Return the log-probabilities of the first `count` tokens."""
        return PathLogprobs(self.values[:count], self.top_ids[:count])


class LogprobPath(NamedTuple):
    """Rows of logits from which a session's tokens of one round were chosen, and the
    log-probabilities requested for these tokens."""

    rows: Sequence[int]
    """Index of the row of logits for each token."""
    tokens: Sequence[int]
    top: int
    """Number of most probable ids requested per token. At most V are returned."""


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each row's token, and the `top` most likely tokens of each row.

    `logits` is float32 [n, V], and `tokens` is int64 [n]. With K = min(top, V), the result is the
    pair

      values  float32 [n, 1 + K]: the log-probability of the row's token, then those of the K most
              likely tokens in descending order
      ids     int32 [n, K]: the ids of these K tokens

    A NaN logit counts as probability 0. The call does not wait for the device.
    """
    tamed = logits.float().nan_to_num(nan=-math.inf, posinf=MAX_LOGIT, neginf=-math.inf)
    best = tamed.topk(min(top, logits.shape[1]), dim=-1)
    own = tamed.gather(1, tokens[:, None])
    values = torch.cat((own, best.values), dim=1) - tamed.logsumexp(dim=-1, keepdim=True)
    # The logsumexp of a row without a finite logit is NaN.
    values = values.nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)
    return values.clamp(LOWEST_LOGPROB, 0.0), best.indices.int()


def path_logprobs(logits: Tensor, paths: Sequence[LogprobPath]) -> list[PathLogprobs]:
    """Return the logprobs requested by each path, from the target's raw logits float32 [L, V]."""
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
    """Split the results of concatenated paths into one `PathLogprobs` per path.

    `values` and `top_ids` are as in `PathLogprobs`. `paths` holds a pair for each path: its number
    of tokens, and the number of most probable ids requested per token.
    """
    found: list[PathLogprobs] = []
    first = 0
    for count, top in paths:
        end = first + count
        found.append(PathLogprobs(values[first:end, : 1 + top], top_ids[first:end, :top]))
        first = end
    return found
