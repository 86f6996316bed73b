"""Verifier without a model for `outrider bench events`: every round emits tokens for every session.

It prints {"event": "ready", "address": HOST:PORT}, like a real verifier.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

import numpy as np

from outrider.errors import InvalidMessageError, UnavailableError
from outrider.ids import SessionId, VerifierId
from outrider.process_tuning import run_event_loop
from outrider.spec.plan import SpeculationPlan
from outrider.text.tokenizer import tokenizer_hash
from outrider.transport.grpc import GrpcConfig, GrpcServer, verifier_services
from outrider.transport.interface import RouterConnection, ServingConnection, VerifierConnection
from outrider.transport.session_stream import SessionIteratorMixin
from outrider.wire.messages import (
    PROTOCOL_VERSION,
    REASON_CODES,
    FinishReason,
    SessionEvents,
    SessionLeave,
    SessionOpen,
    VerifierInfo,
)

MAX_SESSIONS = 4096
FIRST_ID, LAST_ID = 1000, 9000
"""First and last id of the range from which tokens are emitted. In most vocabularies these ids are
ordinary words."""


class ScriptedVerifier(SessionIteratorMixin):
    """Verifier without a model that runs a round every `interval_s` seconds. A round emits `tokens`
    token ids for each session."""

    def __init__(self, *, interval_s: float, tokens: int, tokenizer: str, vocab_size: int) -> None:
        self._interval_s, self._tokens = interval_s, tokens
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._left: dict[int, int] = {}
        """Number of tokens that each session has yet to emit, indexed by the session's handle."""

    async def info(self) -> VerifierInfo:
        """Return the identity and the capacity of the verifier."""
        return VerifierInfo(
            protocol_version=PROTOCOL_VERSION,
            verifier_id=VerifierId("scripted"),
            incarnation="1",
            model_name="scripted",
            vocab_size=self._vocab_size,
            tokenizer_hash=self._tokenizer,
            max_context_len=1 << 20,
            kv_block_tokens=1 << 20,
            kv_total_blocks=MAX_SESSIONS,
            kv_free_blocks=MAX_SESSIONS - len(self._left),
            sessions=len(self._left),
            max_sessions=MAX_SESSIONS,
            drafters=(),
        )

    async def serve_sessions(self, connection: ServingConnection) -> None:
        """Serve one router until it disconnects."""
        emitting = asyncio.create_task(self._emit_all(connection))
        try:
            while True:
                try:
                    message = await connection.receive()
                except InvalidMessageError:
                    continue
                if isinstance(message, SessionOpen):
                    self._left[message.handle] = message.spec.max_new_tokens
                elif isinstance(message, SessionLeave):
                    self._left.pop(message.handle, None)
        finally:
            emitting.cancel()
            self._left.clear()

    async def _emit_all(self, connection: ServingConnection) -> None:
        due, number = time.monotonic(), 1
        while True:
            # A router that could not keep up is not made to catch up.
            due = max(due + self._interval_s, time.monotonic() - 0.1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            handles = list(self._left)
            if handles:
                await connection.send(self._round(handles, number))
                number += 1

    def _round(self, handles: list[int], number: int) -> SessionEvents:
        left = np.array([self._left[handle] for handle in handles])
        counts = np.minimum(left, self._tokens).astype(np.uint32)
        for handle, after in zip(handles, (left - counts).tolist(), strict=True):
            if after:
                self._left[handle] = after
            else:
                del self._left[handle]
        reasons = np.where(left == counts, REASON_CODES[FinishReason.LENGTH], 0).astype(np.uint8)
        total = int(counts.sum())
        return SessionEvents(
            handles=np.array(handles, np.uint32),
            round_ids=np.full(len(handles), number, np.uint32),
            counts=counts,
            tokens=(FIRST_ID + (np.arange(total) * 7 + number) % (LAST_ID - FIRST_ID)).astype(
                np.int32
            ),
            finish_reasons=reasons,
            flags=np.zeros(len(handles), np.uint8),
            proposed=counts.astype(np.uint16),
            accepted=(counts - 1).astype(np.uint16),
        )

    async def sessions(self) -> RouterConnection:
        """Raise UnavailableError, because this verifier serves only routers."""
        raise UnavailableError("only routers are served", reason="UNIMPLEMENTED")

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        """Ignore the plan, because no drafts are verified."""

    async def close_session(self, session_id: SessionId) -> None:
        """Do nothing, because routers close their sessions by a message (see `serve_sessions`)."""

    async def exchange(self, connection: VerifierConnection) -> None:
        """Close the connection, because this verifier does not serve drafters."""
        await connection.close()


async def serve(args: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    verifier = ScriptedVerifier(
        interval_s=args.interval,
        tokens=args.tokens,
        tokenizer=tokenizer_hash(args.model),
        vocab_size=args.vocab_size,
    )
    server = GrpcServer(args.listen, verifier_services(verifier, GrpcConfig(shm_channels=True)))
    address = await server.start()
    sys.stdout.write(json.dumps({"event": "ready", "address": address}) + "\n")
    sys.stdout.flush()
    await server.wait_for_termination()


def main() -> None:
    """Run the verifier process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    run_event_loop(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
