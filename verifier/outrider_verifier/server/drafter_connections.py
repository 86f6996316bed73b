"""Exchange connections of drafters: handshakes, incoming proposals, bounded outgoing queues.

The transport sends the heartbeats. If a drafter is silent, `receive` raises ConnectionLostError.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from outrider.errors import InvalidMessageError, OutriderError, UnavailableError
from outrider.ids import DrafterId
from outrider.transport.interface import VerifierConnection
from outrider.transport.send_queue import SendQueue
from outrider.transport.shm import ShmChannel, ShmListener
from outrider.wire.messages import (
    EncodedMessage,
    FeatureLayout,
    Hello,
    ShmAnswer,
    VerifierMessage,
)
from outrider_verifier.exchange.message_checks import (
    DrafterMessageChecker,
    VerifierIdentity,
    check_hello,
)
from outrider_verifier.state.commands import (
    Command,
    DrafterAttached,
    DrafterDetached,
    ExchangeLink,
    MalformedMessage,
)

DISCONNECT_TIMEOUT_S = 5.0
"""Time, in seconds, for which a drafter that sent too much may not connect again."""
MAX_BACKLOG_COMMANDS = 256
"""Maximum number of commands waiting for the engine thread. While more wait, no messages of
drafters are read."""
BACKLOG_POLL_S = 0.002

GreetingT = TypeVar("GreetingT", Hello, ShmAnswer)

logger = logging.getLogger(__name__)


def _message_bytes(message: VerifierMessage) -> int:
    return message.nbytes if isinstance(message, EncodedMessage) else 256


@dataclass(slots=True, eq=False)
class _Peer:
    """One connected drafter and its unsent messages."""

    link: ExchangeLink
    connection: VerifierConnection
    outgoing: SendQueue[VerifierMessage]
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the connection, because a newer connection replaces it or the drafter does not
    read."""


class DrafterConnections:
    """Connections of all connected drafters. Asyncio thread only."""

    def __init__(
        self,
        identity: VerifierIdentity,
        *,
        post: Callable[[Command], None],
        hello_s: float,
        queue_bytes: int,
        backlog: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create an object without connections. `post` passes a command to the engine thread.
        `hello_s` is the maximum time to wait for a message of the handshake, in seconds.
        `queue_bytes` is the maximum size of unsent messages of a drafter. `backlog` returns the
        number of commands that wait for the engine thread."""
        self._identity = identity
        self._checks = DrafterMessageChecker(identity)
        self._post = post
        self._hello_s = hello_s
        self._queue_bytes = queue_bytes
        self._backlog = backlog
        self._cut: dict[DrafterId, float] = {}
        """Times until which drafters that sent too much may not connect, on the event loop's
        clock."""
        self._peers: dict[int, _Peer] = {}
        self._numbers = itertools.count(1)
        self.counters: Counter[str] = self._checks.counters
        """Counters for metrics, which never decrease."""
        self.shm_channels: ShmListener | None = None
        """Listener that sets up shared-memory channels for drafters on this host; None if there are
        none."""

    @property
    def links(self) -> list[ExchangeLink]:
        """Links of the drafters that are connected now."""
        return [peer.link for peer in self._peers.values()]

    def send_messages(self, link_id: int, *messages: VerifierMessage) -> None:
        """Send messages together as soon as the connection is free. They are dropped if the
        connection has ended."""
        peer = self._peers.get(link_id)
        if peer is None or peer.lost.is_set():
            return
        try:
            peer.outgoing.put_messages(*messages)
        except Exception as error:
            if not isinstance(error, OutriderError):
                logger.exception("messages not sent", extra=_describe(peer))
            peer.lost.set()
        if peer.outgoing.size > self._queue_bytes:
            self.counters["drafters_overflowed"] += 1
            logger.warning(
                "drafter does not read; disconnecting", extra={"drafter": peer.link.drafter_id}
            )
            peer.lost.set()

    async def serve_connection(self, connection: VerifierConnection) -> None:
        """Serve one drafter's connection until it ends; the transport closes it afterwards. Raises
        FailedPreconditionError or InvalidMessageError for an invalid hello, and UnavailableError if
        the drafter was disconnected recently for sending too much. The drafter receives the
        error."""
        link, shm_channel = await self._shake_hands(connection)
        peer = _Peer(link, connection, SendQueue(connection, size_of=_message_bytes))
        self._replace_older(link.drafter_id)
        self._peers[link.link_id] = peer
        self._post(DrafterAttached(link, shm_channel))
        self.counters["drafters_attached"] += 1
        self.counters["shm_channels_joined"] += int(shm_channel is not None)
        logger.info(
            "drafter attached", extra=_describe(peer) | {"shared_memory": shm_channel is not None}
        )
        try:
            await self._pump(peer)
        finally:
            peer.lost.set()
            self._peers.pop(link.link_id, None)
            self._post(DrafterDetached(link.link_id))
            self.counters["drafters_lost"] += 1
            logger.info("drafter lost", extra=_describe(peer))

    def drop_link(self, link_id: int) -> None:
        """End the connection of a link after its shared-memory channel was lost."""
        peer = self._peers.get(link_id)
        if peer is not None:
            peer.lost.set()

    def disconnect_drafter(self, link_id: int) -> None:
        """End the connection of a drafter that sends too much. It may not connect again for
        DISCONNECT_TIMEOUT_S."""
        peer = self._peers.get(link_id)
        if peer is None:
            return
        self.counters["drafters_disconnected_flooding"] += 1
        logger.warning("drafter floods; disconnecting", extra=_describe(peer))
        now = asyncio.get_running_loop().time()
        self._cut = {name: until for name, until in self._cut.items() if until > now}
        self._cut[peer.link.drafter_id] = now + DISCONNECT_TIMEOUT_S
        peer.lost.set()

    async def _shake_hands(
        self, connection: VerifierConnection
    ) -> tuple[ExchangeLink, ShmChannel | None]:
        hello = await self._hear(connection, Hello)
        check_hello(hello, self._identity)
        self._check_cut(hello.drafter_id)
        shm_channel = await self._welcome(connection, wants_shm_channel=hello.supports_shm)
        link = ExchangeLink(
            link_id=next(self._numbers),
            drafter_id=hello.drafter_id,
            incarnation=hello.incarnation,
            methods=hello.methods,
            feature_layout=hello.feature_layout,
            same_host=shm_channel is not None,
            reads_shm_features=hello.feature_offsets
            and hello.feature_layout is FeatureLayout.PROJECTED,
        )
        return link, shm_channel

    async def _hear(self, connection: VerifierConnection, kind: type[GreetingT]) -> GreetingT:
        """Receive a message of the handshake. Raises InvalidMessageError if it is not of class
        `kind` or does not arrive in time."""
        try:
            async with asyncio.timeout(self._hello_s):
                message = await connection.receive()
        except TimeoutError:
            raise InvalidMessageError(f"no {kind.__name__} in time", reason="NO_HELLO") from None
        if not isinstance(message, kind):
            raise InvalidMessageError(f"{kind.__name__} is to come first", reason="NO_HELLO")
        return message

    async def _welcome(
        self, connection: VerifierConnection, *, wants_shm_channel: bool
    ) -> ShmChannel | None:
        """Answer the drafter's hello, and offer a shared-memory channel if the drafter wants one.
        Return the channel, or None if there is none."""
        listener, welcome = self.shm_channels, self._identity.welcome
        if listener is None or not wants_shm_channel:
            await connection.send(welcome)
            return None
        offer = listener.make_offer()
        try:
            await connection.send(replace(welcome, shm_offer=offer))
            answer = await self._hear(connection, ShmAnswer)
            return await listener.wait_joined(offer) if answer.is_joined else None
        finally:
            listener.withdraw_offer(offer)

    def _check_cut(self, drafter_id: DrafterId) -> None:
        left_s = self._cut.get(drafter_id, 0.0) - asyncio.get_running_loop().time()
        if left_s > 0.0:
            raise UnavailableError(
                f"drafter {drafter_id} was cut off for sending too much",
                reason="DRAFTER_CUT",
                retry_after_s=left_s,
            )

    def _replace_older(self, drafter_id: DrafterId) -> None:
        for peer in self._peers.values():
            if peer.link.drafter_id == drafter_id:
                peer.lost.set()

    async def _pump(self, peer: _Peer) -> None:
        """Receive and send messages until either direction ends or `peer.lost` is set."""
        tasks = [
            asyncio.ensure_future(self._receive_all(peer)),
            asyncio.ensure_future(peer.outgoing.run_sender()),
            asyncio.ensure_future(peer.lost.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OutriderError):
                logger.error("exchange failed", exc_info=result, extra=_describe(peer))

    async def _receive_all(self, peer: _Peer) -> None:
        while True:
            try:
                message = await peer.connection.receive()
            except InvalidMessageError as error:
                self._checks.count_invalid(error)
                self._post(MalformedMessage(peer.link.link_id))
                await self._wait_for_engine()
                continue
            messages = (message, *peer.connection.receive_ready())
            # All are checked before the first is posted: what wakes a round is there together.
            link_id = peer.link.link_id
            for command in [self._checks.to_command(link_id, message) for message in messages]:
                if command is not None:
                    self._post(command)
            await self._wait_for_engine()

    async def _wait_for_engine(self) -> None:
        """Wait while the engine thread has too many waiting commands, because each command occupies
        memory."""
        while self._backlog() > MAX_BACKLOG_COMMANDS:
            await asyncio.sleep(BACKLOG_POLL_S)


def _describe(peer: _Peer) -> dict[str, str]:
    return {"drafter": peer.link.drafter_id, "peer": peer.connection.peer}
