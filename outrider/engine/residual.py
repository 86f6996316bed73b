"""Recursive rejection sampling at one node, on the few ids of the draft distribution (float64).

The draft distribution has a small support K, so the target distribution only changes shape inside
K: after any number of rejections the residual is

    p'(i) = inside_i           for i in K
    p'(i) = outside * p(i)     for all other ids

and its normaliser needs p on K only: outside * (1 - p(K)) + sum(inside). The whole vocabulary
is read once, when the last token is drawn; log(inside / outside) then replaces log p on K. The
result equals the standard residual max(p - q, 0), without a pass over the vocabulary per rejection.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

ChildNode = tuple[int, int]
"""(node, token) of a child."""


class ResidualSampler:
    """Rejection sampler of one tree node, which tests the node's children in the order in which
    they were drawn."""

    def __init__(
        self, logprobs_V: Tensor, ids: NDArray[np.int32], counts: NDArray[np.uint16]
    ) -> None:
        """Prepare to test the children of one node.

        `logprobs_V` are the target's log-probabilities at the node. `ids` (sorted) and `counts` are
        the node's draft distribution, which may be empty.
        """
        self._logprobs_V = logprobs_V
        self._ids = ids
        self._counts = counts

    def try_children(
        self, candidates: list[ChildNode], probs: list[float], coins: list[float]
    ) -> tuple[ChildNode | None, tuple[NDArray[np.int64], NDArray[np.float64]] | None]:
        """Return (accepted child, None), or (None, residual) if all children are rejected.

        `probs` holds the target's probability of each candidate, and `coins` one random draw per
        candidate. The residual is a pair (ids, log-probs) that replaces the values of `logprobs_V`
        at these ids before the next token is drawn. (None, None) means that the next token is drawn
        from `logprobs_V` unchanged, because no child was tested or the residual is empty.
        """
        rejected = False
        for candidate, prob, coin in zip(candidates, probs, coins, strict=False):
            place = int(self._ids.searchsorted(candidate[1]))
            if place == len(self._ids) or self._ids[place] != candidate[1]:
                continue  # not drawn from the draft distribution, so it cannot be tested
            if not rejected:
                total = int(self._counts.sum(dtype=np.int64))
                if coin * int(self._counts[place]) < prob * total:
                    return candidate, None
                self._start(total)
                rejected = True
            elif coin * self._draft[place] < self._inside[place]:
                return candidate, None
            if not self._reject(place):
                return None, None
        if not rejected:
            return None, None
        with np.errstate(divide="ignore"):
            return None, (
                self._ids.astype(np.int64),
                np.log(self._inside) - np.log(self._outside),
            )

    def _start(self, total: int) -> None:
        where = from_numpy(self._ids.astype(np.int64)).to(self._logprobs_V.device)
        self._inside = np.exp(self._logprobs_V[where].cpu().numpy().astype(np.float64))
        self._rest = max(0.0, 1.0 - float(self._inside.sum()))
        self._outside = 1.0
        self._draft = self._counts / total

    def _reject(self, place: int) -> bool:
        """Set p to max(p - q, 0), remove the id at index `place` from q, and normalise both. Return
        False if the residual is empty."""
        inside = np.maximum(self._inside - self._draft, 0.0)
        mass = self._outside * self._rest + float(inside.sum())
        if mass <= 0.0:
            return False
        self._inside, self._outside = inside / mass, self._outside / mass
        draft = self._draft.copy()
        draft[place] = 0.0
        remaining = float(draft.sum())
        self._draft = draft / remaining if remaining > 0.0 else draft
        return True
