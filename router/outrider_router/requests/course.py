"""One request on its way from session to session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from outrider.ids import SessionId
from outrider.transport.session_stream import Opened
from outrider.wire.inference import PromptInfo
from outrider.wire.messages import FinishReason
from outrider_router.admission.capacity_ledger import Lease
from outrider_router.admission.wait_order import Ticket
from outrider_router.base.reasons import FailoverCause
from outrider_router.fleet.peer_types import VerifierPeer
from outrider_router.requests.failover import end_of
from outrider_router.requests.request import Job
from outrider_router.requests.running_requests import Entry
from outrider_router.requests.session_output import Feed, Reply
from outrider_router.requests.stop_checker import StopChecker


@dataclass(slots=True, kw_only=True, eq=False)
class Course:
    """A request, where it is served now, and what it has been through."""

    entry: Entry
    job: Job
    ticket: Ticket
    reply: Reply
    session_id: SessionId
    stop_checker: StopChecker | None = None
    """The search for its stop strings, over all of its sessions; None: it has none."""
    informed: bool = False
    """Whether the client has heard of its prompt."""
    cause: FailoverCause | None = None
    """What became of the session before; None: there was none."""
    losses: int = 0
    refusals: int = 0
    stuck_since: float | None = None
    """Clock time since which it has lost sessions and emitted nothing, seconds."""
    began_with: int = 0
    """Tokens that were emitted when its session was opened."""
    lease: Lease | None = None
    next_lease: Lease | None = None
    """A place elsewhere, for when it leaves a verifier that is about to stop."""
    peer: VerifierPeer | None = None
    """Where its session is."""
    feed: Feed | None = None
    opened: Opened | None = None
    """Its session on the verifier's stream."""
    moving: asyncio.Task[None] | None = None
    """Looks for that place."""

    @property
    def info(self) -> PromptInfo:
        """What the client hears first."""
        return self.job.info(self.entry.request_id)

    @property
    def end(self) -> FinishReason | None:
        """The end that its text has come to, although nobody said so."""
        if self.stop_checker is not None and self.stop_checker.is_stopped:
            return FinishReason.STOP_STRING
        return end_of(
            self.entry.emitted,
            stop_ids=self.job.stop_ids,
            max_new_tokens=self.job.max_new_tokens,
        )
