"""The verifier as an endpoint of any transport; everything here runs on the asyncio thread."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator
from typing import assert_never

from outrider.awake import AwakeCores
from outrider.engine.kvcache import KVPool
from outrider.errors import OutriderError, UnavailableError
from outrider.ids import SessionId, VerifierId
from outrider.spec.plan import Plan
from outrider.transport.base import VerifierConnection
from outrider.wire.limits import MAX_PLANNER_BYTES
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    AttachedDrafter,
    SessionEvent,
    SessionSpec,
    TensorDtype,
    VerifierInfo,
    Welcome,
)
from outrider_verifier.commands import Close, Command, Open, SetPlan
from outrider_verifier.config import AUTOMATIC_PLANNER, VerifierConfig
from outrider_verifier.core import OWN_METHODS, Core
from outrider_verifier.drafters import DrafterHub, Identity
from outrider_verifier.effects import Answer, Effect, Emit, Fail, RoundReport, Tell, told_by_link
from outrider_verifier.engine import Projection, RoundEngine, RoundRunner, Target
from outrider_verifier.features import FeatureStore
from outrider_verifier.handover import Handover
from outrider_verifier.inbox import Inbox
from outrider_verifier.loop import EngineLoop
from outrider_verifier.metrics import Metrics
from outrider_verifier.policy import Policy
from outrider_verifier.rounds import Rounds, device_lost_error
from outrider_verifier.schedule import Limits

_DRAIN_POLL_S = 0.02
_STOP_TIMEOUT_S = 10.0
_EventQueue = asyncio.Queue[SessionEvent | OutriderError]


class VerifierService:
    """Implements `VerifierEndpoint`. The engine thread starts with the first call (or `start`)
    and belongs to the event loop that runs then; `stop` ends it.

    When the device is lost, every session fails and every call is refused with DEVICE_LOST; the
    owner, told by `lost`, is to end the process, so that its keeper starts a new one.
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
        awake: AwakeCores | None = None,
    ) -> None:
        """`pool` holds the K/V of `target`; `max_context_len` is the model's own limit.

        Without a `runner`, rounds are run by a `RoundEngine` of target and projection. `awake` is
        kept while there are sessions.
        """
        self._config = config
        self._pool = pool
        self._awake = awake or AwakeCores.claim(0)
        self._incarnation = secrets.token_hex(8)
        self._model_name = model_name
        self._tokenizer_hash = tokenizer_hash
        self._fingerprint = "" if projection is None else projection.fingerprint
        self._vocab_size = target.vocab_size
        if runner is None:
            runner = RoundEngine(
                target, projection, feature_dtype=feature_dtype(config), device=config.device
            )
        self._own_draft_length = runner.drafts_itself
        # A session longer than the whole budget could never be admitted.
        slack = max(config.max_tree_nodes, runner.extra_slots)
        self._kv_blocks = pool.free_blocks
        """Blocks that sessions can get; what the runner took for itself is out of their reach."""
        fits = self._kv_blocks * pool.block_tokens - slack
        limits = (config.max_context_len, max_context_len, fits)
        self._max_context_len = min(limit for limit in limits if limit > 0)
        self._outbox: list[Effect] = []
        self._core, self._rounds = _assemble(
            config, target, projection, runner, pool, self._max_context_len, self._outbox
        )
        self._hub = DrafterHub(
            self._identity(),
            post=self._post,
            hello_s=config.hello_s,
            queue_bytes=config.drafter_queue_mb << 20,
        )
        self.metrics = Metrics(self._counts, self._gauges)
        self._tickets = itertools.count(1)
        self._streams: dict[int, _EventQueue] = {}
        self._loop: EngineLoop | None = None
        self._draining = False
        self._stopped = False
        self.lost = asyncio.Event()
        """Set when the device does not work any more, after all sessions have failed."""

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
                loop=asyncio.get_running_loop(),
                dispatch=self._dispatch,
                on_lost=self._on_lost,
            )
            self._loop.start()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new sessions and let the running ones finish; False if time ran out."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self._streams

    async def stop(self) -> None:
        """Fail what still runs and end the engine thread; idempotent."""
        self._stopped = True
        loop, self._loop = self._loop, None
        if loop is not None:
            await asyncio.to_thread(loop.stop, _STOP_TIMEOUT_S)

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
            drafters=tuple(
                AttachedDrafter(
                    drafter_id=link.drafter_id,
                    incarnation=link.incarnation,
                    methods=link.methods,
                    sessions=self._core.sessions_of(link.drafter_id),
                )
                for link in self._hub.links
            ),
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
        )

    async def open_session(self, spec: SessionSpec) -> AsyncGenerator[SessionEvent]:
        """Serve a session; closing the iterator, however that happens, frees all it holds."""
        if self._draining:
            raise UnavailableError("the verifier is draining", reason="DRAINING")
        self.start()
        ticket = next(self._tickets)
        events: _EventQueue = asyncio.Queue()
        self._streams[ticket] = events
        self._awake.keep(True)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._post(Open(ticket, spec, answer))
        try:
            await answer
            while True:
                event = await events.get()
                if isinstance(event, OutriderError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            del self._streams[ticket]
            self._awake.keep(bool(self._streams))
            self._post(Close(spec.session_id, ticket))

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
        if self._loop is not None:
            self._loop.post(command)
        else:
            self._refuse(command, UnavailableError("the verifier has stopped", reason="STOPPING"))

    @staticmethod
    def _refuse(command: Command, error: OutriderError) -> None:
        if isinstance(command, Open | SetPlan | Close) and command.answer is not None:
            _settle(command.answer, error)

    def _on_lost(self) -> None:
        """The engine thread has ended because the device is lost; all it told has come."""
        loop, self._loop = self._loop, None
        self.lost.set()
        for command in [] if loop is None else loop.left_over():
            self._refuse(command, device_lost_error())

    def _check_device(self) -> None:
        if self.lost.is_set():
            raise device_lost_error()

    def _dispatch(self, effects: list[Effect]) -> None:
        """Perform what a round (or a command) asked for; drafters first, each told all at once."""
        for link_id, messages in told_by_link(effects).items():
            self._hub.tell(link_id, *messages)
        for effect in effects:
            match effect:
                case Tell():
                    pass
                case Emit(ticket=ticket, event=event):
                    self._put(ticket, event)
                case Fail(ticket=ticket, error=error):
                    self._put(ticket, error)
                case Answer(future=future, error=refused):
                    _settle(future, refused)
                case RoundReport() as report:
                    self.metrics.observe(report)
                case _:
                    assert_never(effect)

    def _put(self, ticket: int, item: SessionEvent | OutriderError) -> None:
        # A stream whose reader has left is gone from the table; its Close is on the way.
        events = self._streams.get(ticket)
        if events is not None:
            events.put_nowait(item)

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
        return {**self._core.counters, **self._hub.counters}

    def _gauges(self) -> dict[str, float]:
        store = self._core.store
        return {
            "sessions_running": self._core.num_sessions,
            "kv_blocks_total": self._kv_blocks,
            "kv_blocks_free": self._pool.free_blocks,
            "drafters_connected": len(self._hub.links),
            "inbox_proposals": self._core.num_proposals,
            "feature_bytes": 0 if store is None else store.used_bytes,
        }


def _settle(future: asyncio.Future[None], error: OutriderError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def feature_dtype(config: VerifierConfig) -> TensorDtype:
    """Element type in which features cross the wire: the target's own."""
    return TensorDtype(config.dtype)


def _assemble(
    config: VerifierConfig,
    target: Target,
    projection: Projection | None,
    runner: RoundRunner,
    pool: KVPool,
    max_context_len: int,
    outbox: list[Effect],
) -> tuple[Core, Rounds]:
    """Everything that the engine thread will own."""
    dtype = feature_dtype(config)
    store = None
    if projection is not None:
        store = FeatureStore(
            width=projection.hidden_size,
            dtype="uint16" if dtype is TensorDtype.BFLOAT16 else dtype.value,
            budget_bytes=config.feature_budget_mb << 20,
        )
    core = Core(
        pool=pool,
        runner=runner,
        inbox=Inbox(per_session=config.inbox_per_session, total=config.inbox_total),
        handover=Handover(store=store, dtype=dtype, chunk_tokens=config.prefill_tokens),
        store=store,
        vocab_size=target.vocab_size,
        max_context_len=max_context_len,
        max_tree_nodes=config.max_tree_nodes,
        max_sessions=config.max_sessions,
        policy=Policy(automatic=config.planner == AUTOMATIC_PLANNER, ceiling_s=config.ceiling_s),
        post=outbox.append,
    )
    limits = Limits(
        prefill_tokens=config.prefill_tokens,
        decode_tokens=config.decode_tokens_per_round,
        gather_s=config.gather_s,
    )
    return core, Rounds(core, runner, limits)
