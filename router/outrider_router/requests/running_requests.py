"""Registry of the running requests and their emitted tokens, from which a failover resumes.

It is in memory; the durable log of `--journal` is `resumption.durable_log`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.errors import AlreadyExistsError, OutriderError
from outrider.ids import DrafterId, RequestId
from outrider.spans import NO_SPAN, RequestSpan
from outrider_router.admission.request_group import RequestGroup
from outrider_router.base.api_keys import ANONYMOUS, Caller
from outrider_router.requests.request_lifecycle import (
    Interrupt,
    RequestLifecycle,
    RequestPhase,
)
from outrider_router.requests.request_output import RequestOutput
from outrider_router.requests.request_session import DrafterAttachment, RequestSession

MadeT = TypeVar("MadeT")


def _release_nothing() -> None:
    """Release nothing, for a request that holds no place of its caller's key."""


def _ignore_failure(_entry: RequestEntry, _error: OutriderError) -> None:
    """Do nothing, for a request whose output nobody holds up."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    """State of one request from its arrival to its last message."""

    request_id: RequestId
    arrived_at: float
    """Clock time of the arrival, in seconds."""
    caller: Caller = ANONYMOUS
    """Caller of the request. Only callers of its tenant may resume or abort it."""
    group: RequestGroup | None = None
    """Requests of the same call, admitted to the queue together or not at all; None: there is no
    other one."""
    deadline: float | None = None
    """Clock time at which the request ends with an error, in seconds; None: it has no deadline."""
    is_restored: bool = False
    """Whether the request comes from the durable log of a router that was restarted."""
    span: RequestSpan = NO_SPAN
    """Trace span of the request."""
    release: Callable[[], None] = _release_nothing
    """Releases the place that the request takes among those of its caller's API key."""
    on_failing: Callable[[RequestEntry, OutriderError], None] = _ignore_failure
    """Called once the request fails, after what its phase waited for was interrupted; stops a
    write to a client that does not read."""
    output: RequestOutput = field(default_factory=RequestOutput)
    lifecycle: RequestLifecycle = field(default_factory=RequestLifecycle, init=False)
    session: RequestSession | None = field(default=None, init=False)
    """The newest session; None: none was opened."""

    @property
    def open_session(self) -> RequestSession | None:
        """Return the session that serves the request; None: there is none at the moment."""
        return self.session if self.lifecycle.has_session else None

    @property
    def drafter(self) -> DrafterAttachment | None:
        """Return the drafter of the session that serves the request; None: there is no session."""
        session = self.open_session
        return None if session is None else session.drafter

    @property
    def log_ids(self) -> dict[str, str]:
        """Return the ids that the request's log lines have in all processes."""
        ids = {"request_id": str(self.request_id)}
        if self.session is not None:
            ids["session_id"] = self.session.session_id
        if self.span.is_sampled:
            ids["trace_id"] = self.span.trace_id
        return ids

    def start_session(self, session: RequestSession, interrupt: Interrupt) -> None:
        """Note that a session was opened; a failure of the request calls `interrupt` while the
        session lasts. Raises the request's error if it fails already."""
        self.lifecycle.begin_phase(RequestPhase.STREAMING, interrupt)
        self.session = session

    def leave_session(self) -> None:
        """Note that the session has ended."""
        self.lifecycle.end_phase()

    def fail_request(self, error: OutriderError) -> None:
        """End the request with `error`, wherever it is. Only the first call has an effect."""
        if self.lifecycle.fail(error):
            self.on_failing(self, error)

    def end_request(self) -> None:
        """Note that the request is over, and release what it holds of its caller's key."""
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
        """Return the entry of a running request; None if it is not running."""
        return self._entries.get(request_id)

    def num_emitted(self, request_id: RequestId) -> int:
        """Return the number of tokens that a request has emitted; 0 if it is not running."""
        entry = self._entries.get(request_id)
        return len(entry.output.token_ids) if entry is not None else 0

    def check_unused(self, request_id: RequestId) -> None:
        """Raise AlreadyExistsError if a request of this id is running."""
        if request_id in self._entries:
            raise AlreadyExistsError(
                f"request {request_id!r} is running already", reason="REQUEST_EXISTS"
            )

    def add_entry(self, entry: RequestEntry) -> None:
        """Add a new request. Raises AlreadyExistsError if a request of its id is running."""
        self.check_unused(entry.request_id)
        self._entries[entry.request_id] = entry

    def close_entry(self, entry: RequestEntry) -> None:
        """Remove the entry of a request that ends now."""
        if self._entries.get(entry.request_id) is entry:
            del self._entries[entry.request_id]
        entry.end_request()

    def sessions_by_drafter(self) -> dict[DrafterId, int]:
        """Return the number of running sessions by drafter; a requested move counts as done."""
        counts: dict[DrafterId, int] = {}
        for entry in self._entries.values():
            drafter_id = None if entry.drafter is None else entry.drafter.next_drafter_id
            if drafter_id is not None:
                counts[drafter_id] = counts.get(drafter_id, 0) + 1
        return counts


async def run_unless_failed(entry: RequestEntry, make: Callable[[], Awaitable[MadeT]]) -> MadeT:
    """Return the result of `make`, which validates the request. If the request fails meanwhile,
    cancel it and raise the request's error at once: tokenizing a long prompt takes long."""

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
