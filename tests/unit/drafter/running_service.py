"""A drafter service over the in-process transport, beside a scripted verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider_drafter.config import DrafterConfig, ReconnectConfig
from outrider_drafter.proposers.interface import Proposer
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.service import DrafterService, TargetIdentity

from outrider.spec.plan import DraftMethod
from outrider.transport.in_process import InprocNetwork
from tests.fakes.scripted_verifier import ScriptedVerifier
from tests.unit.drafter.helpers import VOCAB

ADDRESS = "verifier"
FAST = ReconnectConfig(
    min_backoff_s=0.01, max_backoff_s=0.05, handshake_timeout_s=0.3, attach_wait_s=2.0
)


@asynccontextmanager
async def running(
    *sources: Proposer,
    verifier: ScriptedVerifier | None = None,
    max_sessions: int = 64,
    max_unsent_batches: int = 1024,
) -> AsyncIterator[tuple[DrafterService, ScriptedVerifier, InprocNetwork]]:
    """A service over the given sources, or prompt lookup; its verifier is at ADDRESS."""
    network = InprocNetwork(encoded=True)
    verifier = verifier or ScriptedVerifier()
    network.serve_verifier(ADDRESS, verifier)
    config = DrafterConfig(
        drafter_id="d1",
        methods=(DraftMethod.NGRAM,),
        max_sessions=max_sessions,
        max_unsent_batches=max_unsent_batches,
        reconnect=FAST,
    )
    service = DrafterService(
        config,
        sources or (NgramProposer(min_match=1),),
        network.dialer(),
        identity=TargetIdentity(vocab_size=VOCAB, tokenizer_hash="abc"),
    )
    try:
        yield service, verifier, network
    finally:
        await service.close()
        await network.remove(ADDRESS)
