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
        """Queue a message, and wait while the queue is full. Raises ConnectionLostError."""
        ...

    def try_send(self, *messages: SendT) -> bool:
        """Queue messages without waiting: all of them if the queue has room for one, else none.

        Returns whether they were queued. The queue may exceed its limit by the messages of one
        call. A transport with frames sends them in one frame if they fit. `SendQueue` keeps their
        order among messages that wait for room. Raises ConnectionLostError if the connection is
        lost.
        """
        ...

    async def receive(self) -> ReceiveT:
        """Return the next message.

        Raises InvalidMessageError for a malformed one (the connection stays usable) and
        ConnectionLostError when the peer is gone or silent.
        """
        ...

    def receive_ready(self) -> Sequence[ReceiveT]:
        """Return the messages that `receive` would give without waiting, up to the first malformed
        one.

        The error of a malformed message, or of a lost connection, is raised by a later `receive`.
        """
        ...

    async def close(self) -> None:
        """Close both directions. Idempotent."""
        ...


VerifierConnection = ExchangeConnection[VerifierMessage, DrafterMessage]
"""The verifier's end of an exchange: sends verdicts, receives proposals."""
DrafterConnection = ExchangeConnection[DrafterMessage, VerifierMessage]
"""The drafter's end of an exchange: sends proposals, receives verdicts."""
RouterConnection = ExchangeConnection[SessionsRequest, SessionsMessage]
"""A router's end of a session stream: opens and leaves sessions, receives their events."""
ServingConnection = ExchangeConnection[SessionsMessage, SessionsRequest | MalformedOpen]
"""The verifier's end of a session stream."""


class VerifierControl(Protocol):
    """Control calls of a router to a verifier."""

    async def info(self) -> VerifierInfo:
        """Return identity, capacity and load of the verifier."""
        ...

    async def sessions(self) -> RouterConnection:
        """Open a session stream. Its sessions end when the stream is closed or lost.

        Raises UnavailableError. `outrider.transport.session_stream` has a client for the stream.
        """
        ...

    def open_session(self, spec: SessionSpec) -> AsyncIterator[SessionEvent]:
        """Open a session and yield its events. All sessions that are opened in this way share one
        stream.

        This is an async generator (use `contextlib.aclosing`); closing it ends the session. Its
        first step raises InvalidRequestError if ids are out of range or the session is too long,
        AlreadyExistsError, or ResourceExhaustedError if the session does not fit now. Any step
        raises UnavailableError if the verifier is lost.
        """
        ...

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        """Change a session's plan. Raises NotFoundError if there is no such session."""
        ...

    async def close_session(self, session_id: SessionId) -> None:
        """End a session and free its resources. Idempotent."""
        ...


class VerifierEndpoint(VerifierControl, Protocol):
    """Interface that a verifier process implements."""

    async def serve_sessions(self, connection: ServingConnection) -> None:
        """Serve one router's session stream until it ends, then free its remaining sessions."""
        ...

    async def exchange(self, connection: VerifierConnection) -> None:
        """Serve one drafter's exchange connection until it ends."""
        ...


class DrafterControl(Protocol):
    """Control calls of a router to a drafter."""

    async def info(self) -> DrafterInfo:
        """Return identity and load of the drafter."""
        ...

    async def attach(self, verifier_address: str) -> None:
        """Connect the drafter to a verifier, which it serves until it is detached. Idempotent."""
        ...

    async def detach(self, verifier_address: str) -> None:
        """Disconnect the drafter from a verifier. Idempotent."""
        ...

    async def set_draining(self, draining: bool) -> None:
        """Set whether the drafter announces in `info` that it will stop. It continues to draft in
        either case.
        """
        ...


DrafterEndpoint = DrafterControl
"""Interface that a drafter process implements. Its exchange connections are outgoing."""


class Dialer(Protocol):
    """Connects to the other processes of one transport by address."""

    async def exchange(self, verifier_address: str) -> DrafterConnection:
        """Open an exchange connection to a verifier. Raises UnavailableError."""
        ...

    async def verifier(self, address: str) -> VerifierControl:
        """Return a control client of the verifier at `address`."""
        ...

    async def drafter(self, address: str) -> DrafterControl:
        """Return a control client of the drafter at `address`."""
        ...

    async def close_channel(self, address: str) -> None:
        """Close the channel to an address whose process has ended, if there is one."""
        ...

    async def close(self) -> None:
        """Close every channel."""
        ...
