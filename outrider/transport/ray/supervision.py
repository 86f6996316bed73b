"""Supervision of an actor host: who supervises it, and when it counts as orphaned."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from outrider.errors import AlreadyExistsError, FailedPreconditionError

SUPERVISOR_REPLACED = "SUPERVISOR_REPLACED"
"""Reason of the error by which a supervisor learns that another one has taken its actor over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Identity of a supervisor, and of the fleet whose actors it supervises."""

    supervisor: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique id of one run of a supervisor."""
    fleet: str = ""
    """Identity of the fleet. Only a supervisor with the same identity can take the actors over."""
    orphan_timeout_s: float = 0.0
    """Seconds without a call of the supervisor after which an actor ends; 0 means never."""


class SupervisionState:
    """Record of an actor's supervisor. All times are seconds of one monotonic clock."""

    def __init__(self, supervision: Supervision, start_timeout_s: float, now: float) -> None:
        """Record the first supervisor, which does not call while the actor starts, that is, for at
        most `start_timeout_s` seconds."""
        self._current = supervision
        self._last_call = now + start_timeout_s

    def claim(self, supervision: Supervision, now: float) -> None:
        """Make `supervision` the current one. Raises AlreadyExistsError (NAME_IN_USE) if it is that
        of another fleet."""
        if supervision.fleet != self._current.fleet:
            raise AlreadyExistsError(
                "the actor belongs to a fleet of another owner or with other settings",
                reason="NAME_IN_USE",
            )
        self._current = supervision
        self._last_call = now

    def renew(self, supervisor: str, now: float) -> None:
        """Record a call of the supervisor with this id. Raises FailedPreconditionError
        (SUPERVISOR_REPLACED) if another one has claimed the actor since."""
        if supervisor != self._current.supervisor:
            raise FailedPreconditionError(
                "another supervisor has taken the actor over", reason=SUPERVISOR_REPLACED
            )
        self._last_call = now

    def is_orphaned(self, now: float) -> bool:
        """Whether the supervisor has been silent for longer than its `orphan_timeout_s`."""
        timeout_s = self._current.orphan_timeout_s
        return timeout_s > 0 and now - self._last_call > timeout_s
