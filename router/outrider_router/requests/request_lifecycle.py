"""Lifecycle of a request: its phases, the transitions between them, and what a failure means in
each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Final

from outrider.errors import OutriderError

Interrupt = Callable[[OutriderError], None]
"""Ends a wait of the request at once, because the request fails with this error."""


class RequestPhase(Enum):
    """Phase of a request."""

    ACCEPTED = "accepted"
    """Its task has not begun."""
    VALIDATING = "validating"
    """Its prompt is tokenized, its grammar compiled, and its options are checked."""
    PENDING = "pending"
    """It has no session and waits for none: it is between two steps."""
    BACKING_OFF = "backing off"
    """It has lost sessions and waits for a moment before it is queued again."""
    QUEUED = "queued"
    """It waits for capacity of a verifier."""
    STREAMING = "streaming"
    """A session on a verifier serves it."""
    RELOCATING = "relocating"
    """A session serves it on a verifier that is about to stop, while it waits for capacity of
    another one."""
    FAILING = "failing"
    """It must end with an error, and its task has not ended yet."""
    ENDED = "ended"
    """It is over."""


_P = RequestPhase
ALLOWED_TRANSITIONS: Final[Mapping[RequestPhase, frozenset[RequestPhase]]] = {
    _P.ACCEPTED: frozenset({_P.VALIDATING, _P.FAILING, _P.ENDED}),
    _P.VALIDATING: frozenset({_P.PENDING, _P.FAILING}),
    _P.PENDING: frozenset({_P.BACKING_OFF, _P.QUEUED, _P.STREAMING, _P.FAILING, _P.ENDED}),
    _P.BACKING_OFF: frozenset({_P.PENDING, _P.FAILING}),
    _P.QUEUED: frozenset({_P.PENDING, _P.FAILING}),
    _P.STREAMING: frozenset({_P.RELOCATING, _P.PENDING, _P.FAILING}),
    _P.RELOCATING: frozenset({_P.PENDING, _P.FAILING}),
    _P.FAILING: frozenset({_P.ENDED}),
    _P.ENDED: frozenset(),
}
"""Phases that may follow each phase."""
INTERRUPTIBLE_PHASES: Final = frozenset(
    {_P.VALIDATING, _P.BACKING_OFF, _P.QUEUED, _P.STREAMING, _P.RELOCATING}
)
"""Phases in which the request's task waits for something that a failure must end."""
SESSION_PHASES: Final = frozenset({_P.STREAMING, _P.RELOCATING})
"""Phases in which a session on a verifier serves the request."""


class PhaseTransitionError(RuntimeError):
    """A transition that the lifecycle of a request does not have: a bug of the router."""


class RequestLifecycle:
    """Phase of one request. Use from one event loop."""

    __slots__ = ("_interrupt", "error", "phase")

    def __init__(self) -> None:
        self.phase = RequestPhase.ACCEPTED
        """Changed by the methods alone."""
        self.error: OutriderError | None = None
        """Error with which the request must end; None: it does not fail."""
        self._interrupt: Interrupt | None = None

    @property
    def has_session(self) -> bool:
        """Whether a session on a verifier serves the request."""
        return self.phase in SESSION_PHASES

    def enter(self, phase: RequestPhase, interrupt: Interrupt | None = None) -> None:
        """Make the transition to `phase`. A failure calls `interrupt` for as long as this phase
        lasts; the phases of `INTERRUPTIBLE_PHASES` need one, the others have none.

        Raises PhaseTransitionError for a transition that is not allowed.
        """
        if phase not in ALLOWED_TRANSITIONS[self.phase]:
            raise PhaseTransitionError(
                f"a request that is {self.phase.value} cannot become {phase.value}"
            )
        if (interrupt is not None) is not (phase in INTERRUPTIBLE_PHASES):
            needs = "no" if interrupt is not None else "an"
            raise PhaseTransitionError(f"a request that is {phase.value} has {needs} interrupt")
        self.phase, self._interrupt = phase, interrupt

    def begin_phase(self, phase: RequestPhase, interrupt: Interrupt) -> None:
        """Enter a phase from ACCEPTED or PENDING. Raises the request's error if it fails."""
        self.raise_error()
        self.enter(phase, interrupt)

    def end_phase(self) -> None:
        """Return to PENDING; a request that fails stays FAILING."""
        if self.phase is not RequestPhase.FAILING:
            self.enter(RequestPhase.PENDING)

    @contextmanager
    def during(self, phase: RequestPhase, interrupt: Interrupt) -> Iterator[None]:
        """Be in a phase for the length of a block. Raises the request's error if it fails."""
        self.begin_phase(phase, interrupt)
        try:
            yield
        finally:
            self.end_phase()

    def raise_error(self) -> None:
        """Raise the request's error if it fails."""
        if self.error is not None:
            raise self.error

    def relocate(self) -> None:
        """Note that the session's verifier is about to stop; the session goes on meanwhile."""
        self.enter(RequestPhase.RELOCATING, self._interrupt)

    def fail(self, error: OutriderError) -> bool:
        """Enter FAILING and interrupt what the request waits for; return whether this call did it.

        A request that fails already or has ended stays as it is.
        """
        if self.phase is RequestPhase.FAILING or self.phase is RequestPhase.ENDED:
            return False
        interrupt = self._interrupt
        self.enter(RequestPhase.FAILING)
        self.error = error
        if interrupt is not None:
            interrupt(error)
        return True
