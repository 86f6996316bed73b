"""The life of a request: tokenize, admit, open a session, stream its text, free everything."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from outrider.errors import (
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OutriderError,
    UnavailableError,
)
from outrider.ids import RequestId, TenantId, VerifierId
from outrider.text.tokenizer import Tokenizer
from outrider.transport.base import Dialer
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateRequest,
    GenerateResult,
    PromptInfo,
    StreamEvent,
)
from outrider.wire.messages import VerifierInfo
from outrider_router.admission import no_verifier
from outrider_router.admission_queue import AdmissionQueue
from outrider_router.config import RouterConfig
from outrider_router.fleet import TokenizerIdentity
from outrider_router.journal import Entry, Journal
from outrider_router.metrics import RouterMetrics
from outrider_router.moving import Mover
from outrider_router.registry import Registry
from outrider_router.request import Job, make_job, tokenize
from outrider_router.serving import Serving
from outrider_router.tenants import SHARED

logger = logging.getLogger(__name__)


class RouterService:
    """Serves requests. Every way out of `stream` (finish, error, cancel, deadline) frees all."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        tokenizer: Tokenizer,
        dialer: Dialer,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        """`clock` is monotonic, in seconds."""
        self.config = config
        self.metrics = metrics
        self.journal = Journal()
        self.admission = AdmissionQueue(
            config, metrics, clock=clock, emitted=self.journal.num_emitted
        )
        self.registry = Registry(
            dialer=dialer,
            verifiers=config.verifiers,
            drafters=config.drafters,
            tokenizer=TokenizerIdentity(hash=tokenizer.hash, num_ids=tokenizer.num_ids),
            metrics=metrics,
            clock=clock,
            poll_interval_s=config.poll_interval_s,
            silence_s=config.silence_s,
            placed=self.journal.placed,
            on_verifier_up=self._on_verifier_up,
            on_verifier_lost=self._on_verifier_lost,
            on_drafters_changed=lambda: self.mover.wake(),
        )
        self.mover = Mover(
            self.journal, self.registry, metrics, clock=clock, interval_s=config.poll_interval_s
        )
        self.tokenizer = tokenizer
        self._clock = clock
        self.serving = Serving(
            journal=self.journal,
            admission=self.admission,
            registry=self.registry,
            mover=self.mover,
            tokenizer=tokenizer,
            metrics=metrics,
            clock=clock,
            failover_s=config.failover_s,
            max_failovers=config.max_failovers,
        )
        self._draining = False
        self._ready = False
        self.on_readiness: Callable[[bool], None] = lambda ready: None
        """Hears whether requests can be served: a verifier is healthy, and no drain began."""

    async def start(self) -> None:
        """Begin to look for verifiers and drafters."""
        self.registry.start()
        self.mover.start()

    async def close(self) -> None:
        """End every request with UnavailableError and stop."""
        self._draining = True
        for entry in self.journal:
            entry.fail(UnavailableError("the router is shutting down", reason="SHUTDOWN"))
        await self.mover.stop()
        await self.registry.stop()
        await self.serving.close()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; whether all of them ended."""
        self._draining = True
        self._note_readiness()
        end = self._clock() + timeout_s
        while len(self.journal) and self._clock() < end:
            await asyncio.sleep(0.05)
        return len(self.journal) == 0

    async def generate(
        self,
        request: GenerateRequest,
        *,
        timeout_s: float | None = None,
        tenant: TenantId = SHARED,
    ) -> GenerateResult:
        """Serve a request and answer once, at the end."""
        text: list[str] = []
        token_ids: list[int] = []
        info: PromptInfo | None = None
        finish: FinishInfo | None = None
        stream = self.stream(request, timeout_s=timeout_s, tenant=tenant)
        async with aclosing(stream) as events:
            async for event in events:
                match event:
                    case PromptInfo():
                        info = event
                    case Delta():
                        text.append(event.text)
                        token_ids.extend(event.token_ids)
                    case FinishInfo():
                        finish = event
        assert info is not None and finish is not None, "a stream without an error has both"
        return GenerateResult(
            request_id=info.request_id,
            model=info.model,
            text="".join(text),
            token_ids=tuple(token_ids),
            finish=finish,
        )

    async def stream(
        self,
        request: GenerateRequest,
        *,
        timeout_s: float | None = None,
        tenant: TenantId = SHARED,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Serve a tenant's request as a stream; close the generator to cancel it.

        Raises any error of `outrider.errors`; each is counted and logged with the request's id.
        """
        if self._draining:
            raise UnavailableError("the router is shutting down", reason="SHUTDOWN")
        entry = self._open(request.request_id)
        deadline = None if timeout_s is None else self._clock() + timeout_s
        timer = self._arm(entry, timeout_s)
        outcome = CancelledRequestError.code
        try:
            job = await self._make_job(request, tenant)
            async with aclosing(self.serving.events(entry, job, deadline)) as events:
                async for event in events:
                    if isinstance(event, FinishInfo):
                        outcome = event.reason.value
                    yield event
        except Exception as error:
            outcome = error.code if isinstance(error, OutriderError) else InternalError.code
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self.journal.close(entry)
            self._log_end(entry, outcome)

    def abort(self, request_ids: Iterable[RequestId]) -> tuple[RequestId, ...]:
        """Cancel requests by id; those that were queued or running."""
        aborted: list[RequestId] = []
        for request_id in dict.fromkeys(request_ids):
            entry = self.journal.get(request_id)
            if entry is not None and entry.ended is None:
                entry.fail(
                    CancelledRequestError(f"request {request_id!r} was aborted", reason="ABORTED")
                )
                aborted.append(request_id)
        return tuple(aborted)

    def _open(self, request_id: RequestId | None) -> Entry:
        if request_id == "":
            raise InvalidRequestError("request_id must not be empty", reason="INVALID_REQUEST_ID")
        new_id = request_id or RequestId(f"req-{secrets.token_hex(8)}")
        return self.journal.open(new_id, self._clock())

    def _arm(self, entry: Entry, timeout_s: float | None) -> asyncio.TimerHandle | None:
        if timeout_s is None:
            return None
        error = DeadlineExceededError("the deadline passed", reason="DEADLINE")
        return asyncio.get_running_loop().call_later(max(0.0, timeout_s), entry.fail, error)

    async def _make_job(self, request: GenerateRequest, tenant: TenantId) -> Job:
        info = self.registry.any_info()
        if info is None:
            raise no_verifier()
        job = make_job(
            request,
            await tokenize(request.prompt, self.tokenizer),
            info=info,
            tokenizer=self.tokenizer,
            config=self.config,
            seed=secrets.randbits(63),
            tenant=tenant,
        )
        if self.registry.any_info() is not None and not self.admission.could_fit(job.kv_tokens):
            raise InvalidRequestError(
                f"the request needs {job.kv_tokens} tokens of KV cache, more than any verifier has",
                reason="REQUEST_TOO_LARGE",
            )
        return job

    def _on_verifier_up(self, info: VerifierInfo) -> None:
        self.admission.saw_verifier(info)
        self._note_readiness()

    def _on_verifier_lost(self, verifier_id: VerifierId) -> None:
        self.admission.drop_verifier(verifier_id)
        self.serving.verifier_lost(verifier_id)
        self._note_readiness()

    def _note_readiness(self) -> None:
        ready = self.registry.any_info() is not None and not self._draining
        if ready is not self._ready:
            self._ready = ready
            self.on_readiness(ready)

    def _log_end(self, entry: Entry, outcome: str) -> None:
        duration_s = self._clock() - entry.started
        self.metrics.requests.labels(outcome).inc()
        self.metrics.request_duration.observe(duration_s)
        logger.info(
            "request ended",
            extra={
                "request_id": entry.request_id,
                "outcome": outcome,
                "tokens": len(entry.emitted),
                "duration_ms": round(duration_s * 1000, 1),
                "rounds": entry.tally.rounds,
                "fallback_rounds": entry.tally.fallback_rounds,
            },
        )
