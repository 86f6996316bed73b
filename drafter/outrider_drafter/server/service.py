"""DrafterService: connections to verifiers, and the calls of routers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import outrider
from outrider.busy_polling import BusyCores
from outrider.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InvalidMessageError,
    InvalidRequestError,
    OutriderError,
    UnavailableError,
)
from outrider.grammar.grammar_cache import GrammarCache
from outrider.ids import DrafterId
from outrider.transport.interface import Dialer, DrafterConnection
from outrider.transport.send_queue import SendQueue
from outrider.transport.shm import ShmChannelJoiner, is_shm_supported, join_channel
from outrider.watchdog import Watchdog
from outrider.wire.codec import encode_drafter_message
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    DrafterInfo,
    DrafterMessage,
    EncodedMessage,
    FeatureLayout,
    Heartbeat,
    Hello,
    ReplicaCommand,
    Welcome,
)
from outrider_drafter.config import DrafterConfig
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.proposers.interface import Proposer
from outrider_drafter.server.draft_engine import (
    ConnectionClosed,
    DraftEngine,
    OutgoingProposals,
    SessionMessage,
)
from outrider_drafter.server.draft_loop import DraftLoop
from outrider_drafter.server.handshake import connect_to_verifier
from outrider_drafter.server.shm_channels import ReplicaTable
from outrider_drafter.state.session import VerdictLimits

logger = logging.getLogger(__name__)

DRAIN_NOTICE_S = 1.5
"""Maximum time in seconds that a stopping drafter without sessions waits until a router has read
its draining state. Routers poll every half second."""
_BACKLOG_POLL_S, _DRAIN_POLL_S = 0.002, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """Properties of the target model that must be the same in the verifier and the drafter."""

    vocab_size: int
    tokenizer_hash: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class _VerifierLink:
    """State of one attached verifier."""

    address: str
    first_outcome: asyncio.Future[None]
    """Done when the first connection attempt has succeeded or failed. If the verifier refused this
    drafter as incompatible, it holds that exception."""
    connected: bool = False
    task: asyncio.Task[None] | None = None


class DrafterService:
    """Implements the RPCs of `DrafterControl`, and connects to verifiers through any `Dialer`.

    When a device is lost, the service closes all connections and refuses every call with
    DEVICE_LOST. When the drafting thread hangs, it does the same with ENGINE_STALLED. The owner is
    notified through `lost` and must end the process, so that its supervisor starts a new one.
    """

    def __init__(
        self,
        config: DrafterConfig,
        proposers: Sequence[Proposer],
        dialer: Dialer,
        *,
        identity: TargetIdentity,
        metrics: DrafterMetrics | None = None,
        busy_cores: BusyCores | None = None,
        join: ShmChannelJoiner = join_channel,
        grammars: GrammarCache | None = None,
        handicap: str = "",
        replicas: ReplicaTable | None = None,
    ) -> None:
        """Create a service without connections.

        `busy_cores`: CPU cores that poll while there are sessions. `join`: joins an offered
        shared-memory channel; called on a thread of its own. `handicap`: description of what slows
        the drafter down, shown to operators. `replicas`: see `VerifierShmChannels`.
        """
        kept = busy_cores or BusyCores.claim(0)
        self.metrics = metrics or DrafterMetrics()
        self._config, self._dialer, self._join_shm_channel = config, dialer, join
        self._grammars = grammars
        self._handicap = handicap
        fed = [p for p in proposers if p.feature_layout is not FeatureLayout.NONE]
        self._hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            drafter_id=DrafterId(config.drafter_id),
            incarnation=secrets.token_hex(8),
            vocab_size=identity.vocab_size,
            tokenizer_hash=identity.tokenizer_hash,
            methods=tuple(proposer.method for proposer in proposers),
            feature_layout=fed[0].feature_layout if fed else FeatureLayout.NONE,
            feature_fingerprint=fed[0].feature_fingerprint if fed else "",
            supports_shm=config.shared_memory and is_shm_supported(),
            feature_offsets=True,
            version=outrider.__version__,
        )
        limits = VerdictLimits(
            vocab_size=identity.vocab_size,
            feature_size=fed[0].feature_size if fed else 0,
            max_context=config.max_context,
        )
        engine = DraftEngine(
            proposers,
            limits=limits,
            max_sessions=config.max_sessions,
            metrics=self.metrics,
            on_sessions=lambda count: kept.set_busy(count > 0),
            grammars=grammars,
            in_time=config.limit_look_ahead_time,
        )
        self._worker = DraftLoop(
            engine,
            self._deliver,
            on_lost=self._on_lost,
            on_shm_channel_lost=self._on_shm_channel_lost,
            max_unsent=config.max_unsent_batches,
            device=config.device,
            replicas=replicas,
        )
        self.lost = asyncio.Event()
        """Set when a device is lost or the drafting thread hangs."""
        self.is_stalled = False
        """Whether the drafting thread hangs. Nothing may wait for the thread then."""
        self._watchdog = Watchdog(
            self._worker.progress,
            has_work=lambda: self._worker.has_work,
            on_stall=self._on_stall,
            timeout_s=config.stall_s,
        )
        self._draining = False
        """Whether a router has asked this drafter to drain."""
        self._ending = False
        """Whether the process is about to end."""
        self._heard = False
        """Whether a router has called `info` since the process began to end."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: dict[str, _VerifierLink] = {}
        self._outboxes: dict[int, SendQueue[DrafterMessage]] = {}
        self._readers: dict[int, asyncio.Task[None]] = {}
        """Reading task of each connection. Cancelling the task ends the connection."""
        self._lost_shm_channels: set[int] = set()
        """Connections that are being ended because their shared-memory channels are lost."""
        self._numbers = itertools.count(1)

    @property
    def num_sessions(self) -> int:
        """Number of followed sessions."""
        return self._worker.num_sessions

    @property
    def is_drafting(self) -> bool:
        """Whether the drafting thread runs."""
        return self._worker.is_alive

    @property
    def unsent_batches(self) -> list[int]:
        """Number of batches of proposals that wait to be sent, for each connected verifier."""
        return [len(outbox) for outbox in self._outboxes.values()]

    def connected_to(self, verifier_address: str) -> bool:
        """Return whether the verifier at this address is attached and connected now."""
        link = self._links.get(verifier_address)
        return link is not None and link.connected

    async def info(self) -> DrafterInfo:
        """Return the identity and load of this drafter. Raises UnavailableError if a device is lost
        or the drafting thread hangs."""
        self._check_device()
        self._heard = self._ending
        return DrafterInfo(
            protocol_version=PROTOCOL_VERSION,
            drafter_id=self._hello.drafter_id,
            incarnation=self._hello.incarnation,
            vocab_size=self._hello.vocab_size,
            tokenizer_hash=self._hello.tokenizer_hash,
            methods=self._hello.methods,
            feature_layout=self._hello.feature_layout,
            feature_fingerprint=self._hello.feature_fingerprint,
            sessions=self._worker.num_sessions,
            verifiers=tuple(a for a, link in self._links.items() if link.connected),
            draft_ms_p50=self.metrics.draft_ms_p50,
            handicap=self._handicap,
            draining=self.draining,
            max_sessions=self._config.max_sessions,
            version=outrider.__version__,
        )

    async def attach(self, verifier_address: str) -> None:
        """Connect to a verifier and reconnect until it is detached; idempotent.

        Waits up to `attach_wait_s` for the result of the first attempt. An unreachable verifier is
        tried again. Raises FailedPreconditionError if the verifier is incompatible; it is then not
        tried again. Raises InvalidRequestError for an empty address.
        """
        if not verifier_address:
            raise InvalidRequestError("verifier_address must not be empty")
        self._check_device()
        link = self._links.get(verifier_address)
        if link is None:
            self._start_worker()
            outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            link = _VerifierLink(address=verifier_address, first_outcome=outcome)
            self._links[verifier_address] = link
            link.task = asyncio.create_task(self._follow(link), name=f"verifier {verifier_address}")
        wait_s = self._config.reconnect.attach_wait_s
        done, _ = await asyncio.wait([link.first_outcome], timeout=wait_s)
        if done and (misfit := link.first_outcome.exception()) is not None:
            raise misfit

    async def detach(self, verifier_address: str) -> None:
        """Drop the connection to a verifier; idempotent."""
        link = self._links.pop(verifier_address, None)
        if link is None or link.task is None:
            return
        link.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await link.task

    @property
    def draining(self) -> bool:
        """Whether routers should move this drafter's sessions to other drafters."""
        return self._draining or self._ending

    async def set_draining(self, draining: bool) -> None:
        """Set whether `info` reports this drafter as draining. The drafter continues to draft in
        either case."""
        self._draining = draining

    async def hand_over(self, timeout_s: float) -> bool:
        """Report this drafter as draining for good, and wait until routers have moved all sessions
        to other drafters. Also waits up to `DRAIN_NOTICE_S` until a router has read this state,
        because otherwise routers would treat the drafter as lost. Return False if sessions remain
        after `timeout_s` seconds."""
        self._ending = True
        began = time.monotonic()
        while (passed := time.monotonic() - began) < timeout_s:
            unheard = self._links and not self._heard and passed < DRAIN_NOTICE_S
            if not (self.num_sessions or unheard):
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        return self.num_sessions == 0

    async def close(self) -> None:
        """Detach from every verifier and end the drafting thread."""
        for address in tuple(self._links):
            await self.detach(address)
        self._watchdog.stop()
        if not self.is_stalled:
            await asyncio.to_thread(self._worker.stop)
        if self._grammars is not None:
            self._grammars.close()

    def _start_worker(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._worker.start()
            self._watchdog.start()

    async def _follow(self, link: _VerifierLink) -> None:
        """Connect to a verifier again and again until it is detached or refuses the first
        attempt."""
        reconnect = self._config.reconnect
        pause = reconnect.min_backoff_s
        while True:
            try:
                await self._serve(link)
            except FailedPreconditionError as error:
                self._attempt(link, "refused", error)
                if not link.first_outcome.done():
                    self._links.pop(link.address, None)
                    link.first_outcome.set_exception(error)
                    # Read once here, so that an attach that gave up waiting leaves no complaint.
                    link.first_outcome.exception()
                    return
            except OutriderError as error:
                self._attempt(link, "lost" if link.connected else "unreachable", error)
            except Exception as error:
                logger.exception("connection failed", extra={"verifier": link.address})
                self._attempt(link, "failed", error)
            if link.connected:
                pause = reconnect.min_backoff_s
            link.connected = False
            if not link.first_outcome.done():
                link.first_outcome.set_result(None)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2.0 * pause, reconnect.max_backoff_s)

    def _attempt(self, link: _VerifierLink, outcome: str, error: Exception) -> None:
        self.metrics.connects.labels(outcome).inc()
        logger.warning(
            "verifier connection ended",
            extra={"verifier": link.address, "outcome": outcome, "reason": str(error)},
        )

    async def _serve(self, link: _VerifierLink) -> None:
        """Serve one connection from the handshake to its end. Always ends with an exception."""
        connection = await self._dialer.exchange(link.address)
        number = next(self._numbers)
        sender: asyncio.Task[None] | None = None
        try:
            timeout_s = self._config.reconnect.handshake_timeout_s
            shm_channel = await connect_to_verifier(
                connection, self._hello, timeout_s=timeout_s, join=self._join_shm_channel
            )
            if shm_channel is not None:
                self._worker.submit_shm_channel(number, shm_channel)
            link.connected = True
            if not link.first_outcome.done():
                link.first_outcome.set_result(None)
            self.metrics.connects.labels("connected").inc()
            self.metrics.connections.inc()
            about = {"verifier": link.address, "shared_memory": shm_channel is not None}
            logger.info("verifier connected", extra=about)
            outbox = self._outboxes[number] = SendQueue(connection)
            sender = asyncio.create_task(_send_all(outbox), name="proposals")
            await self._read_until_lost(connection, number)
        finally:
            if sender is not None:
                sender.cancel()
                del self._outboxes[number]
                self._worker.submit_messages(number, ConnectionClosed())
                self.metrics.connections.dec()
            with contextlib.suppress(OutriderError):
                await connection.close()

    async def _read_until_lost(self, connection: DrafterConnection, number: int) -> None:
        """Read messages until the connection is lost. The loss of its shared-memory channel ends
        the connection, too."""
        reader = asyncio.create_task(self._read(connection, number), name="verdicts")
        self._readers[number] = reader
        try:
            await reader
        except asyncio.CancelledError:
            task = asyncio.current_task()
            detaching = task is not None and task.cancelling() > 0
            if reader.cancelled() and number in self._lost_shm_channels and not detaching:
                raise ConnectionLostError(
                    "the shared-memory channel is lost", reason="SHM_CHANNEL_LOST"
                ) from None
            raise
        finally:
            self._lost_shm_channels.discard(number)
            del self._readers[number]
            reader.cancel()

    async def _read(self, connection: DrafterConnection, number: int) -> None:
        while True:
            try:
                message = await connection.receive()
            except InvalidMessageError as error:
                self.metrics.ignored_messages.labels("malformed").inc()
                logger.warning("malformed message", extra={"reason": error.message})
                continue
            together = (message, *connection.receive_ready())
            told: list[SessionMessage] = []
            for each in together:
                if isinstance(each, ReplicaCommand):
                    # Commands for replicas are valid only through shared-memory channels.
                    self.metrics.ignored_messages.labels("replica").inc()
                elif not isinstance(each, Heartbeat | Welcome | EncodedMessage):
                    told.append(each)
            if told:
                self._worker.submit_messages(number, *told)
            while self._worker.backlog(number) > self._config.max_backlog:
                await asyncio.sleep(_BACKLOG_POLL_S)

    def _deliver(self, answers: OutgoingProposals) -> None:
        """Encode proposals and hand them to the event loop. Called on the drafting thread, which
        encodes because the event loop may be busy with incoming messages."""
        assert self._loop is not None
        encoded = [
            (number, EncodedMessage((encode_drafter_message(message),)))
            for number, message in answers
        ]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._enqueue, encoded)

    def _on_lost(self) -> None:
        """Leave all verifiers after the loss of a device. Called on the drafting thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._leave)

    def _on_shm_channel_lost(self, connection: int) -> None:
        """End the connection whose shared-memory channel is lost. Called on the drafting thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connection
            self._loop.call_soon_threadsafe(self._lose_shm, connection)

    def _lose_shm(self, connection: int) -> None:
        reader = self._readers.get(connection)
        if reader is not None:
            self._lost_shm_channels.add(connection)
            reader.cancel()

    def _on_stall(self, _silent_s: float) -> None:
        self.is_stalled = True
        self._leave()

    def _leave(self) -> None:
        """Drop all connections. Their verifiers continue without this drafter."""
        self.lost.set()
        for link in self._links.values():
            link.connected = False
            if link.task is not None:
                link.task.cancel()

    def _check_device(self) -> None:
        if self.is_stalled:
            raise UnavailableError(
                "the engine of the drafter makes no progress", reason="ENGINE_STALLED"
            )
        if self.lost.is_set():
            raise UnavailableError("the drafter has lost its device", reason="DEVICE_LOST")

    def _enqueue(self, answers: Sequence[tuple[int, EncodedMessage]]) -> None:
        for number, proposals in answers:
            self._send(number, proposals)

    def _send(self, number: int, proposals: EncodedMessage) -> None:
        outbox = self._outboxes.get(number)
        if outbox is None:
            self.metrics.dropped_proposals.inc()
            return
        with contextlib.suppress(OutriderError):  # the reader notices the loss, too
            outbox.put_messages(proposals)
        while len(outbox) > self._config.max_unsent_batches:
            outbox.drop_oldest()
            self.metrics.dropped_proposals.inc()


async def _send_all(outbox: SendQueue[DrafterMessage]) -> None:
    """Send the queued messages until the connection is lost; the reading task handles the loss."""
    with contextlib.suppress(OutriderError):
        await outbox.run_sender()
