"""A verifier that follows a script instead of a model; counts what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from outrider.errors import (
    AlreadyExistsError,
    ConnectionLostError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.spec.plan import SpeculationPlan
from outrider.transport.interface import ServingConnection, VerifierConnection
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    AttachedDrafter,
    FinishReason,
    SessionEvent,
    SessionsDraining,
    SessionSpec,
    SpecStats,
    TokenLogprobs,
    VerifierInfo,
)
from tests.fakes.serving import ServesGenerators

Script = Callable[[SessionSpec], Sequence[int]]
"""The ids that a session emits if nothing ends it earlier."""


def echo(spec: SessionSpec) -> Sequence[int]:
    """Repeat the prompt for ever, as far as the budget goes, from where the prefix ends."""
    prompt, done = spec.token_ids[: spec.prompt_len], len(spec.token_ids) - spec.prompt_len
    return [prompt[(done + i) % len(prompt)] for i in range(spec.max_new_tokens)]


def scripted_logprobs(
    spec: SessionSpec, end: int, tokens: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    """What comes with tokens that end before a position: numbers that tell the position."""
    if spec.top_logprobs is None:
        return ()
    values = [-(end - len(tokens) + place) / 8 for place in range(len(tokens))]
    top = spec.top_logprobs
    return tuple(
        TokenLogprobs(value, tuple((rank, value - rank) for rank in range(top))) for value in values
    )


class FakeVerifier(ServesGenerators):
    """Implements `VerifierEndpoint`. Every session costs its tokens of a KV budget."""

    def __init__(
        self,
        *,
        tokenizer_hash: str = "",
        vocab_size: int = 259,
        script: Script = echo,
        tokens_per_round: int = 1,
        round_s: float = 0.0,
        kv_blocks: int = 256,
        kv_block_tokens: int = 16,
        max_sessions: int = 64,
        max_context_len: int = 2048,
    ) -> None:
        self.script = script
        self.logprobs = scripted_logprobs
        self.cached: Callable[[SessionSpec], int] = lambda spec: 0
        """Tokens of a session's prompt that it claims to have found in its prefix cache."""
        self.tokens_per_round = tokens_per_round
        self.round_s = round_s
        self.specs: list[SessionSpec] = []
        """Every session that was ever opened."""
        self.live: dict[SessionId, SessionSpec] = {}
        self.lost = asyncio.Event()
        """Set: every stream breaks and every call fails."""
        self.streams: list[ServingConnection] = []
        """Every router's stream that is open."""
        self.hung = False
        """Calls are never answered."""
        self.gate: asyncio.Event | None = None
        """Rounds wait for it while it is there."""
        self.refusals = 0
        """So many sessions are refused as if there were no room."""
        self.drafters_alive = True
        self.moves: list[tuple[SessionId, DrafterId | None]] = []
        """Every session that was given to another drafter."""
        self.refuses_moves = False
        self.described = VerifierInfo(
            protocol_version=PROTOCOL_VERSION,
            verifier_id=VerifierId("v0"),
            incarnation="1",
            model_name="fake",
            vocab_size=vocab_size,
            tokenizer_hash=tokenizer_hash,
            max_context_len=max_context_len,
            kv_block_tokens=kv_block_tokens,
            kv_total_blocks=kv_blocks,
            kv_free_blocks=kv_blocks,
            sessions=0,
            max_sessions=max_sessions,
            drafters=(),
        )

    @classmethod
    def describe(cls, **changes: object) -> VerifierInfo:
        """What such a verifier says of itself, with changes."""
        return replace(cls().described, **changes)  # type: ignore[arg-type]

    def change_info(self, **changes: object) -> None:
        """Change what `info` answers."""
        self.described = replace(self.described, **changes)  # type: ignore[arg-type]

    def attach(self, drafter: AttachedDrafter) -> None:
        """Pretend that a drafter connected."""
        others = [d for d in self.described.drafters if d.drafter_id != drafter.drafter_id]
        self.change_info(drafters=(*others, drafter))

    def detach(self, drafter_id: DrafterId) -> None:
        """Pretend that a drafter left."""
        left = [d for d in self.described.drafters if d.drafter_id != drafter_id]
        self.change_info(drafters=tuple(left))

    async def info(self) -> VerifierInfo:
        await self._check()
        return replace(self.described, sessions=len(self.live))

    async def serve_sessions(self, connection: ServingConnection) -> None:
        serving = asyncio.create_task(super().serve_sessions(connection))
        broken = asyncio.create_task(self.lost.wait())
        self.streams.append(connection)
        try:
            await asyncio.wait((serving, broken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.streams.remove(connection)
            for task in (serving, broken):
                task.cancel()
            await asyncio.gather(serving, broken, return_exceptions=True)
        if self.lost.is_set():
            raise self._lost_error()

    async def drain(self, seconds: float) -> None:
        """Take no more sessions, and say so."""
        self.change_info(draining=True)
        for connection in self.streams:
            await connection.send(SessionsDraining(seconds))

    def restart(self) -> None:
        """Be there again, as another process."""
        self.lost.clear()
        self.hung = False
        self.change_info(draining=False, incarnation=f"{self.described.incarnation}+")

    async def run_session(self, spec: SessionSpec) -> AsyncGenerator[SessionEvent]:
        await self._check()
        self._admit(spec)
        stats, at = SpecStats(), 0
        try:
            ids = list(self.script(spec))[: spec.max_new_tokens]
            while True:
                await self._round()
                cached_tokens = self.cached(spec) if at == 0 else 0
                step = 1 if at == 0 else self.tokens_per_round
                tokens, reason = self._cut(ids[at : at + step], spec)
                at += len(tokens)
                if reason is None and at >= len(ids):
                    reason = FinishReason.LENGTH
                stats = self._count(stats, len(tokens), spec) if at > 1 else stats
                yield SessionEvent(
                    session_id=spec.session_id,
                    epoch=spec.epoch,
                    round_id=stats.rounds,
                    tokens=tuple(tokens),
                    finish_reason=reason,
                    stats=stats,
                    drafter_attached=self._drafted(spec),
                    logprobs=self.logprobs(spec, len(spec.token_ids) + at, tokens),
                    cached_tokens=cached_tokens,
                )
                if reason is not None:
                    return
        finally:
            if self.live.get(spec.session_id, spec).epoch == spec.epoch:
                self.live.pop(spec.session_id, None)

    def move_session(self, spec: SessionSpec, drafter_id: DrafterId | None) -> DrafterId | None:
        now = self.live.get(spec.session_id, spec)
        attached = drafter_id is None or any(
            d.drafter_id == drafter_id for d in self.described.drafters
        )
        if self.refuses_moves or not attached:
            return now.drafter_id
        self.moves.append((spec.session_id, drafter_id))
        self.live[spec.session_id] = replace(now, drafter_id=drafter_id)
        return drafter_id

    def _drafted(self, spec: SessionSpec) -> bool:
        drafter_id = self.live.get(spec.session_id, spec).drafter_id
        attached = any(d.drafter_id == drafter_id for d in self.described.drafters)
        return attached and self.drafters_alive

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        await self._check()

    async def close_session(self, session_id: SessionId) -> None:
        await self._check()

    async def exchange(self, connection: VerifierConnection) -> None:
        await connection.close()

    def _admit(self, spec: SessionSpec) -> None:
        old = self.live.get(spec.session_id)
        if old is not None and old.epoch >= spec.epoch:
            raise AlreadyExistsError("session is live")
        if self.described.draining:
            raise UnavailableError("the verifier is about to stop", reason="DRAINING")
        if self.refusals > 0:
            self.refusals -= 1
            raise ResourceExhaustedError("no blocks")
        self.specs.append(spec)
        self.live[spec.session_id] = spec

    async def _check(self) -> None:
        while self.hung:
            await asyncio.sleep(0.01)
        if self.lost.is_set():
            raise self._lost_error()

    async def _round(self) -> None:
        broken = asyncio.create_task(self.lost.wait())
        work = asyncio.create_task(self._work())
        try:
            await asyncio.wait((work, broken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            broken.cancel()
        # Whoever is dead says nothing; the stream ends.
        while self.hung or self.lost.is_set():
            await asyncio.sleep(0.01)

    async def _work(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        else:
            await asyncio.sleep(self.round_s)

    def _lost_error(self) -> OutriderError:
        return ConnectionLostError("verifier is gone", reason="PEER_LOST")

    def _cut(self, tokens: list[int], spec: SessionSpec) -> tuple[list[int], FinishReason | None]:
        for index, token in enumerate(tokens):
            if token in spec.stop_token_ids:
                return tokens[: index + 1], FinishReason.STOP_TOKEN
        return tokens, None

    def _count(self, stats: SpecStats, emitted: int, spec: SessionSpec) -> SpecStats:
        own = spec.drafter_id is None and spec.plan.method in self.described.in_process_methods
        attached = self._drafted(spec)
        drafted = spec.plan.is_speculative and (own or attached)
        return SpecStats(
            rounds=stats.rounds + 1,
            emitted=stats.emitted + emitted,
            proposed=stats.proposed + (spec.plan.draft_tokens if drafted else 0),
            accepted=stats.accepted + (emitted - 1 if drafted else 0),
            fallback_rounds=stats.fallback_rounds
            + (1 if spec.plan.is_speculative and not drafted else 0),
            accepted_per_depth=(stats.rounds + 1,) if drafted else stats.accepted_per_depth,
        )
