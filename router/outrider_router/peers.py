"""What the router knows of each verifier and drafter."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.ids import DrafterId
from outrider.transport.base import DrafterControl, VerifierControl
from outrider.wire.messages import DrafterInfo, VerifierInfo
from outrider_router.polling import Peer


@dataclass(slots=True, kw_only=True, eq=False)
class VerifierPeer(Peer):
    """A verifier."""

    control: VerifierControl | None = None
    info: VerifierInfo | None = None
    detached: set[DrafterId] = field(default_factory=set)
    """Drafters that sessions reported lost since the last look."""
    losses: int = 0
    """How often it was lost; tells an answer from before a loss."""


@dataclass(slots=True, kw_only=True, eq=False)
class DrafterPeer(Peer):
    """A drafter."""

    control: DrafterControl | None = None
    info: DrafterInfo | None = None
    serving: bool = False
    """Whether it was reachable and attached to a healthy verifier at the last look."""
    misfits: set[str] = field(default_factory=set)
    """Verifiers that it cannot serve, by address."""
    draining: bool = False
    """Whether it is being removed: it is attached to no more verifiers, and gets no sessions."""
    recalled: bool = False
    """Whether it is to be told that it stays: an operator has added it."""
    unplaced: tuple[int, int] = (0, 0)
    """Sessions beyond those that this router placed, at the last two looks."""

    @property
    def leaves(self) -> bool:
        """Whether it is being removed, or has said that it is about to stop."""
        return self.draining or (self.info is not None and self.info.draining)

    @property
    def others(self) -> int:
        """Sessions that it follows for other routers; one look alone may see those of this one
        that have just ended."""
        return min(self.unplaced)
