"""Fault model: kinds, targets and times of injected faults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultRole(StrEnum):
    """Target of a fault."""

    DRAFTER = "drafter"
    VERIFIER = "verifier"
    ROUTER = "router"
    CLIENT = "client"


class FaultPhase(StrEnum):
    """Phase of its target at which a fault is injected."""

    PREFILL = "prefill"
    """A verifier has sessions, and no token of one has been heard yet."""
    ROUND = "round"
    """Tokens come."""
    PREEMPTED = "preempted"
    """A session of a verifier waits for its KV."""
    SWAPPING = "swapping"
    """KV of a session is in host memory."""
    DRAINING = "draining"
    """A verifier was told to end."""


class FaultKind(StrEnum):
    """Kinds of faults."""

    KILL = "kill"
    """It is gone at once; a keeper starts it again."""
    TERMINATE = "terminate"
    """It is told to end, and does in its time; a keeper starts it again."""
    STOP = "stop"
    """It does nothing for a while, then goes on."""
    DEVICE_LOST = "device-lost"
    DISK_FULL = "disk-full"
    """Nothing can be written to the router's journal for a while."""
    PARTITION = "partition"
    """Nothing passes between two processes for a while."""
    ONE_WAY = "one-way"
    """Nothing passes from it to the other."""
    DELAY = "delay"
    """Everything between them takes longer."""
    CUT = "cut"
    """Every connection between them ends in the middle of a frame."""
    LOSE = "lose"
    """Whole messages get lost."""
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    TRUNCATE = "truncate"
    CANCEL = "cancel"
    """The client ends its request."""
    DEADLINE = "deadline"
    """The client's time is up."""
    SLOW = "slow"
    """The client does not read for a while."""


FRAME_FAULTS = (
    FaultKind.LOSE,
    FaultKind.DUPLICATE,
    FaultKind.REORDER,
    FaultKind.CORRUPT,
    FaultKind.TRUNCATE,
)
"""Faults of single messages. Only the exchange of drafter and verifier stands them: there a message
is worth what its digest says. Streams of sessions rest on an ordered, checked transport."""
LINK_FAULTS = (FaultKind.PARTITION, FaultKind.ONE_WAY, FaultKind.DELAY, FaultKind.CUT)

FAULTS_BY_ROLE: dict[FaultRole, tuple[FaultKind, ...]] = {
    FaultRole.DRAFTER: (
        FaultKind.KILL,
        FaultKind.TERMINATE,
        FaultKind.STOP,
        FaultKind.DEVICE_LOST,
        *LINK_FAULTS,
        *FRAME_FAULTS,
    ),
    FaultRole.VERIFIER: (
        FaultKind.KILL,
        FaultKind.TERMINATE,
        FaultKind.STOP,
        FaultKind.DEVICE_LOST,
        *LINK_FAULTS,
    ),
    FaultRole.ROUTER: (
        FaultKind.KILL,
        FaultKind.TERMINATE,
        FaultKind.STOP,
        FaultKind.DISK_FULL,
        FaultKind.PARTITION,
        FaultKind.CUT,
    ),
    FaultRole.CLIENT: (
        FaultKind.KILL,
        FaultKind.CANCEL,
        FaultKind.DEADLINE,
        FaultKind.SLOW,
        FaultKind.CUT,
    ),
}
"""What can happen to whom. A drafter's links are those to the verifiers, a verifier's those to the
router, a router's those to the drafters (a cut: to its clients too)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One injected fault."""

    kind: FaultKind
    role: FaultRole
    index: int = 0
    """Which of that role; of clients, the request of that number."""
    phase: FaultPhase = FaultPhase.ROUND
    """When: as soon as a session is in it, after `after` tokens of all clients."""
    after: int = 0
    lasts_s: float = 0.05
    """How long it lasts where it ends by itself, or until what has ended is started again."""
    share: float = 0.0
    """Of messages that are mangled."""

    def __str__(self) -> str:
        tail = f", {self.share:.0%} of the messages" if self.share else ""
        return (
            f"{self.kind} {self.role}-{self.index} in {self.phase} after {self.after} tokens, "
            f"{1000 * self.lasts_s:.0f} ms{tail}"
        )


CELLS: tuple[tuple[FaultKind, FaultRole, FaultPhase], ...] = tuple(
    (kind, role, phase)
    for role, kinds in FAULTS_BY_ROLE.items()
    for kind in kinds
    for phase in FaultPhase
)
"""Every fault in every phase."""
