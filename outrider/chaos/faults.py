"""What can happen to whom, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Whom a fault hits."""

    DRAFTER = "drafter"
    VERIFIER = "verifier"
    ROUTER = "router"
    CLIENT = "client"


class Phase(StrEnum):
    """What a session is in when a fault hits."""

    PREFILL = "prefill"
    """A verifier has sessions, and no token of one has been heard yet."""
    ROUND = "round"
    """Tokens come."""
    PREEMPTED = "preempted"
    """A session of a verifier waits for its K/V."""
    SWAPPING = "swapping"
    """K/V of a session is in host memory."""
    DRAINING = "draining"
    """A verifier was told to end."""


class Kind(StrEnum):
    """What happens."""

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


MANGLING = (Kind.LOSE, Kind.DUPLICATE, Kind.REORDER, Kind.CORRUPT, Kind.TRUNCATE)
"""Faults of single messages. Only the exchange of drafter and verifier stands them: there a message
is worth what its digest says. Streams of sessions rest on an ordered, checked transport."""
LINKS = (Kind.PARTITION, Kind.ONE_WAY, Kind.DELAY, Kind.CUT)

KINDS: dict[Role, tuple[Kind, ...]] = {
    Role.DRAFTER: (Kind.KILL, Kind.TERMINATE, Kind.STOP, Kind.DEVICE_LOST, *LINKS, *MANGLING),
    Role.VERIFIER: (Kind.KILL, Kind.TERMINATE, Kind.STOP, Kind.DEVICE_LOST, *LINKS),
    Role.ROUTER: (Kind.KILL, Kind.TERMINATE, Kind.STOP, Kind.DISK_FULL, Kind.PARTITION, Kind.CUT),
    Role.CLIENT: (Kind.KILL, Kind.CANCEL, Kind.DEADLINE, Kind.SLOW, Kind.CUT),
}
"""What can happen to whom. A drafter's links are those to the verifiers, a verifier's those to the
router, a router's those to the drafters (a cut: to its clients too)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    role: Role
    index: int = 0
    """Which of that role; of clients, the request of that number."""
    phase: Phase = Phase.ROUND
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


CELLS: tuple[tuple[Kind, Role, Phase], ...] = tuple(
    (kind, role, phase) for role, kinds in KINDS.items() for kind in kinds for phase in Phase
)
"""Every fault in every phase."""
