"""Request runner: serves all requests of a router, and moves their sessions off verifiers that are
about to stop."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from outrider.ids import SessionId
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import Delta, FinishInfo, StreamEvent
from outrider_router.admission.queue import AdmissionQueue
from outrider_router.base.metrics import RouterMetrics
from outrider_router.config import RouterConfig
from outrider_router.fleet.peers import VerifierPeer
from outrider_router.fleet.registry import PeerRegistry
from outrider_router.requests.drafter_rebalancer import DrafterRebalancer
from outrider_router.requests.request import ValidatedRequest
from outrider_router.requests.request_run import RequestRun, RunContext
from outrider_router.requests.resumption.log_records import EmittedRow
from outrider_router.requests.running_requests import RequestEntry
from outrider_router.requests.verifier_streams import VerifierStreams

logger = logging.getLogger(__name__)


class RequestRunner:
    """Runs requests on the sessions that they need; one for each router."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        *,
        admission: AdmissionQueue,
        registry: PeerRegistry,
        rebalancer: DrafterRebalancer,
        clock: Callable[[], float],
        on_emitted: Callable[[list[EmittedRow]], None],
    ) -> None:
        """`on_emitted` logs ids of entries with a number, before anybody is told of them."""
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        self._numbers = itertools.count()
        self._incarnation = secrets.token_hex(6)
        self.streams = VerifierStreams(
            metrics,
            registry=registry,
            rebalancer=rebalancer,
            clock=clock,
            on_emitted=on_emitted,
            on_draining=self._on_draining,
        )
        self._context = RunContext(
            admission=admission,
            registry=registry,
            rebalancer=rebalancer,
            streams=self.streams,
            tokenizer=tokenizer,
            metrics=metrics,
            clock=clock,
            failover_timeout_s=config.failover_timeout_s,
            max_failovers=config.max_failovers,
        )
        self._runs: set[RequestRun] = set()

    async def run_request(
        self, entry: RequestEntry, job: ValidatedRequest
    ) -> AsyncGenerator[StreamEvent, None]:
        """What the client of a request hears; closing it frees all that the request holds.

        An entry that has emitted tokens or was restored (its router ended) goes on behind them: the
        client hears of all of them first, from PromptInfo on.
        """
        number = next(self._numbers)
        session_id = SessionId(f"{self._incarnation}-{number}")
        run = RequestRun(self._context, entry, job, sequence=number, session_id=session_id)
        self._runs.add(run)
        finish: FinishInfo | None = None
        try:
            async with aclosing(run.stream_messages()) as messages:
                async for message in messages:
                    if isinstance(message, FinishInfo):
                        finish = message
                    else:
                        if isinstance(message, Delta):
                            self._metrics.generation_tokens.inc(len(message.token_ids))
                        yield message
        finally:
            self._runs.discard(run)
            run.free()
        assert finish is not None, "a request that ends without an error ends with a finish"
        # Last, so that whoever hears of the end finds everything freed.
        yield finish

    def _on_draining(self, peer: VerifierPeer, seconds: float) -> None:
        """A verifier stops in so many seconds: its sessions leave it as others have capacity."""
        logger.info("verifier drains", extra={"address": peer.address, "seconds": seconds})
        self._registry.mark_verifier_draining(peer)
        until = self._clock() + max(0.0, seconds)
        for run in self._runs:
            run.relocate(peer, until)
