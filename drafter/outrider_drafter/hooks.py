"""Hook points of a drafter process, for the modules that its setting `hooks` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.transport.interface import Dialer
from outrider.transport.shm import ShmChannelJoiner, join_channel
from outrider_drafter.proposers.interface import Proposer


class VerifierAccess(NamedTuple):
    """The means by which a drafter connects to verifiers."""

    dialer: Dialer
    """Makes connections to verifiers. The code that built the process closes the dialer at the
    end."""
    join: ShmChannelJoiner = join_channel
    """Joins the shared-memory channel that a verifier offers. The call blocks for a moment."""


@dataclass(slots=True, kw_only=True)
class DrafterHooks:
    """Extension points that a hook may add to. A list that stays empty changes nothing."""

    access_wrappers: list[Callable[[VerifierAccess], VerifierAccess]] = field(default_factory=list)
    """Functions that return a replacement for the `VerifierAccess` that they receive. A new dialer
    must close the dialer that it wraps."""
    proposer_wrappers: list[Callable[[Proposer], Proposer]] = field(default_factory=list)
    """Functions that return a replacement for each loaded proposer. The replacement of a
    `LookAheadProposer` must be a `LookAheadProposer`, too."""
    handicaps: list[str] = field(default_factory=list)
    """Descriptions of everything that slows the drafter down, shown by `outrider status` and the
    router's page."""

    def wrap_access(self, access: VerifierAccess) -> VerifierAccess:
        """Return the access with all wrappers around it, the first wrapper innermost."""
        for wrap in self.access_wrappers:
            access = wrap(access)
        return access

    def wrap_proposer(self, proposer: Proposer) -> Proposer:
        """Return the proposer with all wrappers around it, the first wrapper innermost."""
        for wrap in self.proposer_wrappers:
            proposer = wrap(proposer)
        return proposer

    @property
    def handicap(self) -> str:
        """All handicaps in one text, or an empty string if there are none."""
        return ", ".join(self.handicaps)
