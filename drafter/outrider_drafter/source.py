"""The seam between the engine and the ways of drafting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from outrider.spec.plan import DraftMethod
from outrider.wire.messages import FeatureLayout
from outrider_drafter.growth import Draft
from outrider_drafter.sessions import Session

Drafted = Sequence[tuple[Session, Draft]]
"""Drafts that are ready together."""


class DraftSource(Protocol):
    """One way of drafting. Keeps what it needs of each session; all calls come from one thread."""

    method: DraftMethod
    feature_layout: FeatureLayout
    """What the source wants to be fed with; PROJECTED sources consume `Session.pending`."""
    feature_size: int
    """Width H of a feature row; 0 without features."""
    feature_fingerprint: str
    """Identity of the projection that makes the features; "" without features."""

    @property
    def usable(self) -> bool:
        """Whether the device still works; asked after a failure only. False is final: nothing
        can be run in this process any more. Must not raise."""
        ...

    def catch_up(self, sessions: Sequence[Session]) -> None:
        """Take in what is new of these sessions; no draft is wanted."""
        ...

    def drafts(self, sessions: Sequence[Session]) -> Iterator[Drafted]:
        """Catch up and draft; yields what is ready as soon as it is: what one step of a device
        makes, together.

        Sessions that cannot be drafted are left out.
        """
        ...

    def release(self, session: Session) -> None:
        """Free what is kept of a session; idempotent."""
        ...
