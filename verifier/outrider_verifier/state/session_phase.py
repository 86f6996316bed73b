"""SessionPhase: the phases of a session on the verifier, and the allowed transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final


class SessionPhase(Enum):
    """Phase of a session on a verifier. A session is in exactly one phase."""

    WAITING = "waiting"
    """The session has no KV and waits for KV blocks. It is new, or it was preempted without a copy
    of its KV."""
    SWAPPED = "swapped"
    """The session waits for KV blocks. Its KV was copied to host memory when it was preempted."""
    PREFILLING = "prefilling"
    """The session has KV blocks, and some of its tokens to prefill were not yet submitted in a
    round."""
    DECODING = "decoding"
    """The session has KV blocks, and its next round decodes."""
    ENDED = "ended"
    """The session has released its resources. A round in flight may still contain it."""


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
"""Phases to which a session may change from each phase."""
