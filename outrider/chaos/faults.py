"""Fault model: kinds, targets and times of injected faults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultRole(StrEnum):
    """Role of the process, or the client, at which a fault is injected."""

    DRAFTER = "drafter"
    VERIFIER = "verifier"
    ROUTER = "router"
    CLIENT = "client"


class FaultPhase(StrEnum):
    """State of the sessions in which a fault is injected."""

    PREFILL = "prefill"
    """A verifier has sessions, but no client has received a token of them yet."""
    ROUND = "round"
    """Clients are receiving tokens."""
    PREEMPTED = "preempted"
    """A session of a verifier is preempted and waits for KV cache."""
    SWAPPING = "swapping"
    """KV cache of a session is swapped to host memory."""
    DRAINING = "draining"
    """A verifier is draining."""


class FaultKind(StrEnum):
    """Kinds of faults."""

    KILL = "kill"
    """The target is killed without a warning; its supervisor restarts it."""
    TERMINATE = "terminate"
    """The target is asked to stop and shuts down gracefully; its supervisor restarts it."""
    STOP = "stop"
    """The target is suspended for a while, then continues."""
    DEVICE_LOST = "device-lost"
    DISK_FULL = "disk-full"
    """The router's journal cannot be written for a while."""
    PARTITION = "partition"
    """No data passes between two processes for a while."""
    ONE_WAY = "one-way"
    """No data passes from the target to the other process."""
    DELAY = "delay"
    """All data between two processes is delayed."""
    CUT = "cut"
    """Every connection between two processes ends in the middle of a frame."""
    LOSE = "lose"
    """Whole messages are lost."""
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    TRUNCATE = "truncate"
    CANCEL = "cancel"
    """The client cancels its request."""
    DEADLINE = "deadline"
    """The client's deadline passes."""
    SLOW = "slow"
    """The client does not read for a while."""


FRAME_FAULTS = (
    FaultKind.LOSE,
    FaultKind.DUPLICATE,
    FaultKind.REORDER,
    FaultKind.CORRUPT,
    FaultKind.TRUNCATE,
)
"""Faults of single messages. They apply only to the exchange between drafter and verifier, where
each message is checked by its digest. Session streams rely on an ordered, checked transport
instead."""
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
"""Kinds of faults by role. A drafter's links lead to the verifiers, a verifier's to the router, and
a router's to the drafters; a cut of a router's links also ends connections of its clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One injected fault."""

    kind: FaultKind
    role: FaultRole
    index: int = 0
    """Index of the target among the processes of its role; for a client, the number of its
    request."""
    phase: FaultPhase = FaultPhase.ROUND
    """State in which the fault is injected: once a session is in this phase and clients have
    received `after` tokens."""
    after: int = 0
    lasts_s: float = 0.05
    """Duration in seconds of a fault that ends by itself. For a fault that ends a process, the time
    until the process is restarted."""
    share: float = 0.0
    """Share of the messages that a frame fault loses or changes."""

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
"""All combinations of a role, a kind of fault for this role, and a phase."""
