"""A verifier without a model: it shakes hands, says what the test says, and keeps proposals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from outrider.errors import (
    FailedPreconditionError,
    InvalidMessageError,
    OutriderError,
    UnavailableError,
)
from outrider.ids import SessionId, VerifierId
from outrider.spec.plan import SpeculationPlan
from outrider.transport.interface import RouterConnection, ServingConnection, VerifierConnection
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Proposal,
    Proposals,
    SessionEvent,
    SessionSpec,
    VerifierInfo,
    VerifierMessage,
    Welcome,
)


class ScriptedVerifier:
    """The verifier's end of exchanges, driven by a test. Serves no sessions."""

    def __init__(
        self,
        *,
        refuse: bool = False,
        welcome: bool = True,
        protocol_version: int = PROTOCOL_VERSION,
        version: str = "",
    ) -> None:
        self.refuse = refuse
        """Answer Hello with FailedPreconditionError."""
        self.welcome = welcome
        """Answer Hello at all."""
        self._protocol_version, self._version = protocol_version, version
        self.hellos: list[Hello] = []
        self.proposals: asyncio.Queue[Proposal] = asyncio.Queue()
        self._connections: asyncio.Queue[VerifierConnection] = asyncio.Queue()
        self._current: VerifierConnection | None = None

    async def exchange(self, connection: VerifierConnection) -> None:
        """Serve one drafter until it is gone."""
        hello = await connection.receive()
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        if self.refuse:
            raise FailedPreconditionError("another vocabulary", reason="VOCABULARY_MISMATCH")
        if self.welcome:
            await connection.send(
                Welcome(
                    protocol_version=self._protocol_version,
                    version=self._version,
                    verifier_id=VerifierId("scripted"),
                    incarnation="1",
                )
            )
        self._current = connection
        self._connections.put_nowait(connection)
        while True:
            try:
                message = await connection.receive()
            except InvalidMessageError:
                continue
            except OutriderError:
                return
            if isinstance(message, Proposals):
                for proposal in message.iter_proposals():
                    self.proposals.put_nowait(proposal)

    async def connected(self) -> VerifierConnection:
        """Wait for the next new connection."""
        async with asyncio.timeout(10.0):
            return await self._connections.get()

    async def say(self, *messages: VerifierMessage) -> None:
        """Send messages on the newest connection."""
        assert self._current is not None
        for message in messages:
            await self._current.send(message)

    async def hang_up(self) -> None:
        """End the newest connection."""
        assert self._current is not None
        await self._current.close()

    async def proposal(self) -> Proposal:
        """Wait for the next proposal."""
        async with asyncio.timeout(10.0):
            return await self.proposals.get()

    async def info(self) -> VerifierInfo:
        """Not served."""
        raise UnavailableError("a scripted verifier has no control interface")

    async def sessions(self) -> RouterConnection:
        """Not served."""
        raise UnavailableError("a scripted verifier serves no sessions")

    def open_session(self, spec: SessionSpec) -> AsyncIterator[SessionEvent]:
        """Not served."""
        raise UnavailableError("a scripted verifier serves no sessions")

    async def serve_sessions(self, connection: ServingConnection) -> None:
        """Not served."""
        raise UnavailableError("a scripted verifier serves no sessions")

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        """Not served."""
        raise UnavailableError("a scripted verifier serves no sessions")

    async def close_session(self, session_id: SessionId) -> None:
        """Not served."""
        raise UnavailableError("a scripted verifier serves no sessions")
