"""VerifierService: the verifier as an endpoint of any transport. Asyncio thread only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from typing import TYPE_CHECKING, assert_never

import outrider
from outrider.busy_polling import BusyCores
from outrider.engine.kv_cache import KVPool
from outrider.errors import OutriderError, ResourceExhaustedError, UnavailableError
from outrider.grammar.grammar_cache import GrammarCache
from outrider.ids import SessionId, VerifierId
from outrider.spec.plan import SpeculationPlan
from outrider.transport.in_process import open_local_sessions
from outrider.transport.interface import RouterConnection, ServingConnection, VerifierConnection
from outrider.transport.session_stream import SessionIteratorMixin
from outrider.transport.shm import ShmListener
from outrider.watchdog import Watchdog
from outrider.wire.limits import MAX_PLANNER_BYTES
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    DeviceExchangeInfo,
    MemoryKind,
    VerifierInfo,
    Welcome,
)
from outrider_verifier.config import VerifierConfig
from outrider_verifier.engine.core import IN_PROCESS_METHODS
from outrider_verifier.engine.failure_handler import device_lost_error, engine_stalled_error
from outrider_verifier.engine.loop import EngineLoop
from outrider_verifier.engine.outbox import Outbox
from outrider_verifier.exchange.message_checks import DrafterMessageChecker, VerifierIdentity
from outrider_verifier.exchange.shm_channels import DrafterShmChannels
from outrider_verifier.model_runner.cpu_runner import (
    CpuModelRunner,
    FeatureProjector,
    TargetForward,
)
from outrider_verifier.model_runner.grammar_preparation import GrammarPreparation
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.server.drafter_connections import DrafterConnections
from outrider_verifier.server.engine_builder import build_engine
from outrider_verifier.server.metrics import VerifierMetrics, stats_of
from outrider_verifier.server.router_streams import RouterStreams
from outrider_verifier.state.commands import (
    CloseSession,
    Command,
    DrafterAttached,
    MalformedMessage,
    OpenSession,
    ProposalsReceived,
    SetPlan,
)
from outrider_verifier.state.effects import (
    CompleteCommand,
    DisconnectDrafter,
    DrafterChanged,
    Effect,
    EventBatch,
    FailSession,
    RoundReport,
    SendMessage,
    messages_by_link,
)

if TYPE_CHECKING:
    from outrider_verifier.exchange.device_exchange import DeviceExchange

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.02
_STOP_TIMEOUT_S = 10.0
MAX_COMMANDS = 4096
"""Maximum number of commands that wait for the engine thread. Beyond this number, requests are
refused and proposals are dropped, which makes rounds slower but never wrong."""


class VerifierService(SessionIteratorMixin):
    """Implements `VerifierEndpoint`, the interface of a verifier for routers and drafters.

    The engine thread starts with the first call or with `start`. It sends its results to the event
    loop that runs then, and `stop` ends it. If the device is lost, every session fails and every
    later call is refused with DEVICE_LOST. If the engine thread hangs, the reason is
    ENGINE_STALLED. In both cases `lost` is set; the owner must then end the process, so that its
    supervisor starts a new one.
    """

    def __init__(
        self,
        config: VerifierConfig,
        target: TargetForward,
        projection: FeatureProjector | None = None,
        *,
        runner: ModelRunner | None = None,
        pool: KVPool,
        max_context_len: int,
        model_name: str = "",
        tokenizer_hash: str = "",
        grammars: GrammarCache | None = None,
        busy_cores: BusyCores | None = None,
    ) -> None:
        """Create a service whose engine thread is not started. `pool` holds the KV of `target`.
        `max_context_len` is the context length of the model.

        If `grammars` is None, sessions with structured output are refused. If `runner` is None, a
        `CpuModelRunner` of `target` and `projection` runs the rounds. `busy_cores` are CPU cores
        that are kept busy-polling while there are sessions.
        """
        self._config = config
        self._pool = pool
        self._busy_cores = busy_cores or BusyCores.claim(0)
        self._incarnation = secrets.token_hex(8)
        self._model_name = model_name
        self._tokenizer_hash = tokenizer_hash
        self._fingerprint = "" if projection is None else projection.fingerprint
        self._vocab_size = target.vocab_size
        runner = runner or CpuModelRunner.build(config, target, projection)
        self._in_process_draft_length = runner.in_process_draft_length
        self._kv_blocks = pool.free_blocks
        """Number of KV blocks for sessions. Blocks that the runner itself holds are excluded."""
        # A session longer than the whole budget could never be admitted.
        fits = self._kv_blocks * pool.block_tokens + 1 - runner.slot_headroom.max_slots
        limits = (config.max_context_len, max_context_len, fits)
        self._max_context_len = min(limit for limit in limits if limit > 0)
        if config.max_context_len > self._max_context_len:
            logger.warning(
                "max_context_len is cut to what the model and the KV budget allow",
                extra={"asked": config.max_context_len, "allowed": self._max_context_len},
            )
        self._running_on: asyncio.AbstractEventLoop | None = None
        self._shm_channels = DrafterShmChannels(
            DrafterMessageChecker(self._identity()),
            queue_bytes=config.drafter_queue_mb << 20,
            on_lost=self._on_shm_channel_lost,
            pin=runner.pin_memory,
        )
        runner.set_feature_allocator(self._shm_channels.reserve)
        self.outbox = Outbox(self._shm_channels, self._send_effects)
        """Effects of the engine thread that were not yet performed."""
        self._exchange: DeviceExchange | None = None
        self.core, self.rounds = build_engine(
            config,
            target,
            projection,
            runner,
            pool,
            self._max_context_len,
            self.outbox,
            lambda spec: 0 if self._exchange is None else self._exchange.draft_length(spec),
        )
        """`core` holds the state of all sessions, and `rounds` runs their rounds. The engine thread
        owns both once it has started. Benchmarks and tests that never start it run rounds
        themselves."""
        self.drafter_connections = DrafterConnections(
            self._identity(),
            post=self._post,
            hello_s=config.handshake_timeout_s,
            queue_bytes=config.drafter_queue_mb << 20,
            backlog=lambda: self.backlog,
        )
        """Connections of the drafters."""
        if config.exchanges_on_device and projection is not None:
            self._exchange = self._make_exchange(runner)
        self._grammar_preparation = GrammarPreparation(grammars)
        self.router_streams = RouterStreams(
            post=self._post,
            admit=self._check_draining,
            on_change=lambda sessions: self._busy_cores.set_busy(sessions > 0),
            grammars=self._grammar_preparation,
        )
        """Connections of the routers, and the sessions of each router."""
        self.metrics = VerifierMetrics(self.read_counters, self._gauges)
        self._loop: EngineLoop | None = None
        self._overflows = 0
        self._draining = False
        self._stopped = False
        self.lost = asyncio.Event()
        """Set after the device was lost or the engine thread hung, once all sessions have
        failed."""
        self.is_stalled = False
        """Whether the engine thread hangs. If so, nothing may wait for it."""
        self._watchdog: Watchdog | None = None

    def _make_exchange(self, runner: ModelRunner) -> DeviceExchange | None:
        # Imported here: they need Triton, which a verifier on a CPU can do without.
        from outrider_verifier.exchange.device_exchange import DeviceExchange
        from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner

        if not isinstance(runner, GpuModelRunner) or runner.remote_drafter is None:
            return None

        def lose() -> None:
            runner.detach_remote_drafter()
            self.core.forget_remote_drafts()

        return DeviceExchange(
            runner.remote_drafter,
            self._shm_channels,
            num_blocks=self._pool.total_blocks,
            block_tokens=self._pool.block_tokens,
            table_blocks=runner.table_blocks,
            feature_dtype=self._config.feature_dtype,
            on_open=self.core.open_remote_drafts,
            on_lost=lose,
            on_drafts=self.core.drafters.record_device_drafts,
            on_rounds=lambda rounds: self.metrics.observe_exchange(rounds),
        )

    # ---- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread; idempotent. Its results are sent to the running event loop."""
        self._check_device()
        if self._stopped:
            raise UnavailableError("the verifier has stopped", reason="STOPPING")
        if self._loop is None:
            self._running_on = asyncio.get_running_loop()
            self._loop = EngineLoop(
                self.core,
                self.rounds,
                self._shm_channels,
                on_lost=self._on_engine_ended,
                exchange=self._exchange,
            )
            if self._config.shared_memory:
                self.drafter_connections.shm_channels = ShmListener.open()
            self._loop.start()
            self._watchdog = Watchdog(
                self._loop.progress,
                has_work=lambda: self._loop is not None and self._loop.has_work,
                on_stall=self._on_stall,
                timeout_s=self._config.stall_s,
            )
            self._watchdog.start()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new sessions, and wait until all running sessions have ended or were moved by
        their routers. After `timeout_s` seconds fail the remaining sessions, so that routers resume
        them on another verifier. Return whether no session had to fail."""
        self._draining = True
        self.router_streams.announce_drain(timeout_s)
        deadline = time.monotonic() + timeout_s
        while self.router_streams.num_sessions and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        left = self.router_streams.num_sessions
        self.router_streams.fail_all_sessions(draining_error())
        return left == 0

    async def stop(self) -> None:
        """Fail all running sessions and end the engine thread; idempotent."""
        self._stopped = True
        if self._watchdog is not None:
            self._watchdog.stop()
        loop, self._loop = self._loop, None
        self._close_shm_channels()
        self._grammar_preparation.close()
        if loop is not None:
            await asyncio.to_thread(loop.stop, _STOP_TIMEOUT_S)
            for command in loop.remaining_commands():
                self._refuse(command, UnavailableError("the verifier has stopped"))

    # ---- VerifierEndpoint ----------------------------------------------------------------------

    async def info(self) -> VerifierInfo:
        """Return the verifier's identity, capacity and load."""
        self._check_device()
        medians, counters = self.metrics.medians, self.core.counters
        return VerifierInfo(
            protocol_version=PROTOCOL_VERSION,
            verifier_id=VerifierId(self._config.verifier_id),
            incarnation=self._incarnation,
            version=outrider.__version__,
            model_name=self._model_name,
            vocab_size=self._vocab_size,
            tokenizer_hash=self._tokenizer_hash,
            max_context_len=self._max_context_len,
            kv_block_tokens=self._pool.block_tokens,
            kv_total_blocks=self._kv_blocks,
            kv_free_blocks=self._pool.free_blocks,
            sessions=self.core.num_sessions,
            max_sessions=self._config.max_sessions,
            drafters=tuple(
                self.core.describe_drafter(link, time.monotonic())
                for link in self.drafter_connections.links
            ),
            feature_fingerprint=self._fingerprint,
            rounds_total=counters["rounds"],
            tokens_total=counters["emitted_tokens"],
            dtype=self._config.dtype,
            round_ms_p50=medians.round_ms,
            forward_ms_p50=medians.forward_ms,
            overhead_ms_p50=medians.overhead_ms,
            in_process_methods=IN_PROCESS_METHODS if self._in_process_draft_length else (),
            in_process_draft_length=self._in_process_draft_length,
            simulated_acceptance=self._config.simulated_acceptance,
            planner=self.core.policy.describe()[:MAX_PLANNER_BYTES],
            stats=stats_of(counters),
            hit_idle_us_p50=medians.hit_idle_us,
            draining=self._draining or self._stopped,
            waiting_sessions=len(self.core.block_manager.waiting),
            preemptions_swap=counters["preemptions_swap"],
            preemptions_recompute=counters["preemptions_recompute"],
            prefix_cache_query_tokens=counters["prefix_cache_query_tokens"],
            prefix_cache_hit_tokens=counters["prefix_cache_hit_tokens"],
            engine_steps=self._steps(),
            device_exchange=self._exchange_info(),
        )

    @property
    def backlog(self) -> int:
        """Number of commands that wait for the engine thread."""
        return 0 if self._loop is None else self._loop.backlog

    def read_counters(self) -> dict[str, int]:
        """Return the counters of the engine and of all connections, by their names in metrics. They
        never decrease."""
        # The engine thread writes to the first one: only a copy at once is safe.
        counters = Counter({**self.core.counters, "commands_refused": self._overflows})
        counters.update(self.drafter_connections.counters)
        counters.update(self._shm_channels.counters)
        counters.update(self.router_streams.counters)
        if self._exchange is not None:
            counters.update(self._exchange.counters)
        return counters

    async def sessions(self) -> RouterConnection:
        """Return a session stream for a caller in this process."""
        self.start()
        return open_local_sessions(self)

    async def serve_sessions(self, connection: ServingConnection) -> None:
        """Serve one router's session stream until it ends, then close all its sessions."""
        self.start()
        await self.router_streams.serve_router(connection)

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        """Change a session's speculation plan. Raises NotFoundError if there is no such session."""
        self.start()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(SetPlan(session_id, plan, answer))
        await answer

    async def close_session(self, session_id: SessionId) -> None:
        """Close a session. Its stream ends with CANCELLED. Returns when its resources are free."""
        self.start()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(CloseSession(session_id, answer=answer))
        await answer

    async def exchange(self, connection: VerifierConnection) -> None:
        """Serve one drafter's connection until it ends."""
        self.start()
        await self.drafter_connections.serve_connection(connection)

    # ---- between the threads -------------------------------------------------------------------

    def _post(self, command: Command) -> None:
        if self._loop is None:
            self._refuse(command, UnavailableError("the verifier has stopped", reason="STOPPING"))
        elif self._loop.backlog >= MAX_COMMANDS and not self._must_take(command):
            self._overflows += 1
            self._refuse(
                command, ResourceExhaustedError("the engine is behind", reason="ENGINE_BEHIND")
            )
        else:
            self._loop.post_command(command)

    @staticmethod
    def _must_take(command: Command) -> bool:
        """Return whether a command is accepted even if MAX_COMMANDS commands wait. Such a command
        occurs at most once for each session or connection, so the number of waiting commands stays
        bounded."""
        unanswered_close = isinstance(command, CloseSession) and command.answer is None
        droppable = OpenSession | SetPlan | CloseSession | ProposalsReceived | MalformedMessage
        return unanswered_close or not isinstance(command, droppable)

    @staticmethod
    def _refuse(command: Command, error: OutriderError) -> None:
        if isinstance(command, OpenSession | SetPlan | CloseSession) and command.answer is not None:
            _settle(command.answer, error)
        if isinstance(command, DrafterAttached) and command.shm_channel is not None:
            command.shm_channel.close()

    def _send_effects(self, effects: list[Effect]) -> None:
        """Pass effects to the asyncio thread. The engine thread calls this."""
        assert self._running_on is not None
        self._running_on.call_soon_threadsafe(self.perform_effects, effects)

    def _on_engine_ended(self) -> None:
        """Inform the asyncio thread that the device is lost. The engine thread calls this when it
        ends."""
        assert self._running_on is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._running_on.call_soon_threadsafe(self._on_lost)

    def _on_lost(self) -> None:
        """Fail all sessions after the engine thread has ended because the device is lost."""
        loop, self._loop = self._loop, None
        self._close_shm_channels()
        self.lost.set()
        for command in [] if loop is None else loop.remaining_commands():
            self._refuse(command, device_lost_error())

    def _on_stall(self, silent_s: float) -> None:
        """Fail all sessions because the engine thread hangs. Their routers then resume them on
        another verifier. `silent_s` is the time since the thread's last progress, in seconds."""
        self.is_stalled = True
        loop, self._loop = self._loop, None
        self._close_shm_channels()
        for command in [] if loop is None else loop.remaining_commands():
            self._refuse(command, engine_stalled_error())
        self.router_streams.fail_all_sessions(engine_stalled_error())
        self.lost.set()

    def _on_shm_channel_lost(self, link_id: int) -> None:
        """End the connection of a link after its shared-memory channel was lost. The engine thread
        calls this."""
        assert self._running_on is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connection
            self._running_on.call_soon_threadsafe(self.drafter_connections.drop_link, link_id)

    def _close_shm_channels(self) -> None:
        listener, self.drafter_connections.shm_channels = (
            self.drafter_connections.shm_channels,
            None,
        )
        if listener is not None:
            listener.close()

    def _check_device(self) -> None:
        if self.lost.is_set():
            raise engine_stalled_error() if self.is_stalled else device_lost_error()

    def _check_draining(self) -> None:
        if self._draining:
            raise draining_error()
        self.start()

    def perform_effects(self, effects: list[Effect]) -> None:
        """Perform the effects of a round or a command. Messages to drafters are sent first, all
        messages to a drafter together."""
        for link_id, messages in messages_by_link(effects).items():
            self.drafter_connections.send_messages(link_id, *messages)
        for effect in effects:
            match effect:
                case SendMessage():
                    pass
                case EventBatch():
                    self.router_streams.send_events(effect)
                case FailSession(ticket=ticket, error=error):
                    self.router_streams.fail_session(ticket, error)
                case DrafterChanged(ticket=ticket, drafter_id=drafter_id):
                    self.router_streams.announce_drafter(ticket, drafter_id)
                case DisconnectDrafter(link_id=link_id):
                    self.drafter_connections.disconnect_drafter(link_id)
                case CompleteCommand(future=future, error=refused):
                    _settle(future, refused)
                case RoundReport() as report:
                    self.metrics.observe_report(report)
                case _:
                    assert_never(effect)

    def _steps(self) -> int:
        """Return a number that grows while sessions make progress: steps of the engine plus
        finished grammar compilations. Routers use it to detect a verifier that hangs."""
        engine = 0 if self._loop is None else self._loop.session_steps
        return engine + self.router_streams.compilations

    def _exchange_info(self) -> DeviceExchangeInfo | None:
        if self._exchange is not None:
            return self._exchange.info
        return DeviceExchangeInfo() if self._config.exchanges_on_device else None

    def _identity(self) -> VerifierIdentity:
        return VerifierIdentity(
            welcome=Welcome(
                protocol_version=PROTOCOL_VERSION,
                verifier_id=VerifierId(self._config.verifier_id),
                incarnation=self._incarnation,
                version=outrider.__version__,
            ),
            vocab_size=self._vocab_size,
            tokenizer_hash=self._tokenizer_hash,
            feature_fingerprint=self._fingerprint,
            max_tree_nodes=self._config.max_tree_nodes,
        )

    def _gauges(self) -> dict[str, float]:
        store, exchange = self.core.store, self._exchange_info()
        return {
            **{
                f"device_exchange_open_{kind.value}": exchange is not None
                and exchange.memory is kind
                for kind in MemoryKind
            },
            "sessions_running": len(self.core.block_manager.running),
            "sessions_waiting": len(self.core.block_manager.waiting),
            "swapped_bytes": self.core.block_manager.swapped_bytes,
            "kv_blocks": self._kv_blocks,
            "kv_blocks_free": self._pool.free_blocks,
            "kv_cache_usage_ratio": 1.0 - self._pool.free_blocks / max(1, self._kv_blocks),
            "prefix_blocks": self.core.block_manager.prefix_blocks,
            "prefix_feature_bytes": self.core.block_manager.prefix_feature_bytes,
            "drafters_connected": len(self.drafter_connections.links),
            "pending_proposals": self.core.num_proposals,
            "feature_bytes": 0 if store is None else store.used_bytes,
        }


def draining_error() -> UnavailableError:
    """Return the error for sessions that a draining verifier refuses or stops serving."""
    return UnavailableError("the verifier is about to stop", reason="DRAINING")


def _settle(future: asyncio.Future[None], error: OutriderError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
