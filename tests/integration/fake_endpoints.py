"""Endpoints without models, driven and observed through the transport alone.

Their behaviour is chosen by session id, so that one suite can run against an endpoint in this
process, in another one or in an actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from outrider.errors import (
    FailedPreconditionError,
    InvalidMessageError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
)
from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import DraftTree
from outrider.transport.interface import VerifierConnection
from outrider.wire.bundles import join_messages
from outrider.wire.codec import encode_verifier_message
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    AttachedDrafter,
    DrafterInfo,
    FeatureLayout,
    FinishReason,
    Hello,
    Proposal,
    Proposals,
    SessionEvent,
    SessionSpec,
    TensorDtype,
    Verdict,
    Verdicts,
    VerifierInfo,
    Welcome,
    WireTensor,
)
from tests.fakes.serving import ServesGenerators

VOCAB_SIZE = 1000
FEATURE_WIDTH = 256
DRAFTER = DrafterId("drafter-0")


def hello(vocab_size: int = VOCAB_SIZE) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        drafter_id=DRAFTER,
        incarnation="abc",
        vocab_size=vocab_size,
        tokenizer_hash="",
        methods=(DraftMethod.NGRAM,),
        feature_layout=FeatureLayout.NONE,
        feature_fingerprint="",
    )


BEHAVIOURS = (
    "echo",
    "quit",
    "bug",
    "sleep",
    "garbage",
    "flood",
    "together",
    "half garbage",
    "late",
    "features",
    "silent",
)
"""What a verifier does on proposals of the handle that is a behaviour's place here."""


def proposal(index: int, behaviour: str = "echo", argument: int = 0) -> Proposals:
    """A chain of four; the verifier echoes it. `argument` is for the behaviour."""
    draft = Proposal(
        handle=BEHAVIOURS.index(behaviour),
        prefix_digest=index,
        prefix_len=index + 1,
        tree=DraftTree(
            tokens=np.arange(index % 500, index % 500 + 4, dtype=np.int32),
            parents=np.arange(-1, 3, dtype=np.int32),
            logprobs=-np.arange(4, dtype=np.float32),
        ),
    )
    return Proposals.of_proposals([draft], draft_us=argument)


def features(rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Recognisable values of the shape [rows, FEATURE_WIDTH]."""
    return np.arange(rows * FEATURE_WIDTH, dtype=np.float32).reshape(rows, FEATURE_WIDTH)


def spec(session_id: str, max_new_tokens: int = 4) -> SessionSpec:
    return SessionSpec(
        session_id=SessionId(session_id),
        epoch=3,
        token_ids=(1, 2, 3),
        prompt_len=3,
        max_new_tokens=max_new_tokens,
        stop_token_ids=(2,),
        sampling=SamplingParams(temperature=0.5, seed=7),
        plan=SpeculationPlan(method=DraftMethod.NGRAM),
    )


class FakeVerifier(ServesGenerators):
    """Echoes proposals as verdicts; counts what it sees in its info.

    info(): sessions = open sessions, drafters = open exchanges, rounds_total = malformed messages,
    tokens_total = well-formed ones.
    """

    def __init__(self) -> None:
        self.exchanges = 0
        self.malformed = 0
        self.received = 0
        self.sessions: dict[str, asyncio.Event] = {}

    async def info(self) -> VerifierInfo:
        drafter = AttachedDrafter(
            drafter_id=DRAFTER, incarnation="abc", methods=(DraftMethod.NGRAM,), sessions=0
        )
        return VerifierInfo(
            protocol_version=PROTOCOL_VERSION,
            verifier_id=VerifierId("verifier-0"),
            incarnation="xyz",
            model_name="echo",
            vocab_size=VOCAB_SIZE,
            tokenizer_hash="",
            max_context_len=4096,
            kv_block_tokens=16,
            kv_total_blocks=256,
            kv_free_blocks=256,
            sessions=len(self.sessions),
            max_sessions=1024,
            drafters=(drafter,) * self.exchanges,
            rounds_total=self.malformed,
            tokens_total=self.received,
        )

    async def exchange(self, connection: VerifierConnection) -> None:
        self.exchanges += 1
        try:
            while True:
                try:
                    message = await connection.receive()
                except InvalidMessageError:
                    self.malformed += 1
                    continue
                self.received += 1
                if isinstance(message, Hello):
                    if message.vocab_size != VOCAB_SIZE:
                        raise FailedPreconditionError(
                            f"vocab_size must be {VOCAB_SIZE}, got {message.vocab_size}",
                            reason="VOCAB_MISMATCH",
                        )
                    await connection.send(
                        Welcome(
                            protocol_version=PROTOCOL_VERSION,
                            verifier_id=VerifierId("verifier-0"),
                            incarnation="xyz",
                        )
                    )
                elif isinstance(message, Proposals) and not await self._answer(connection, message):
                    return
        finally:
            self.exchanges -= 1

    async def _answer(self, connection: VerifierConnection, message: Proposals) -> bool:
        """Whether to go on with the exchange."""
        argument = message.draft_us
        match BEHAVIOURS[int(message.handles[0])]:
            case "quit":
                return False
            case "bug":
                raise RuntimeError("secret detail")
            case "sleep":
                await asyncio.sleep(argument / 1e6)
            case "garbage":
                frames: Any = connection
                await frames.inner.frames.send(b"\xff\xff garbage")
                await connection.send(echo(message))
            case "flood":
                for index in range(argument):
                    await connection.send(echo(proposal(index), rows=1024))
            case "together":
                verdicts = [echo(proposal(index), rows=16) for index in range(argument)]
                assert connection.try_send(*verdicts)
            case "half garbage":
                encoded = [encode_verifier_message(echo(proposal(index))) for index in range(5)]
                encoded[1], encoded[3] = b"\xff\xff garbage", b""
                (frame,) = join_messages(encoded)
                bundled: Any = connection
                await bundled.inner.frames.send(frame)
            case "late":
                await asyncio.sleep(argument / 1e6)
                await connection.send(echo(message))
            case "features":
                await connection.send(echo(message, rows=argument))
            case "silent":
                pass
            case _:
                await connection.send(echo(message))
        return True

    async def run_session(self, spec: SessionSpec) -> AsyncGenerator[SessionEvent]:
        name = spec.session_id.partition("-")[0]
        if name == "invalid":
            raise InvalidRequestError("max_new_tokens must be at most 4", reason="TOO_LONG")
        if name == "full":
            raise ResourceExhaustedError("no KV blocks", reason="KV_FULL", retry_after_s=1.5)
        if name == "bug":
            raise RuntimeError("secret detail")
        closed = self.sessions[spec.session_id] = asyncio.Event()
        try:
            for index in range(spec.max_new_tokens):
                last = index == spec.max_new_tokens - 1 and name == "count"
                yield event(spec, index, FinishReason.LENGTH if last else None)
                if name == "idle":
                    await closed.wait()
                    yield event(spec, index + 1, FinishReason.CANCELLED)
                    return
        finally:
            del self.sessions[spec.session_id]

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        if session_id not in self.sessions:
            raise NotFoundError(f"no session {session_id}", reason="NO_SESSION")

    async def close_session(self, session_id: SessionId) -> None:
        closed = self.sessions.get(session_id)
        if closed is not None:
            closed.set()


def event(spec: SessionSpec, index: int, reason: FinishReason | None) -> SessionEvent:
    return SessionEvent(
        session_id=spec.session_id,
        epoch=spec.epoch,
        round_id=index,
        tokens=(index, index + 1),
        finish_reason=reason,
    )


def echo(message: Proposals, rows: int = 0) -> Verdicts:
    (draft,) = message.iter_proposals()
    verdict = Verdict(
        handle=draft.handle,
        start=draft.prefix_len,
        tokens=draft.tree.tokens,
        prefix_digest=draft.prefix_digest,
        feature_start=0,
        features=WireTensor(dtype=TensorDtype.FLOAT32, data=features(rows)) if rows else None,
        draft_wanted=True,
    )
    return Verdicts.of_verdicts([verdict])


class FakeDrafter:
    """Remembers what it was attached to."""

    def __init__(self) -> None:
        self.verifiers: list[str] = []
        self.draining = False

    async def info(self) -> DrafterInfo:
        return DrafterInfo(
            protocol_version=PROTOCOL_VERSION,
            drafter_id=DRAFTER,
            incarnation="abc",
            vocab_size=VOCAB_SIZE,
            tokenizer_hash="",
            methods=(DraftMethod.NGRAM,),
            feature_layout=FeatureLayout.NONE,
            feature_fingerprint="",
            sessions=0,
            verifiers=tuple(self.verifiers),
            draining=self.draining,
        )

    async def attach(self, verifier_address: str) -> None:
        if verifier_address == "misfit":
            raise FailedPreconditionError("another vocabulary", reason="VOCAB_MISMATCH")
        if verifier_address not in self.verifiers:
            self.verifiers.append(verifier_address)

    async def detach(self, verifier_address: str) -> None:
        if verifier_address in self.verifiers:
            self.verifiers.remove(verifier_address)

    async def set_draining(self, draining: bool) -> None:
        self.draining = draining
