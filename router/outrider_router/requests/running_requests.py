"""Running requests: their lifecycle, sessions and emitted tokens, from which a failover resumes.

All of this state is in memory only; `resumption.durable_log` is the log on disk (`--journal`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeVar

from outrider.errors import AlreadyExistsError, OutriderError
from outrider.ids import DrafterId, RequestId, SessionId, VerifierId
from outrider.spans import NO_SPAN, RequestSpan
from outrider.spec.plan import DraftMethod
from outrider.transport.session_stream import OpenedSession
from outrider_router.admission.request_group import RequestGroup
from outrider_router.base.tenants import ANONYMOUS, Caller
from outrider_router.requests.request_output import RequestOutput

Interrupt = Callable[[OutriderError], None]
"""Function that ends the present wait of a request at once, because the request fails with the
given error."""


class RequestPhase(Enum):
    """Phase of a request."""

    ACCEPTED = "accepted"
    """The request's task has not begun."""
    VALIDATING = "validating"
    """The request's prompt is tokenized, its grammar is compiled and its options are checked."""
    PENDING = "pending"
    """The request is between two steps: it has no session and does not wait for one."""
    BACKING_OFF = "backing off"
    """The request has lost sessions and pauses before it is queued again."""
    QUEUED = "queued"
    """The request waits for capacity of a verifier."""
    STREAMING = "streaming"
    """A session on a verifier serves the request."""
    RELOCATING = "relocating"
    """A session on a verifier that is about to stop serves the request, while the request waits for
    capacity of another verifier.
    """
    FAILING = "failing"
    """The request must end with an error, and its task has not ended yet."""
    ENDED = "ended"
    """The request has ended."""


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
"""Phases in which the request's task waits for something that a failure must interrupt."""
SESSION_PHASES: Final = frozenset({_P.STREAMING, _P.RELOCATING})
"""Phases in which a session on a verifier serves the request."""


class PhaseTransitionError(RuntimeError):
    """A phase transition that `ALLOWED_TRANSITIONS` does not contain, which is a bug of the
    router.
    """


class RequestLifecycle:
    """Phase of one request. Use from one event loop."""

    __slots__ = ("_interrupt", "error", "phase")

    def __init__(self) -> None:
        self.phase = RequestPhase.ACCEPTED
        """Current phase. Only the methods of this class change it."""
        self.error: OutriderError | None = None
        """Error with which the request must end; None if the request has not failed."""
        self._interrupt: Interrupt | None = None

    @property
    def has_session(self) -> bool:
        """Whether a session on a verifier serves the request."""
        return self.phase in SESSION_PHASES

    def enter(self, phase: RequestPhase, interrupt: Interrupt | None = None) -> None:
        """Make the transition to `phase`.

        If the request fails in this phase, `interrupt` is called. The phases of
        `INTERRUPTIBLE_PHASES` need an `interrupt`, the other phases must not have one. Raises
        PhaseTransitionError for a transition that is not allowed.
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
        """Enter a phase from ACCEPTED or PENDING. Raises the request's error if the request has
        failed.
        """
        self.raise_error()
        self.enter(phase, interrupt)

    def end_phase(self) -> None:
        """Return to PENDING. A request that has failed stays FAILING."""
        if self.phase is not RequestPhase.FAILING:
            self.enter(RequestPhase.PENDING)

    @contextmanager
    def during(self, phase: RequestPhase, interrupt: Interrupt) -> Iterator[None]:
        """Stay in a phase for the duration of a `with` block. Raises the request's error if the
        request has failed before.
        """
        self.begin_phase(phase, interrupt)
        try:
            yield
        finally:
            self.end_phase()

    def raise_error(self) -> None:
        """Raise the request's error if the request has failed."""
        if self.error is not None:
            raise self.error

    def relocate(self) -> None:
        """Enter RELOCATING, because the session's verifier is about to stop. The session continues
        meanwhile.
        """
        self.enter(RequestPhase.RELOCATING, self._interrupt)

    def fail(self, error: OutriderError) -> bool:
        """Enter FAILING and interrupt the wait of the request. Return False, without an effect, if
        the request has already failed or ended.
        """
        if self.phase is RequestPhase.FAILING or self.phase is RequestPhase.ENDED:
            return False
        interrupt = self._interrupt
        self.enter(RequestPhase.FAILING)
        self.error = error
        if interrupt is not None:
            interrupt(error)
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class DrafterAttachment:
    """Drafter of one session, and the moves to other drafters that were requested."""

    method: DraftMethod | None = None
    """Draft method of the session; None if the session needs no drafter."""
    drafter_id: DrafterId | None = None
    """Drafter that the verifier last reported, or before its first report the drafter that was
    chosen; None if there is none.
    """
    is_attached: bool = False
    """Whether a drafter is attached, according to the session's newest event."""
    moving_to: DrafterId | None = None
    """Drafter of a requested move that the verifier has not answered yet."""
    last_move_at: float = -math.inf
    """Clock time in seconds of the request's last requested move, in this or an earlier session."""
    refused_moves: int = 0
    """Number of requested moves that the verifier did not carry out."""

    @property
    def next_drafter_id(self) -> DrafterId | None:
        """Drafter that the session has after the requested move, or its present drafter if no move
        is pending; None if it has none.
        """
        return self.moving_to or self.drafter_id

    def record_requested_move(self, drafter_id: DrafterId | None, now: float) -> None:
        """Record that the verifier was asked to move the session to another drafter, or to none."""
        self.moving_to, self.last_move_at = drafter_id, now
        if drafter_id is None:
            # A verifier never refuses to remove the drafter.
            self.drafter_id = None

    def record_drafter(self, drafter_id: DrafterId | None) -> None:
        """Record the drafter that the verifier reports. The report answers a requested move, if
        there is one.
        """
        if self.moving_to not in (None, drafter_id):
            self.refused_moves += 1
        self.drafter_id, self.moving_to = drafter_id, None

    def record_attached(self, is_attached: bool) -> None:
        """Record whether a drafter is attached, according to an event of the session."""
        self.is_attached = is_attached


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestSession:
    """One session of a request."""

    session_id: SessionId
    verifier_id: VerifierId
    prompt_tokens: int
    """Number of tokens of the request's prompt."""
    drafter: DrafterAttachment
    opened: OpenedSession
    """Handle of the session on the verifier's stream."""

    def move_to_drafter(self, drafter_id: DrafterId | None, now: float) -> None:
        """Ask the verifier to move the session to another drafter, or to none."""
        self.drafter.record_requested_move(drafter_id, now)
        self.opened.request_drafter(drafter_id)


MadeT = TypeVar("MadeT")


def _release_nothing() -> None:
    """Do nothing, for a request that holds no access grant."""


def _ignore_failure(_entry: RequestEntry, _error: OutriderError) -> None:
    """Do nothing, for a request whose client cannot delay its task."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    """State of one request from its arrival to its last message."""

    request_id: RequestId
    arrived_at: float
    """Clock time of the arrival in seconds."""
    caller: Caller = ANONYMOUS
    """Caller of the request. Only callers of its tenant may resume or abort it."""
    group: RequestGroup | None = None
    """Group of the requests of the same call, which are admitted to the queue together or not at
    all; None if the call has one request.
    """
    deadline: float | None = None
    """Clock time in seconds at which the request ends with an error; None if it has no deadline."""
    is_restored: bool = False
    """Whether the request comes from the durable log of a router that was restarted."""
    span: RequestSpan = NO_SPAN
    """Trace span of the request."""
    release: Callable[[], None] = _release_nothing
    """Releases the access grant of the request."""
    on_failing: Callable[[RequestEntry, OutriderError], None] = _ignore_failure
    """Called when the request fails, after the wait of its phase was interrupted. Ends a write to a
    client that does not read.
    """
    output: RequestOutput = field(default_factory=RequestOutput)
    lifecycle: RequestLifecycle = field(default_factory=RequestLifecycle, init=False)
    session: RequestSession | None = field(default=None, init=False)
    """The newest session; None if none was opened."""

    @property
    def open_session(self) -> RequestSession | None:
        """The session that serves the request now; None if there is none."""
        return self.session if self.lifecycle.has_session else None

    @property
    def drafter(self) -> DrafterAttachment | None:
        """Drafter of the session that serves the request now; None if there is no session."""
        session = self.open_session
        return None if session is None else session.drafter

    @property
    def log_ids(self) -> dict[str, str]:
        """Ids that identify the request in the log lines of all processes: the request id, the
        session id if a session was opened, and the trace id if the request is traced.
        """
        ids = {"request_id": str(self.request_id)}
        if self.session is not None:
            ids["session_id"] = self.session.session_id
        if self.span.is_sampled:
            ids["trace_id"] = self.span.trace_id
        return ids

    def start_session(self, session: RequestSession, interrupt: Interrupt) -> None:
        """Record that a session was opened. A failure of the request calls `interrupt` while the
        session lasts. Raises the request's error if the request has already failed.
        """
        self.lifecycle.begin_phase(RequestPhase.STREAMING, interrupt)
        self.session = session

    def leave_session(self) -> None:
        """Record that the session has ended."""
        self.lifecycle.end_phase()

    def fail_request(self, error: OutriderError) -> None:
        """Let the request fail with `error`, in whatever phase it is. Only the first call has an
        effect.
        """
        if self.lifecycle.fail(error):
            self.on_failing(self, error)

    def end_request(self) -> None:
        """Record that the request has ended, and release its access grant."""
        self.release()
        self.lifecycle.enter(RequestPhase.ENDED)


class RunningRequests:
    """Registry of all running requests of one router, in memory."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, RequestEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestEntry]:
        return iter(list(self._entries.values()))

    def get_entry(self, request_id: RequestId) -> RequestEntry | None:
        """Return the entry of a running request, or None if it is not running."""
        return self._entries.get(request_id)

    def num_emitted(self, request_id: RequestId) -> int:
        """Return the number of tokens that a request has emitted, or 0 if it is not running."""
        entry = self._entries.get(request_id)
        return len(entry.output.token_ids) if entry is not None else 0

    def check_unused(self, request_id: RequestId) -> None:
        """Raise AlreadyExistsError if a request with this id is running."""
        if request_id in self._entries:
            raise AlreadyExistsError(
                f"request {request_id!r} is already running; request ids must be unique",
                reason="REQUEST_EXISTS",
            )

    def add_entry(self, entry: RequestEntry) -> None:
        """Add a new request. Raises AlreadyExistsError if a request with its id is running."""
        self.check_unused(entry.request_id)
        self._entries[entry.request_id] = entry

    def close_entry(self, entry: RequestEntry) -> None:
        """Remove the entry of a request that has ended, and end the request."""
        if self._entries.get(entry.request_id) is entry:
            del self._entries[entry.request_id]
        entry.end_request()

    def sessions_by_drafter(self) -> dict[DrafterId, int]:
        """Return the number of running sessions of each drafter. A session with a requested move is
        counted at its new drafter.
        """
        counts: dict[DrafterId, int] = {}
        for entry in self._entries.values():
            drafter_id = None if entry.drafter is None else entry.drafter.next_drafter_id
            if drafter_id is not None:
                counts[drafter_id] = counts.get(drafter_id, 0) + 1
        return counts


async def run_unless_failed(entry: RequestEntry, make: Callable[[], Awaitable[MadeT]]) -> MadeT:
    """Return the result of `make`, which validates the request. If the request fails meanwhile,
    cancel `make` and raise the request's error at once, because tokenizing a long prompt may take
    long.
    """

    def stop(_error: OutriderError) -> None:
        task.cancel()

    with entry.lifecycle.during(RequestPhase.VALIDATING, stop):
        task = asyncio.ensure_future(make())
        try:
            return await task
        except asyncio.CancelledError:
            current, error = asyncio.current_task(), entry.lifecycle.error
            if error is None or (current is not None and current.cancelling()):
                raise
            raise error from None
