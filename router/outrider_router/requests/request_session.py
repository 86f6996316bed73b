"""Session of a request on a verifier, and the drafter that drafts for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.transport.session_stream import OpenedSession


@dataclass(slots=True, kw_only=True, eq=False)
class DrafterAttachment:
    """Drafter of one session, and the moves to other drafters that were requested."""

    method: DraftMethod | None = None
    """Draft method of the drafter; None: the session needs no drafter."""
    drafter_id: DrafterId | None = None
    """Drafter chosen for the session, or the one that the verifier last reported; None: none."""
    is_attached: bool = False
    """Whether a drafter is attached, by the session's newest event."""
    moving_to: DrafterId | None = None
    """Drafter of a requested move that the verifier has not answered yet."""
    last_move_at: float = -math.inf
    """Clock time of the request's last requested move, in this session or before, in seconds."""
    refused_moves: int = 0
    """Number of requested moves that the verifier did not carry out."""

    @property
    def next_drafter_id(self) -> DrafterId | None:
        """Return the drafter of the session once a requested move is done; None: none."""
        return self.moving_to or self.drafter_id

    def record_requested_move(self, drafter_id: DrafterId | None, now: float) -> None:
        """Note that the verifier was asked to move the session to another drafter, or to none."""
        self.moving_to, self.last_move_at = drafter_id, now
        if drafter_id is None:
            # A verifier never refuses that.
            self.drafter_id = None

    def record_drafter(self, drafter_id: DrafterId | None) -> None:
        """Note the drafter that the verifier reports: the answer to a requested move, if any."""
        if self.moving_to not in (None, drafter_id):
            self.refused_moves += 1
        self.drafter_id, self.moving_to = drafter_id, None

    def record_attached(self, is_attached: bool) -> None:
        """Note whether a drafter is attached, by an event of the session."""
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
    """The session on the verifier's stream."""

    def move_to_drafter(self, drafter_id: DrafterId | None, now: float) -> None:
        """Ask the verifier to move the session to another drafter, or to none."""
        self.drafter.record_requested_move(drafter_id, now)
        self.opened.request_drafter(drafter_id)
