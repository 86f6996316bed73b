"""Transport interfaces: connections, control clients, endpoints and dialers between processes.

A process implements an endpoint (`VerifierEndpoint`, `DrafterEndpoint`); a transport carries it.
Three transports exist: in-process, gRPC and Ray. None of them imports a process package.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, TypeVar

from outrider.ids import SessionId
from outrider.spec.plan import SpeculationPlan
from outrider.wire.messages import (
    DrafterInfo,
    DrafterMessage,
    MalformedOpen,
    SessionEvent,
    SessionsMessage,
    SessionSpec,
    SessionsRequest,
    VerifierInfo,
    VerifierMessage,
)

SendT = TypeVar("SendT", contravariant=True)
ReceiveT = TypeVar("ReceiveT", covariant=True)


class ExchangeConnection(Protocol[SendT, ReceiveT]):
    """One end of a long-lived, ordered, message-oriented exchange connection.

    Connections that a dialer returns or an endpoint is given carry heartbeats already: neither
    side sends or sees a `Heartbeat`. Sends and receives may be cancelled without loss. One task
    receives at a time.
    """

    @property
    def peer(self) -> str:
        """Address of the other end, for logs."""
        ...

    async def send(self, message: SendT) -> None:
        """Queue a message; waits while the peer is not reading. Raises ConnectionLostError."""
        ...

    def try_send(self, *messages: SendT) -> bool:
        """Queue messages, all of them if there is room for one now, else none (False). Raises
        ConnectionLostError.

        They cross together as far as the transport has frames. Bounds may be overstepped by what
        is offered at once. For whoever cannot wait; `SendQueue` keeps such messages in order with
        those that must.
        """
        ...

    async def receive(self) -> ReceiveT:
        """The next message.

        Raises InvalidMessageError for a malformed one (the connection stays usable) and
        ConnectionLostError when the peer is gone or silent.
        """
        ...

    def receive_ready(self) -> Sequence[ReceiveT]:
        """The messages that `receive` would give without waiting, up to the first malformed one.

        What stopped it, a malformed message or the loss of the connection, is raised by the
        `receive` that comes to it.
        """
        ...

    async def close(self) -> None:
        """Close both directions; idempotent."""
        ...


VerifierConnection = ExchangeConnection[VerifierMessage, DrafterMessage]
"""The verifier's end: sends verdicts, receives proposals."""
DrafterConnection = ExchangeConnection[DrafterMessage, VerifierMessage]
"""The drafter's end: sends proposals, receives verdicts."""
RouterConnection = ExchangeConnection[SessionsRequest, SessionsMessage]
"""A router's end of the stream that carries its sessions: opens and leaves, receives events."""
ServingConnection = ExchangeConnection[SessionsMessage, SessionsRequest | MalformedOpen]
"""The verifier's end of that stream."""


class VerifierControl(Protocol):
    """Control calls of a router to a verifier."""

    async def info(self) -> VerifierInfo:
        """Identity, capacity and load."""
        ...

    async def sessions(self) -> RouterConnection:
        """Open a stream of sessions; closing or losing it ends all that were opened on it.

        Raises UnavailableError. `outrider.transport.session_stream` follows sessions over it.
        """
        ...

    def open_session(self, spec: SessionSpec) -> AsyncIterator[SessionEvent]:
        """Follow one session by itself, on a stream shared by all that are followed so.

        An async generator (use `contextlib.aclosing`); closing it closes the session. Its first
        step raises InvalidRequestError (ids out of range, too long), AlreadyExistsError or
        ResourceExhaustedError (does not fit now); any step raises UnavailableError (verifier
        lost).
        """
        ...

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        """Change a session's plan; NotFoundError if there is none."""
        ...

    async def close_session(self, session_id: SessionId) -> None:
        """End a session and free all it holds; idempotent."""
        ...


class VerifierEndpoint(VerifierControl, Protocol):
    """Interface that a verifier process implements."""

    async def serve_sessions(self, connection: ServingConnection) -> None:
        """Serve one router's stream of sessions until it ends, then free what is left of them."""
        ...

    async def exchange(self, connection: VerifierConnection) -> None:
        """Serve one drafter's connection until it ends."""
        ...


class DrafterControl(Protocol):
    """Control calls of a router to a drafter."""

    async def info(self) -> DrafterInfo:
        """Identity and load."""
        ...

    async def attach(self, verifier_address: str) -> None:
        """Connect to a verifier and serve it until detached; idempotent."""
        ...

    async def detach(self, verifier_address: str) -> None:
        """Drop the connection to a verifier; idempotent."""
        ...

    async def set_draining(self, draining: bool) -> None:
        """Say in `info` that it leaves, or that it stays after all; it drafts on in any case."""
        ...


DrafterEndpoint = DrafterControl
"""What a drafter process implements; its exchange connections are outgoing."""


class Dialer(Protocol):
    """Reaches the other processes of one transport by address."""

    async def exchange(self, verifier_address: str) -> DrafterConnection:
        """Open an exchange connection to a verifier. Raises UnavailableError."""
        ...

    async def verifier(self, address: str) -> VerifierControl:
        """A control client of the verifier at `address`."""
        ...

    async def drafter(self, address: str) -> DrafterControl:
        """A control client of the drafter at `address`."""
        ...

    async def close_channel(self, address: str) -> None:
        """Close the channel to an address whose process is gone, if there is one."""
        ...

    async def close(self) -> None:
        """Close every channel."""
        ...
