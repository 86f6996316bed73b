"""The verifier that repeats every row of tokens for ever and never says that a session is over,
once SIGUSR1 came; once SIGUSR2 came, its token ids are none of the vocabulary either."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from outrider_verifier import __main__ as verifier

from outrider.errors import ConnectionLostError
from outrider.transport import grpc
from outrider.transport.grpc import verifier_services
from outrider.transport.interface import ServingConnection, VerifierEndpoint
from outrider.wire.messages import MalformedOpen, SessionEvents, SessionsMessage, SessionsRequest

ENDLESS, WRONG = threading.Event(), threading.Event()


class HostileConnection:
    """A router's connection on which a verifier says again and again what it said once."""

    def __init__(self, connection: ServingConnection) -> None:
        self._honest = connection
        self.peer = connection.peer

    async def send(self, message: SessionsMessage) -> None:
        await self._honest.send(self._forge(message))

    def try_send(self, *messages: SessionsMessage) -> bool:
        return self._honest.try_send(*map(self._forge, messages))

    async def receive(self) -> SessionsRequest | MalformedOpen:
        return await self._honest.receive()

    def receive_ready(self) -> Sequence[SessionsRequest | MalformedOpen]:
        return self._honest.receive_ready()

    async def close(self) -> None:
        await self._honest.close()

    def _forge(self, message: SessionsMessage) -> SessionsMessage:
        if not isinstance(message, SessionEvents) or not (ENDLESS.is_set() or WRONG.is_set()):
            return message
        message = replace(message, finish_reasons=np.zeros_like(message.finish_reasons))
        if WRONG.is_set():
            message = replace(message, tokens=np.full_like(message.tokens, 1 << 20))
        asyncio.get_running_loop().call_later(0.01, self._say_again, message)
        return message

    def _say_again(self, message: SessionEvents) -> None:
        try:
            self.try_send(message)
        except ConnectionLostError:
            # The router has left, and with it the only one to lie to.
            return


class HostileVerifier:
    """A verifier whose routers get such connections."""

    def __init__(self, honest: VerifierEndpoint) -> None:
        self._honest = honest

    async def serve_sessions(self, connection: ServingConnection) -> None:
        await self._honest.serve_sessions(HostileConnection(connection))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)


def hostile_services(endpoint: VerifierEndpoint, *rest: Any) -> Any:
    """What the process serves in place of its verifier's services."""
    return verifier_services(cast(VerifierEndpoint, HostileVerifier(endpoint)), *rest)


if __name__ == "__main__":
    grpc.verifier_services = hostile_services
    signal.signal(signal.SIGUSR1, lambda *_: ENDLESS.set())
    signal.signal(signal.SIGUSR2, lambda *_: WRONG.set())
    sys.exit(verifier.main())
