"""Transport interfaces: connections, control clients, endpoints and dialers between processes.

A process implements an endpoint (`VerifierEndpoint`, `DrafterEndpoint`), and a transport makes the
endpoint available to other processes. Three transports exist: in-process, gRPC and Ray. None of
them imports a process package.
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
    """One end of a long-lived, ordered, message-oriented connection between two processes.

    Connections that a dialer returns or that an endpoint is given send and receive heartbeats by
    themselves: their users never see a `Heartbeat`. Sends and receives may be cancelled without
    losing a message. Only one task may receive at a time.
    """

    @property
    def peer(self) -> str:
        """Address of the other end, for logs."""
        ...

    async def send(self, message: SendT) -> None:
        """Wait until the queue has space, then queue a message. Raises ConnectionLostError."""
        ...

    def try_send(self, *messages: SendT) -> bool:
        """Queue all messages and return True if the queue has space for one. Otherwise queue none
        and return False. Never waits.

        The queue may exceed its limit by the messages of one call. A transport with frames sends
        the messages of one call in one frame if they fit. For messages that must wait for space,
        `SendQueue` keeps the order. Raises ConnectionLostError if the connection is lost.
        """
        ...

    async def receive(self) -> ReceiveT:
        """Return the next message.

        Raises InvalidMessageError if the message is malformed (the connection stays usable), and
        ConnectionLostError if the peer is gone or silent.
        """
        ...

    def receive_ready(self) -> Sequence[ReceiveT]:
        """Return the messages that `receive` would return without waiting, up to the first
        malformed one.

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
"""A router's end of a session stream: opens and leaves sessions, and receives their events."""
ServingConnection = ExchangeConnection[SessionsMessage, SessionsRequest | MalformedOpen]
"""The verifier's end of a session stream: receives the router's requests, and sends events."""


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
        first step raises InvalidRequestError if token ids are out of range or the session is too
        long, AlreadyExistsError if the session id is in use, or ResourceExhaustedError if the
        session does not fit now. Any step raises UnavailableError if the verifier is lost.
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
"""Interface that a drafter process implements. It has no method for exchange connections, because
drafters open these connections themselves.
"""


class Dialer(Protocol):
    """Opens connections to other processes by address, over one transport."""

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
        """Close the channel to `address` if one is open. Call this after the process at the address
        has ended.
        """
        ...

    async def close(self) -> None:
        """Close every channel."""
        ...
