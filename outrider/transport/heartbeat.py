"""Application heartbeats: they detect a peer whose event loop hangs, over every transport.

TCP and HTTP/2 keepalive detect a dead host or a stopped process; only application heartbeats detect
a process whose sockets are open while its event loop hangs. Silence is counted in ticks of the
local event loop, and a tick counts at most its nominal length: if the local loop was stalled, the
peer's messages are still read before the peer is considered lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.errors import ConnectionLostError, OutriderError
from outrider.transport.interface import ExchangeConnection
from outrider.wire.messages import Heartbeat

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")
ItemT = TypeVar("ItemT")

_TICKS_PER_TIMEOUT = 8
ROUTER_TIMEOUT_S = 10.0
"""Time in seconds without a message after which a verifier considers a router lost. The time is
shorter for drafters, because rounds wait for drafters but not for routers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatConfig:
    """Interval of the heartbeats, and the time without a message after which a peer is considered
    lost.
    """

    interval_s: float = 0.5
    """Time between two heartbeats in seconds."""
    timeout_s: float = 2.0
    """Time in seconds without a message after which the peer is considered lost. It should be
    several intervals long.
    """

    def __post_init__(self) -> None:
        if not 0.0 < self.interval_s < self.timeout_s:
            raise ValueError(
                f"interval_s must be in (0, timeout_s), got {self.interval_s} and {self.timeout_s}"
            )

    @property
    def tick_s(self) -> float:
        """Interval in seconds at which the peer's silence is checked."""
        return self.timeout_s / _TICKS_PER_TIMEOUT


def router_heartbeat() -> HeartbeatConfig:
    """Return the default heartbeat configuration of a verifier's end of a session stream."""
    return HeartbeatConfig(timeout_s=ROUTER_TIMEOUT_S)


def _silent(peer: str, config: HeartbeatConfig) -> ConnectionLostError:
    return ConnectionLostError(
        f"nothing heard from {peer} for {config.timeout_s:g} s", reason="PEER_SILENT"
    )


class HeartbeatConnection(Generic[SendT, ReceiveT]):
    """A connection that sends heartbeats, hides received ones, and ends when the peer is silent.

    Silence counts only while a caller waits in `receive`, because unread messages may prove that
    the peer is alive.
    """

    def __init__(
        self,
        inner: ExchangeConnection[SendT | Heartbeat, ReceiveT | Heartbeat],
        config: HeartbeatConfig,
    ) -> None:
        self.inner = inner
        self._config = config
        self._lost = False
        self._waiting = 0
        self._silent_ticks = 0
        self._tasks = (
            asyncio.create_task(self._beat(), name="outrider-heartbeat"),
            asyncio.create_task(self._watch(), name="outrider-heartbeat-watch"),
        )

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return self.inner.peer

    async def send(self, message: SendT) -> None:
        """Queue a message. Raises ConnectionLostError if the peer is lost or silent."""
        try:
            await self.inner.send(message)
        except ConnectionLostError as error:
            raise self._reason(error) from None

    def try_send(self, *messages: SendT) -> bool:
        """Queue all messages and return True. If the queue is full, queue none and return False.
        Raises ConnectionLostError.
        """
        try:
            return self.inner.try_send(*messages)
        except ConnectionLostError as error:
            raise self._reason(error) from None

    async def receive(self) -> ReceiveT:
        """Return the next message that is not a heartbeat. Raises ConnectionLostError if the peer
        is lost or silent.
        """
        while True:
            self._waiting += 1
            try:
                message = await self.inner.receive()
            except ConnectionLostError as error:
                self.stop_heartbeats()
                raise self._reason(error) from None
            finally:
                self._waiting -= 1
                self._silent_ticks = 0
            if not isinstance(message, Heartbeat):
                return message

    def receive_ready(self) -> list[ReceiveT]:
        """Return the messages that have arrived, except for heartbeats, without waiting."""
        return [
            message for message in self.inner.receive_ready() if not isinstance(message, Heartbeat)
        ]

    async def close(self) -> None:
        """Stop the heartbeats and close the connection. Idempotent."""
        self.stop_heartbeats()
        await self.inner.close()

    def _reason(self, error: ConnectionLostError) -> ConnectionLostError:
        return _silent(self.peer, self._config) if self._lost else error

    def stop_heartbeats(self) -> None:
        """Stop sending heartbeats and checking for silence. The connection stays open."""
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()

    async def _beat(self) -> None:
        sequence = 0
        with contextlib.suppress(OutriderError):
            while True:
                await asyncio.sleep(self._config.interval_s)
                sequence += 1
                await self.inner.send(Heartbeat(sequence))

    async def _watch(self) -> None:
        while self._silent_ticks < _TICKS_PER_TIMEOUT:
            await asyncio.sleep(self._config.tick_s)
            if self._waiting:
                self._silent_ticks += 1
        self._lost = True
        self.stop_heartbeats()
        await self.inner.close()


def with_heartbeat(
    connection: ExchangeConnection[SendT | Heartbeat, ReceiveT | Heartbeat], config: HeartbeatConfig
) -> HeartbeatConnection[SendT, ReceiveT]:
    """Return a connection that adds heartbeats to another connection."""
    return HeartbeatConnection(connection, config)


async def cancel_if_silent(task: asyncio.Task[ItemT], peer: str, config: HeartbeatConfig) -> ItemT:
    """Return the task's result. If it takes longer than the heartbeat timeout, cancel the task and
    raise ConnectionLostError.
    """
    try:
        for _ in range(_TICKS_PER_TIMEOUT):
            done, _pending = await asyncio.wait((task,), timeout=config.tick_s)
            if done:
                return task.result()
    except asyncio.CancelledError:
        task.cancel()
        raise
    task.cancel()
    raise _silent(peer, config)
