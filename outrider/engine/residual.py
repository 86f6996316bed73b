"""Recursive rejection sampling at one node, on the few ids of the draft distribution (float64).

The draft distribution has a small support K, so the target distribution only changes shape inside
K: after any number of rejections the residual is

    p'(i) = inside_i           for i in K
    p'(i) = outside * p(i)     for all other ids

and its normaliser needs p on K only: outside * (1 - p(K)) + sum(inside). The whole vocabulary
is touched once, when the last token is drawn, and then log(inside / outside) replaces log p on K.
With |K| ids this is max(p - q, 0) of the textbook rule without a pass over the vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

ChildNode = tuple[int, int]
"""(node, token) of a child."""


class ResidualSampler:
    """Tests the children of one node in the order in which they were drawn."""

    def __init__(
        self, logprobs_V: Tensor, ids: NDArray[np.int32], counts: NDArray[np.uint16]
    ) -> None:
        """logprobs [V]: log target_probs; ids, counts: the node's draft distribution (possibly
        empty)."""
        self._logprobs_V = logprobs_V
        self._ids = ids
        self._counts = counts

    def try_children(
        self, candidates: list[ChildNode], probs: list[float], coins: list[float]
    ) -> tuple[ChildNode | None, tuple[NDArray[np.int64], NDArray[np.float64]] | None]:
        """The child that stands, or the residual as (ids, log-probs up to the constant of p).

        probs: target_probs of the candidates; random draws: one a candidate. (None, None) means
        that nothing was rejected, or that nothing is left: sample p itself.
        """
        rejected = False
        for candidate, prob, coin in zip(candidates, probs, coins, strict=False):
            place = int(self._ids.searchsorted(candidate[1]))
            if place == len(self._ids) or self._ids[place] != candidate[1]:
                continue  # not drawn from this distribution: it proves nothing about p
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
        """p <- max(p - q, 0) and q <- q without `place`, normalised; False if nothing is left."""
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
