"""Drafts as they come down from a device, in the columns that go out.

B sessions, K chain length, n tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.wire.rounds import parts
from outrider_drafter.device_shapes import Shape
from outrider_drafter.sessions import Session
from outrider_drafter.source import Drafted


def rooms(sessions: Sequence[Session]) -> NDArray[np.int64]:
    """[B]: levels that each session has room for."""
    table, slots = sessions[0].table, [session.slot for session in sessions]
    found: NDArray[np.int64] = table.max_lens[slots] - table.lengths[slots] - 1
    return found


def lengths(sessions: Sequence[Session], shape: Shape) -> NDArray[np.int64]:
    """[B]: how much of a chain each session has room and use for."""
    wanted = np.array([session.plan.draft_tokens for session in sessions])
    found: NDArray[np.int64] = np.minimum(np.minimum(shape.depth, wanted), rooms(sessions))
    return found


def chains(sessions: Sequence[Session], shape: Shape, words: NDArray[np.int32]) -> Drafted:
    """Of words int32 [B, K]: tokens."""
    counts = lengths(sessions, shape)
    owners, places = parts(counts)
    return Drafted(
        sessions=sessions,
        node_counts=counts,
        tokens=words[owners, places],
        parents=(places - 1).astype(np.int32),
        logprobs=np.zeros(len(places), dtype=np.float32),
    )


def trees(sessions: Sequence[Session], words: NDArray[np.int32]) -> Drafted:
    """Of words int32 [B, 3, n]: tokens, parents, bits of log-probabilities."""
    counts = np.count_nonzero(words[:, 1] != PADDING_NODE, axis=1)
    owners, places = parts(counts)
    return Drafted(
        sessions=sessions,
        node_counts=counts,
        tokens=words[owners, 0, places],
        parents=words[owners, 1, places],
        logprobs=words[owners, 2, places].view(np.float32),
    )
