"""Payload of a round of the exchange benchmark, the same for every transport.

In successive rounds the verdict of a session has 2, 3, 4, 5 and 1 accepted tokens, then 2 again.
Each token has a feature of `width` bfloat16 values. The draft of a session is a chain of four
tokens.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from outrider.wire.messages import FeatureRows, TensorDtype, Verdicts

DRAFT_LENGTH: Final = 4
FEATURE_SIZE: Final = 4096
"""Default number of values of a feature, which is the hidden size of an 8B model."""
FEATURE_BYTES: Final = 2
"""Bytes of one value of a feature."""


def accepted_tokens(round_number: int) -> int:
    """Return the number of accepted tokens of each session in this round, which is 2 in round 0."""
    return (round_number + 1) % (DRAFT_LENGTH + 1) + 1


def verdicts(sessions: int, *, tokens: int, width: int) -> Verdicts:
    """Return the verdicts of one round for `sessions` sessions. Each has `tokens` accepted tokens,
    each with a feature of `width` values."""
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
