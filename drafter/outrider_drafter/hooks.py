"""Hook points of a drafter process, for the modules that its setting `hooks` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.transport.interface import Dialer
from outrider.transport.shm import ShmChannelJoiner, join_channel
from outrider_drafter.proposers.interface import Proposer


class VerifierAccess(NamedTuple):
    """How a drafter reaches verifiers."""

    dialer: Dialer
    """Makes connections; whoever built the process closes it at the end."""
    join: ShmChannelJoiner = join_channel
    """Joins the channel of shared memory that a verifier offers; blocks for a moment."""


@dataclass(slots=True, kw_only=True)
class DrafterHooks:
    """What a hook of a drafter may add to; a list that stays empty changes nothing."""

    access_wrappers: list[Callable[[VerifierAccess], VerifierAccess]] = field(default_factory=list)
    """Put something between drafter and verifiers. A new dialer closes the one that it wraps."""
    proposer_wrappers: list[Callable[[Proposer], Proposer]] = field(default_factory=list)
    """Put something around each way of drafting once it is loaded. What wraps a
    `LookAheadProposer` is one, too."""
    handicaps: list[str] = field(default_factory=list)
    """What slows the drafter down, in words; `outrider status` and the router's page tell it."""

    def wrap_access(self, access: VerifierAccess) -> VerifierAccess:
        """The access with all wrappers around it, the first one innermost."""
        for wrap in self.access_wrappers:
            access = wrap(access)
        return access

    def wrap_proposer(self, proposer: Proposer) -> Proposer:
        """The proposer with all wrappers around it, the first one innermost."""
        for wrap in self.proposer_wrappers:
            proposer = wrap(proposer)
        return proposer

    @property
    def handicap(self) -> str:
        """All handicaps in one text; "" where there is none."""
        return ", ".join(self.handicaps)
