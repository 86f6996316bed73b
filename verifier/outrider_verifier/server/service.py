"""The verifier as an endpoint of any transport; everything here runs on the asyncio thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from typing import assert_never

from outrider.busy_polling import AwakeCores
from outrider.engine.kv_cache import KVPool
from outrider.errors import OutriderError, ResourceExhaustedError, UnavailableError
from outrider.grammar.grammar_cache import Grammars
from outrider.ids import SessionId, VerifierId
from outrider.spec.plan import Plan
from outrider.transport.in_process import local_sessions
from outrider.transport.interface import RouterConnection, ServingConnection, VerifierConnection
from outrider.transport.session_stream import SessionIterators
from outrider.transport.shm import LaneListener
from outrider.watchdog import Watchdog
from outrider.wire.limits import MAX_PLANNER_BYTES
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    VerifierInfo,
    Welcome,
)
from outrider_verifier.config import VerifierConfig
from outrider_verifier.engine.core import OWN_METHODS
from outrider_verifier.engine.failure_handler import device_lost_error, engine_stalled_error
from outrider_verifier.engine.loop import EngineLoop
from outrider_verifier.exchange.message_checks import DrafterChecks, Identity
from outrider_verifier.exchange.shm_channels import Lanes
from outrider_verifier.model_runner.cpu_runner import Projection, RoundEngine, Target
from outrider_verifier.model_runner.grammar_preparation import Forms
from outrider_verifier.model_runner.interface import RoundRunner
from outrider_verifier.server.drafter_connections import DrafterHub
from outrider_verifier.server.engine_builder import assemble
from outrider_verifier.server.metrics import Metrics, stats_of
from outrider_verifier.server.router_streams import RouterHub
from outrider_verifier.state.commands import (
    Attached,
    Close,
    Command,
    Garbled,
    Offered,
    Open,
    SetPlan,
)
from outrider_verifier.state.effects import (
    Answer,
    Cut,
    Effect,
    Emits,
    Fail,
    Moved,
    RoundReport,
    Tell,
    told_by_link,
)

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.02
_STOP_TIMEOUT_S = 10.0
MAX_COMMANDS = 4096
"""Commands that may wait for the engine thread; beyond them requests are refused, and proposals
dropped: a round without one is slower, never wrong."""


class VerifierService(SessionIterators):
    """Implements `VerifierEndpoint`. The engine thread starts with the first call (or `start`)
    and belongs to the event loop that runs then; `stop` ends it.

    When the device is lost, every session fails and every call is refused with DEVICE_LOST; when
    the engine thread hangs, with ENGINE_STALLED. The owner, told by `lost`, is to end the process,
    so that its keeper starts a new one.
    """

    def __init__(
        self,
        config: VerifierConfig,
        target: Target,
        projection: Projection | None = None,
        *,
        runner: RoundRunner | None = None,
        pool: KVPool,
        max_context_len: int,
        model_name: str = "",
        tokenizer_hash: str = "",
        grammars: Grammars | None = None,
        awake: AwakeCores | None = None,
    ) -> None:
        """`pool` holds the K/V of `target`; `max_context_len` is the model's own limit.

        Without `grammars` sessions with structured output are refused. Without a `runner`, rounds
        are run by a `RoundEngine` of target and projection. `awake` is kept while there are
        sessions.
        """
        self._config = config
        self._pool = pool
        self._awake = awake or AwakeCores.claim(0)
        self._incarnation = secrets.token_hex(8)
        self._model_name = model_name
        self._tokenizer_hash = tokenizer_hash
        self._fingerprint = "" if projection is None else projection.fingerprint
        self._vocab_size = target.vocab_size
        runner = runner or RoundEngine.build(config, target, projection)
        self._own_draft_length = runner.drafts_itself
        self._kv_blocks = pool.free_blocks
        """Blocks that sessions can get; what the runner took for itself is out of their reach."""
        # A session longer than the whole budget could never be admitted.
        fits = self._kv_blocks * pool.block_tokens + 1 - runner.slack.most
        limits = (config.max_context_len, max_context_len, fits)
        self._max_context_len = min(limit for limit in limits if limit > 0)
        if config.max_context_len > self._max_context_len:
            logger.warning(
                "max_context_len is cut to what the model and the K/V budget allow",
                extra={"asked": config.max_context_len, "allowed": self._max_context_len},
            )
        self._outbox: list[Effect] = []
        self._core, self._rounds = assemble(
            config, target, projection, runner, pool, self._max_context_len, self._outbox
        )
        self._hub = DrafterHub(
            self._identity(),
            post=self._post,
            hello_s=config.hello_s,
            queue_bytes=config.drafter_queue_mb << 20,
            backlog=lambda: 0 if self._loop is None else self._loop.backlog,
        )
        self._lanes = Lanes(
            DrafterChecks(self._identity()),
            queue_bytes=config.drafter_queue_mb << 20,
            on_lost=self._on_lane_lost,
            pin=runner.pin,
        )
        runner.land_in(self._lanes.reserve)
        self._forms = Forms(grammars)
        self._routers = RouterHub(
            post=self._post,
            admit=self._check_draining,
            on_change=lambda sessions: self._awake.keep(sessions > 0),
            forms=self._forms,
        )
        self.metrics = Metrics(self._counts, self._gauges)
        self._loop: EngineLoop | None = None
        self._running_on: asyncio.AbstractEventLoop | None = None
        self._overflows = 0
        self._draining = False
        self._stopped = False
        self.lost = asyncio.Event()
        """Set when the device does not work any more, or the engine thread hangs, after all
        sessions have failed."""
        self.is_stalled = False
        """Whether the engine thread hangs: nothing may wait for it."""
        self._watchdog: Watchdog | None = None

    # ---- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread on the running event loop; idempotent."""
        self._check_device()
        if self._stopped:
            raise UnavailableError("the verifier has stopped", reason="STOPPING")
        if self._loop is None:
            self._loop = EngineLoop(
                self._core,
                self._rounds,
                self._outbox,
                self._lanes,
                loop=asyncio.get_running_loop(),
                dispatch=self._dispatch,
                on_lost=self._on_lost,
            )
            self._running_on = asyncio.get_running_loop()
            if self._config.lanes:
                self._hub.lanes = LaneListener.open()
            self._loop.start()
            self._watchdog = Watchdog(
                self._loop.progress,
                has_work=lambda: self._loop is not None and self._loop.has_work,
                on_stall=self._on_stall,
                timeout_s=self._config.stall_s,
            )
            self._watchdog.start()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new sessions, and let routers take the running ones elsewhere or see them end.

        What is left when time has run out fails, so that routers go on with it; then False.
        """
        self._draining = True
        self._routers.drain(timeout_s)
        deadline = time.monotonic() + timeout_s
        while self._routers.num_sessions and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        left = self._routers.num_sessions
        self._routers.end_all(draining_error())
        return left == 0

    async def stop(self) -> None:
        """Fail what still runs and end the engine thread; idempotent."""
        self._stopped = True
        if self._watchdog is not None:
            self._watchdog.stop()
        loop, self._loop = self._loop, None
        self._close_lanes()
        self._forms.close()
        if loop is not None:
            await asyncio.to_thread(loop.stop, _STOP_TIMEOUT_S)
            for command in loop.left_over():
                self._refuse(command, UnavailableError("the verifier has stopped"))

    # ---- VerifierEndpoint ----------------------------------------------------------------------

    async def info(self) -> VerifierInfo:
        """Identity, capacity and load."""
        self._check_device()
        medians, counters = self.metrics.medians, self._core.counters
        return VerifierInfo(
            protocol_version=PROTOCOL_VERSION,
            verifier_id=VerifierId(self._config.verifier_id),
            incarnation=self._incarnation,
            model_name=self._model_name,
            vocab_size=self._vocab_size,
            tokenizer_hash=self._tokenizer_hash,
            max_context_len=self._max_context_len,
            kv_block_tokens=self._pool.block_tokens,
            kv_total_blocks=self._kv_blocks,
            kv_free_blocks=self._pool.free_blocks,
            sessions=self._core.num_sessions,
            max_sessions=self._config.max_sessions,
            drafters=tuple(self._core.attached(link, time.monotonic()) for link in self._hub.links),
            feature_fingerprint=self._fingerprint,
            rounds_total=counters["rounds"],
            tokens_total=counters["emitted_tokens"],
            dtype=self._config.dtype,
            round_ms_p50=medians.round_ms,
            forward_ms_p50=medians.forward_ms,
            overhead_ms_p50=medians.overhead_ms,
            own_methods=OWN_METHODS if self._own_draft_length else (),
            own_draft_length=self._own_draft_length,
            simulated_acceptance=self._config.simulated_acceptance,
            planner=self._core.policy.summary()[:MAX_PLANNER_BYTES],
            stats=stats_of(counters),
            hit_idle_us_p50=medians.hit_idle_us,
            draining=self._draining or self._stopped,
            waiting_sessions=len(self._core.room.waiting),
            preemptions_swap=counters["preemptions_swap"],
            preemptions_recompute=counters["preemptions_recompute"],
            prefix_tokens_asked=counters["prefix_tokens_asked"],
            prefix_tokens_found=counters["prefix_tokens_found"],
            engine_steps=self._steps(),
        )

    async def sessions(self) -> RouterConnection:
        """A stream of sessions for a caller in this process."""
        self.start()
        return local_sessions(self)

    async def serve_sessions(self, connection: ServingConnection) -> None:
        """Serve one router's stream of sessions; its end, however it comes, frees them all."""
        self.start()
        await self._routers.serve(connection)

    async def set_plan(self, session_id: SessionId, plan: Plan) -> None:
        """Change a session's plan; NotFoundError if there is none."""
        self.start()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(SetPlan(session_id, plan, answer))
        await answer

    async def close_session(self, session_id: SessionId) -> None:
        """End a session, whose stream then ends with CANCELLED; returns when all is free."""
        self.start()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(Close(session_id, answer=answer))
        await answer

    async def exchange(self, connection: VerifierConnection) -> None:
        """Serve one drafter's connection until it ends."""
        self.start()
        await self._hub.serve(connection)

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
            self._loop.post(command)

    @staticmethod
    def _must_take(command: Command) -> bool:
        """Whether a command is bounded by itself: one an opened session or connection."""
        unanswered_close = isinstance(command, Close) and command.answer is None
        droppable = Open | SetPlan | Close | Offered | Garbled
        return unanswered_close or not isinstance(command, droppable)

    @staticmethod
    def _refuse(command: Command, error: OutriderError) -> None:
        if isinstance(command, Open | SetPlan | Close) and command.answer is not None:
            _settle(command.answer, error)
        if isinstance(command, Attached) and command.lane is not None:
            command.lane.close()

    def _on_lost(self) -> None:
        """The engine thread has ended because the device is lost; all it told has come."""
        loop, self._loop = self._loop, None
        self._close_lanes()
        self.lost.set()
        for command in [] if loop is None else loop.left_over():
            self._refuse(command, device_lost_error())

    def _on_stall(self, silent_s: float) -> None:
        """The engine thread hangs: leave it alone, and let routers go on elsewhere."""
        self.is_stalled = True
        loop, self._loop = self._loop, None
        self._close_lanes()
        for command in [] if loop is None else loop.left_over():
            self._refuse(command, engine_stalled_error())
        self._routers.end_all(engine_stalled_error())
        self.lost.set()

    def _on_lane_lost(self, link_id: int) -> None:
        """Called on the engine thread."""
        assert self._running_on is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the connection
            self._running_on.call_soon_threadsafe(self._hub.lose, link_id)

    def _close_lanes(self) -> None:
        listener, self._hub.lanes = self._hub.lanes, None
        if listener is not None:
            listener.close()

    def _check_device(self) -> None:
        if self.lost.is_set():
            raise engine_stalled_error() if self.is_stalled else device_lost_error()

    def _check_draining(self) -> None:
        if self._draining:
            raise draining_error()
        self.start()

    def _dispatch(self, effects: list[Effect]) -> None:
        """Perform what a round (or a command) asked for; drafters first, each told all at once."""
        for link_id, messages in told_by_link(effects).items():
            self._hub.tell(link_id, *messages)
        for effect in effects:
            match effect:
                case Tell():
                    pass
                case Emits():
                    self._routers.emit(effect)
                case Fail(ticket=ticket, error=error):
                    self._routers.fail(ticket, error)
                case Moved(ticket=ticket, drafter_id=drafter_id):
                    self._routers.moved(ticket, drafter_id)
                case Cut(link_id=link_id):
                    self._hub.cut(link_id)
                case Answer(future=future, error=refused):
                    _settle(future, refused)
                case RoundReport() as report:
                    self.metrics.observe(report)
                case _:
                    assert_never(effect)

    def _steps(self) -> int:
        """What tells a router that its sessions make progress: steps of the engine, and grammars
        that were compiled before the engine hears of a session."""
        engine = 0 if self._loop is None else self._loop.session_steps
        return engine + self._routers.compilations

    def _identity(self) -> Identity:
        return Identity(
            welcome=Welcome(
                protocol_version=PROTOCOL_VERSION,
                verifier_id=VerifierId(self._config.verifier_id),
                incarnation=self._incarnation,
            ),
            vocab_size=self._vocab_size,
            tokenizer_hash=self._tokenizer_hash,
            feature_fingerprint=self._fingerprint,
            max_tree_nodes=self._config.max_tree_nodes,
        )

    def _counts(self) -> dict[str, int]:
        # The engine thread writes to the first one: only a copy at once is safe.
        counters = Counter({**self._core.counters, "commands_refused": self._overflows})
        counters.update(self._hub.counters)
        counters.update(self._lanes.counters)
        counters.update(self._routers.counters)
        return counters

    def _gauges(self) -> dict[str, float]:
        store = self._core.store
        return {
            "sessions_running": len(self._core.room.running),
            "sessions_waiting": len(self._core.room.waiting),
            "swapped_bytes": self._core.room.swapped_bytes,
            "kv_blocks": self._kv_blocks,
            "kv_blocks_free": self._pool.free_blocks,
            "kv_cache_usage_ratio": 1.0 - self._pool.free_blocks / max(1, self._kv_blocks),
            "prefix_blocks": self._core.room.prefix_blocks,
            "prefix_feature_bytes": self._core.room.prefix_feature_bytes,
            "drafters_connected": len(self._hub.links),
            "inbox_proposals": self._core.num_proposals,
            "feature_bytes": 0 if store is None else store.used_bytes,
        }


def draining_error() -> UnavailableError:
    """The error of sessions that a verifier takes no more, or serves no longer."""
    return UnavailableError("the verifier is about to stop", reason="DRAINING")


def _settle(future: asyncio.Future[None], error: OutriderError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
