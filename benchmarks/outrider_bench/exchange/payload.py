"""What a round of the exchange benchmark carries, the same by every transport.

A session's verdict has its accepted tokens, 2, 3, 4, 5 and 1 in turn from round to round, each with
a feature of `width` bfloat16 values; its draft is a chain of four tokens.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from outrider.wire.messages import FeatureRows, TensorDtype, Verdicts

DRAFT_LENGTH: Final = 4
FEATURE_SIZE: Final = 4096
"""Width of a feature unless the command says another one: that of an 8B model."""
FEATURE_BYTES: Final = 2
"""Bytes of each value of a feature."""


def accepted_tokens(round_number: int) -> int:
    """Accepted tokens of every session in the round of this number; round 0 has 2."""
    return (round_number + 1) % (DRAFT_LENGTH + 1) + 1


def verdicts(sessions: int, *, tokens: int, width: int) -> Verdicts:
    """Verdicts of a round of this many sessions, each with `tokens` accepted tokens."""
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
