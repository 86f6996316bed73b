"""Payload of a round of the exchange benchmark, the same for every transport.

From round to round a session's verdict has 2, 3, 4, 5 and 1 accepted tokens in turn, each with a
feature of `width` bfloat16 values. Its draft is a chain of four tokens.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from outrider.wire.messages import FeatureRows, TensorDtype, Verdicts

DRAFT_LENGTH: Final = 4
FEATURE_SIZE: Final = 4096
"""Default width of a feature: that of an 8B model."""
FEATURE_BYTES: Final = 2
"""Bytes of each value of a feature."""


def accepted_tokens(round_number: int) -> int:
    """Return the number of accepted tokens of every session in a round; 2 in round 0."""
    return (round_number + 1) % (DRAFT_LENGTH + 1) + 1


def verdicts(sessions: int, *, tokens: int, width: int) -> Verdicts:
    """Return the verdicts of a round of so many sessions, each with `tokens` accepted tokens."""
    rng = np.random.default_rng(sessions)
    counts = np.full(sessions, tokens)
    segments = tuple(
        rng.integers(0, 1 << 14, (tokens, width)).astype(np.uint16) for _ in range(sessions)
    )
    return Verdicts(
        handles=np.arange(sessions),
        starts=counts * 9,
        token_counts=counts,
        tokens=rng.integers(0, 1 << 15, tokens * sessions).astype(np.int32),
        digests=rng.integers(0, 1 << 63, sessions).astype(np.uint64),
        feature_starts=counts * 9,
        feature_counts=counts,
        draft_wanted=np.ones(sessions, dtype=np.bool_),
        features=FeatureRows(dtype=TensorDtype.BFLOAT16, segments=segments),
    )
