"""Drafts as they come down from a device, in the columns that go out.

B sessions, K chain length, n tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.spec.flat_trees import chain_parents
from outrider_drafter.gpu.shapes import DraftTreeShape
from outrider_drafter.proposers.interface import SessionDrafts
from outrider_drafter.state.session import FollowedSession


def chain_lengths(
    shape: DraftTreeShape, wanted: NDArray[np.int64], rooms: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[B]: how much of a chain each session has room and use for."""
    found: NDArray[np.int64] = np.minimum(np.minimum(shape.depth, wanted), rooms)
    return found


def make_chains(
    sessions: Sequence[FollowedSession], counts: NDArray[np.int64], words: NDArray[np.int32]
) -> SessionDrafts:
    """Of words int32 [B, K], tokens, as many of each chain as counts [B] say."""
    within = np.arange(words.shape[1]) < counts[:, None]
    tokens = words[within]
    return SessionDrafts(
        sessions=sessions,
        node_counts=counts,
        tokens=tokens,
        parents=chain_parents(counts),
        logprobs=np.zeros(len(tokens), dtype=np.float32),
    )


def make_trees(sessions: Sequence[FollowedSession], words: NDArray[np.int32]) -> SessionDrafts:
    """Of words int32 [B, 3, n]: tokens, parents, bits of log-probabilities."""
    there = words[:, 1] != PADDING_NODE
    return SessionDrafts(
        sessions=sessions,
        node_counts=np.count_nonzero(there, axis=1),
        tokens=words[:, 0][there],
        parents=words[:, 1][there],
        logprobs=words[:, 2][there].view(np.float32),
    )
