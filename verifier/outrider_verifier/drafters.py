"""Exchange connections: hello checks, incoming proposals, bounded outgoing queues.

Heartbeats are the transport's: a silent drafter ends `receive` with ConnectionLostError.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from outrider.errors import (
    FailedPreconditionError,
    InvalidMessageError,
    OutriderError,
)
from outrider.ids import DrafterId
from outrider.transport.base import VerifierConnection
from outrider.transport.outgoing import Outgoing
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    DrafterMessage,
    Encoded,
    FeatureLayout,
    Heartbeat,
    Hello,
    Proposals,
    SessionsLost,
    Verdicts,
    VerifierMessage,
    Welcome,
)
from outrider.wire.rounds import sound_proposals
from outrider_verifier.commands import Attached, Command, Detached, Link, Lost, Offered

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a drafter must fit, and the bounds that its messages must keep."""

    welcome: Welcome
    vocab_size: int
    tokenizer_hash: str
    feature_fingerprint: str
    """Empty if no projection is loaded."""
    max_tree_nodes: int


def check_hello(hello: Hello, identity: Identity) -> None:
    """Refuse a drafter that does not fit. Raises FailedPreconditionError."""
    _fit(
        hello.protocol_version == PROTOCOL_VERSION,
        f"protocol version {hello.protocol_version}, this verifier speaks {PROTOCOL_VERSION}",
        "PROTOCOL_MISMATCH",
    )
    _fit(
        hello.vocab_size == identity.vocab_size,
        f"drafts over {hello.vocab_size} token ids, the target has {identity.vocab_size}",
        "VOCAB_MISMATCH",
    )
    _fit(
        not hello.tokenizer_hash
        or not identity.tokenizer_hash
        or hello.tokenizer_hash == identity.tokenizer_hash,
        "the drafter's tokenizer differs from the target's",
        "TOKENIZER_MISMATCH",
    )
    _fit(
        hello.feature_layout is FeatureLayout.NONE
        or (
            bool(identity.feature_fingerprint)
            and hello.feature_fingerprint == identity.feature_fingerprint
        ),
        "the drafter's head differs from the one whose feature projection runs here"
        if identity.feature_fingerprint
        else "this verifier has no feature projection (features_from is not set)",
        "FEATURE_MISMATCH",
    )
    _fit(bool(hello.drafter_id), "drafter_id is empty", "NO_DRAFTER_ID")


def _fit(ok: bool, message: str, reason: str) -> None:
    if not ok:
        raise FailedPreconditionError(message, reason=reason)


def _message_bytes(message: VerifierMessage) -> int:
    return message.nbytes if isinstance(message, Encoded | Verdicts) else 256


@dataclass(slots=True, eq=False)
class _Peer:
    """One attached drafter and its unsent messages."""

    link: Link
    connection: VerifierConnection
    outgoing: Outgoing[VerifierMessage]
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the connection: replaced by a newer one, or not reading."""


class DrafterHub:
    """All attached drafters; asyncio thread only."""

    def __init__(
        self,
        identity: Identity,
        *,
        post: Callable[[Command], None],
        hello_s: float,
        queue_bytes: int,
    ) -> None:
        self._identity = identity
        self._post = post
        self._hello_s = hello_s
        self._queue_bytes = queue_bytes
        self._peers: dict[int, _Peer] = {}
        self._numbers = itertools.count(1)
        self.counters: Counter[str] = Counter()
        """Monotonic counts for metrics."""

    @property
    def links(self) -> list[Link]:
        """The drafters attached now."""
        return [peer.link for peer in self._peers.values()]

    def tell(self, link_id: int, *messages: VerifierMessage) -> None:
        """Send messages together, or queue them; dropped if the connection is gone."""
        peer = self._peers.get(link_id)
        if peer is None or peer.lost.is_set():
            return
        try:
            peer.outgoing.put(*messages)
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

    async def serve(self, connection: VerifierConnection) -> None:
        """Serve one drafter's connection until it ends; the transport closes it afterwards.

        Raises FailedPreconditionError or InvalidMessageError if its hello is no good; that is
        what the drafter is told.
        """
        link = await self._shake_hands(connection)
        peer = _Peer(link, connection, Outgoing(connection, size_of=_message_bytes))
        self._replace_older(link.drafter_id)
        self._peers[link.link_id] = peer
        self._post(Attached(link))
        self.counters["drafters_attached"] += 1
        logger.info("drafter attached", extra=_describe(peer))
        try:
            await self._pump(peer)
        finally:
            peer.lost.set()
            self._peers.pop(link.link_id, None)
            self._post(Detached(link.link_id))
            self.counters["drafters_lost"] += 1
            logger.info("drafter lost", extra=_describe(peer))

    async def _shake_hands(self, connection: VerifierConnection) -> Link:
        try:
            async with asyncio.timeout(self._hello_s):
                hello = await connection.receive()
        except TimeoutError:
            raise InvalidMessageError("no hello in time", reason="NO_HELLO") from None
        if not isinstance(hello, Hello):
            raise InvalidMessageError("the first message must be a hello", reason="NO_HELLO")
        check_hello(hello, self._identity)
        await connection.send(self._identity.welcome)
        return Link(
            link_id=next(self._numbers),
            drafter_id=hello.drafter_id,
            incarnation=hello.incarnation,
            methods=hello.methods,
            feature_layout=hello.feature_layout,
        )

    def _replace_older(self, drafter_id: DrafterId) -> None:
        for peer in self._peers.values():
            if peer.link.drafter_id == drafter_id:
                peer.lost.set()

    async def _pump(self, peer: _Peer) -> None:
        """Run both directions until one of them ends, or `lost` is set."""
        tasks = [
            asyncio.ensure_future(self._receive_all(peer)),
            asyncio.ensure_future(peer.outgoing.pump()),
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
                self._count_invalid(peer, error)
                continue
            messages = (message, *peer.connection.ready())
            # All are checked before the first is posted: what wakes a round is there together.
            for command in [self._command(peer, message) for message in messages]:
                if command is not None:
                    self._post(command)

    def _command(self, peer: _Peer, message: DrafterMessage) -> Command | None:
        """What a message asks of the engine."""
        match message:
            case Proposals():
                sound = sound_proposals(
                    message,
                    vocab_size=self._identity.vocab_size,
                    max_nodes=self._identity.max_tree_nodes,
                )
                if wrong := int(np.count_nonzero(~sound)):
                    unsound = InvalidMessageError(f"{wrong} proposals", reason="INVALID_TREE")
                    self._count_invalid(peer, unsound, wrong)
                return Offered(peer.link.link_id, message, sound)
            case SessionsLost(handles=handles):
                return Lost(peer.link.link_id, handles)
            case Heartbeat() | Encoded():
                return None
            case Hello():
                self._count_invalid(peer, InvalidMessageError("second hello", reason="HELLO"))
                return None

    def _count_invalid(self, peer: _Peer, error: InvalidMessageError, count: int = 1) -> None:
        self.counters["messages_invalid"] += count
        logger.debug("invalid message: %s", error.message, extra=_describe(peer))


def _describe(peer: _Peer) -> dict[str, str]:
    return {"drafter": peer.link.drafter_id, "peer": peer.connection.peer}
