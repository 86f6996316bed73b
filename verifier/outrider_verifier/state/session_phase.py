"""SessionPhase: where a session is in its life on the verifier, and what may follow."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class SessionPhase(Enum):
    """What a session has and does now; it is in exactly one phase."""

    WAITING = "waiting"
    """It has no KV and waits for blocks, to prefill (again) once it has them: it has not begun, or
    has lost its KV without a copy."""
    SWAPPED = "swapped"
    """It waits for blocks, too, but its KV was copied to host memory when it was preempted."""
    PREFILLING = "prefilling"
    """It has blocks, and no round was submitted yet with some of its tokens to prefill."""
    DECODING = "decoding"
    """It has blocks, and its next round decodes."""
    ENDED = "ended"
    """All that it held was given back; a round in flight may still name it."""


# Rounds compare the phases of all rows, and Python 3.11 takes seven times as long to look a member
# up in its class as in a module.
WAITING: Final = SessionPhase.WAITING
SWAPPED: Final = SessionPhase.SWAPPED
PREFILLING: Final = SessionPhase.PREFILLING
DECODING: Final = SessionPhase.DECODING
ENDED: Final = SessionPhase.ENDED

ALLOWED_TRANSITIONS: Final[Mapping[SessionPhase, frozenset[SessionPhase]]] = {
    # A session that prefills again may find all that it had written in the prefix cache.
    WAITING: frozenset((PREFILLING, DECODING, ENDED)),
    SWAPPED: frozenset((PREFILLING, DECODING, ENDED)),
    PREFILLING: frozenset((DECODING, WAITING, SWAPPED, ENDED)),
    DECODING: frozenset((WAITING, SWAPPED, ENDED)),
    ENDED: frozenset(),
}
"""The phases that may follow each phase."""
