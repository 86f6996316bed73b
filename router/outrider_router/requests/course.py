"""One request on its way from session to session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from outrider.ids import SessionId
from outrider.transport.session_stream import OpenedSession
from outrider.wire.inference import PromptInfo
from outrider.wire.messages import FinishReason
from outrider_router.admission.capacity_ledger import CapacityReservation
from outrider_router.admission.wait_order import AdmissionRequest
from outrider_router.base.reasons import FailoverCause
from outrider_router.fleet.peer_types import VerifierPeer
from outrider_router.requests.failover import implied_finish
from outrider_router.requests.request import ValidatedRequest
from outrider_router.requests.running_requests import JournalEntry
from outrider_router.requests.session_output import ClientReply, SessionFeed
from outrider_router.requests.stop_checker import StopChecker


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A request, where it is served now, and what it has been through."""

    entry: JournalEntry
    job: ValidatedRequest
    admission_request: AdmissionRequest
    reply: ClientReply
    session_id: SessionId
    stop_checker: StopChecker | None = None
    """The search for its stop strings, over all of its sessions; None: it has none."""
    has_sent_prompt_info: bool = False
    """Whether the client has heard of its prompt."""
    cause: FailoverCause | None = None
    """What became of the session before; None: there was none."""
    losses: int = 0
    refusals: int = 0
    stuck_since: float | None = None
    """Clock time since which it has lost sessions and emitted nothing, seconds."""
    emitted_before: int = 0
    """Tokens that were emitted when its session was opened."""
    lease: CapacityReservation | None = None
    next_lease: CapacityReservation | None = None
    """A place elsewhere, for when it leaves a verifier that is about to stop."""
    peer: VerifierPeer | None = None
    """Where its session is."""
    session_feed: SessionFeed | None = None
    opened: OpenedSession | None = None
    """Its session on the verifier's stream."""
    relocation: asyncio.Task[None] | None = None
    """Looks for that place."""

    @property
    def prompt_info(self) -> PromptInfo:
        """What the client hears first."""
        return self.job.prompt_info(self.entry.request_id)

    @property
    def implied_finish(self) -> FinishReason | None:
        """The end that its text has come to, although nobody said so."""
        if self.stop_checker is not None and self.stop_checker.is_stopped:
            return FinishReason.STOP_STRING
        return implied_finish(
            self.entry.emitted,
            stop_ids=self.job.stop_ids,
            max_new_tokens=self.job.max_new_tokens,
        )
