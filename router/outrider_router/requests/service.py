"""RouterService: the life of a request, from tokenizing and admission to stream and cleanup."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import partial

from outrider.errors import (
    AlreadyExistsError,
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    OutriderError,
    UnavailableError,
)
from outrider.ids import RequestId, VerifierId
from outrider.text.tokenizer import Tokenizer
from outrider.transport.interface import Dialer
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateRequest,
    GenerateResult,
    PromptInfo,
    StreamEvent,
    StreamPosition,
    TokenLogprobs,
)
from outrider.wire.messages import VerifierInfo
from outrider_router.admission.access_control import AccessControl, AccessGrant
from outrider_router.admission.queue import AdmissionQueue, ArrivalQueue
from outrider_router.admission.request_group import RequestGroup
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.metrics_history import (
    MetricsHistory,
    MetricsSample,
    VerifierTotals,
    make_sample,
)
from outrider_router.base.readiness import Readiness
from outrider_router.base.tenants import ANONYMOUS, Caller
from outrider_router.config import RouterConfig
from outrider_router.fleet.compatibility import TokenizerIdentity
from outrider_router.fleet.discovery import PeerDiscovery
from outrider_router.fleet.registry import PeerRegistry
from outrider_router.requests.drafter_rebalancer import DrafterRebalancer
from outrider_router.requests.intake import RequestIntake
from outrider_router.requests.parsed_answer import (
    AnswerParser,
    EventWriter,
    ParsedAnswer,
    parse_result,
    split_position,
)
from outrider_router.requests.request_accounting import log_request_end
from outrider_router.requests.request_run import RequestRunner
from outrider_router.requests.request_spans import describe_request
from outrider_router.requests.resumption.resumable_answers import ResumableAnswer
from outrider_router.requests.resumption.resumable_requests import RequestFactory, ResumableRequests
from outrider_router.requests.running_requests import (
    RequestEntry,
    RunningRequests,
    run_unless_failed,
)

logger = logging.getLogger(__name__)

OTHER_ROUTER_RETRY_S = 0.02
"""Retry hint in seconds of a router that shares its address with other routers and does not have
the requested answer. The next connection may reach the router that has it.
"""
RESTART_RETRY_S = 1.0
"""Retry hint in seconds of a router that is shutting down. By then another router, or this one
after a restart, may serve.
"""


class RouterService:
    """Serves requests. All resources of a request are released when `stream` ends, whether by a
    finish, an error, a cancellation or a deadline.
    """

    def __init__(
        self,
        *,
        config: RouterConfig,
        tokenizer: Tokenizer,
        dialer: Dialer,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        """Create a service that is not started. `clock` returns monotonic seconds. Raises
        NotFoundError or InvalidRequestError if the API key file is missing or invalid.
        """
        self.config = config
        self.metrics = metrics
        self.tokenizer = tokenizer
        self._clock = clock
        self.readiness = Readiness()
        self.access_control = AccessControl(config, metrics, clock=clock)
        self.arrivals = ArrivalQueue()
        """Queue of new requests of the gRPC and HTTP APIs, which admits one per iteration of the
        event loop.
        """
        self.running_requests = RunningRequests()
        self.admission = AdmissionQueue(
            config, metrics, clock=clock, emitted=self.running_requests.num_emitted
        )
        drafters_changed = asyncio.Event()
        self.registry = PeerRegistry(
            config,
            TokenizerIdentity(hash=tokenizer.hash, num_ids=tokenizer.num_ids),
            dialer,
            metrics,
            clock=clock,
            placed=self.running_requests.sessions_by_drafter,
            on_verifier_up=self._on_verifier_up,
            on_verifier_lost=self._on_verifier_lost,
            on_drafters_changed=drafters_changed.set,
        )
        self.discovery = PeerDiscovery(config, self.registry, close_channel=dialer.close_channel)
        self.mover = DrafterRebalancer(
            config,
            self.running_requests,
            self.registry,
            metrics,
            wakeup=drafters_changed,
            clock=clock,
        )
        self.resumables = ResumableRequests(
            config,
            self.running_requests,
            tokenizer,
            metrics,
            run=self._events,
            clock=clock,
            wall=time.time,
        )
        self._intake = RequestIntake(
            config,
            self.running_requests,
            tokenizer,
            access_control=self.access_control,
            admission=self.admission,
            registry=self.registry,
            clock=clock,
            on_failing=self.resumables.interrupt_answer,
        )
        self.serving = RequestRunner(
            config,
            tokenizer,
            metrics,
            admission=self.admission,
            registry=self.registry,
            rebalancer=self.mover,
            clock=clock,
            on_emitted=self.resumables.log_emitted,
        )
        self.history = MetricsHistory(self._sample_metrics)
        self._restored = False
        self._draining = False

    @property
    def is_draining(self) -> bool:
        """Whether the router is shutting down and refuses new requests."""
        return self._draining

    def restore_journal(self) -> None:
        """Restore the requests in the journal, so that their streams can be resumed. Idempotent.

        Raises FailedPreconditionError if another router uses the journal.
        """
        if not self._restored:
            self._restored = True
            self.resumables.open_log()

    async def start(self) -> None:
        """Start polling verifiers and drafters."""
        self.restore_journal()
        await asyncio.to_thread(self._intake.prepare)
        self.registry.start()
        self.discovery.start()
        self.mover.start()
        self.history.start()

    async def close(self) -> None:
        """End every request with UnavailableError and stop. Requests in the journal stay there."""
        self._draining = True
        self.resumables.prepare_close()
        for entry in self.running_requests:
            entry.fail_request(_stopping())
        await self.resumables.close()
        await self.history.stop()
        await self.mover.stop()
        await self.discovery.stop()
        await self.registry.stop()
        await self.serving.streams.close()
        self._intake.close()

    async def drain(self, timeout_s: float, enough: asyncio.Event | None = None) -> bool:
        """Refuse new requests, and wait until no request is left that a restart would lose.

        The wait ends after `timeout_s` seconds or when `enough` is set. Return whether no such
        request is left.
        """
        self._draining = True
        self._note_readiness()
        end = self._clock() + timeout_s
        while self._clock() < end and not all(
            map(self.resumables.survives_restart, self.running_requests)
        ):
            if enough is not None and enough.is_set():
                return False
            await asyncio.sleep(0.05)
        return all(map(self.resumables.survives_restart, self.running_requests))

    def _sample_metrics(self) -> MetricsSample:
        infos = {peer.address: peer.info for peer in self.registry.verifiers.values()}
        return make_sample(
            self.metrics,
            time_s=self._clock(),
            running=self.admission.num_running,
            waiting=self.admission.num_waiting,
            verifiers={
                address: VerifierTotals.of(info)
                for address, info in infos.items()
                if info is not None
            },
        )

    def check_accepting(self) -> None:
        """Raise UnavailableError if the router is shutting down and refuses new requests."""
        if self._draining:
            raise _stopping()

    async def generate(
        self,
        request: GenerateRequest,
        *,
        timeout_s: float | None = None,
        caller: Caller = ANONYMOUS,
        traceparent: str = "",
    ) -> GenerateResult:
        """Serve a request and return its whole output. A resumable request continues if the call is
        cancelled. Raises as `stream` does.
        """
        if request.resumable:
            answer = self.resumables.start_request(
                *self._open(request, timeout_s, caller, traceparent)
            )
            await answer.stream_from(StreamPosition(request_id=answer.entry.request_id), _nobody)
            assert answer.info is not None, "it ended without an error"
            return parse_result(answer.result(), answer.info.parsing)
        text: list[str] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        info: PromptInfo | None = None
        finish: FinishInfo | None = None
        stream = self.stream(request, timeout_s=timeout_s, caller=caller, traceparent=traceparent)
        async with aclosing(stream) as events:
            async for event in events:
                match event:
                    case PromptInfo():
                        info = event
                    case Delta():
                        text.append(event.text)
                        token_ids.extend(event.token_ids)
                        logprobs.extend(event.logprobs)
                    case FinishInfo():
                        finish = event
        assert info is not None and finish is not None, "a stream without an error has both"
        result = GenerateResult(
            request_id=info.request_id,
            model=info.model,
            text="".join(text),
            token_ids=tuple(token_ids),
            finish=finish,
            logprobs=tuple(logprobs),
            prompt_token_ids=info.prompt_token_ids,
        )
        return parse_result(result, info.parsing)

    async def stream(
        self,
        request: GenerateRequest,
        *,
        timeout_s: float | None = None,
        caller: Caller = ANONYMOUS,
        traceparent: str = "",
    ) -> AsyncGenerator[StreamEvent, None]:
        """Serve a request as a stream of unparsed text. Closing the generator aborts the request,
        even a resumable one.

        `traceparent` is the client's W3C Trace Context, or "". Raises any error of
        `outrider.errors`; each is counted and logged with the request's id.
        """
        opened = self._open(request, timeout_s, caller, traceparent)
        async with aclosing(self._events(*opened)) as events:
            async for event in events:
                yield event

    async def serve_request(
        self,
        request: GenerateRequest,
        write: EventWriter,
        *,
        timeout_s: float | None = None,
        caller: Caller = ANONYMOUS,
        traceparent: str = "",
        own_id: RequestId | None = None,
        passed: AccessGrant | None = None,
        group: RequestGroup | None = None,
    ) -> None:
        """Serve a request and pass its messages to `write`. Raises as `stream` does.

        Cancelling the call aborts the request. A resumable request instead continues without a
        client for `resume_grace_s`. `own_id` is the id of a request whose client chose none; by
        default an id is generated. `passed` is the grant of a request that access control has
        already admitted. `group` is the request group of the request.
        """
        opened = self._open(request, timeout_s, caller, traceparent, own_id, passed, group)
        write = ParsedAnswer(write)
        if request.resumable:
            answer = self.resumables.start_request(*opened)
            await answer.stream_from(StreamPosition(request_id=answer.entry.request_id), write)
            return
        async with aclosing(self._events(*opened)) as events:
            async for event in events:
                await write(event)

    def has_stream(self, request_id: RequestId, caller: Caller) -> bool:
        """Return whether a resumable request of the caller's tenant is running here or ended
        recently.
        """
        return self._find_answer(request_id, caller) is not None

    async def resume_stream(
        self,
        position: StreamPosition,
        write: EventWriter,
        caller: Caller = ANONYMOUS,
        *,
        is_forwarded: bool = False,
    ) -> None:
        """Send a client the rest of a resumable request of its tenant. With `is_forwarded` the call
        comes through another router, and is served even while this router drains: no other router
        has the request.

        Raises NotFoundError if there is no such request, InvalidRequestError for a position that
        the answer has not reached, and the request's own error. A client that listened before gets
        AbortedError.
        """
        if not is_forwarded:
            self.check_accepting()
        answer = self._find_answer(position.request_id, caller)
        if answer is None:
            # The error does not reveal whether another tenant has a request with this id.
            raise NotFoundError(
                f"no resumable request {position.request_id!r} is running or ended recently",
                reason="NO_STREAM",
                retry_after_s=OTHER_ROUTER_RETRY_S if self.config.reuse_ports else None,
            )
        self.metrics.resumed_streams.inc()
        position, has_ended = split_position(position)
        resume = None
        if position.tokens or position.characters:
            resume = partial(_resumed_parser, answer, position, has_ended=has_ended)
        await answer.stream_from(position, ParsedAnswer(write, resume))

    def abort_requests(
        self, request_ids: Iterable[RequestId], caller: Caller = ANONYMOUS
    ) -> tuple[RequestId, ...]:
        """Abort requests of the caller's tenant. Return the ids of those that were queued or
        running.
        """
        aborted: list[RequestId] = []
        for request_id in dict.fromkeys(request_ids):
            entry = self.running_requests.get_entry(request_id)
            own = entry is not None and entry.caller.tenant == caller.tenant
            if entry is not None and own and entry.lifecycle.error is None:
                entry.fail_request(
                    CancelledRequestError(f"request {request_id!r} was aborted", reason="ABORTED")
                )
                aborted.append(request_id)
        return tuple(aborted)

    async def _events(
        self, entry: RequestEntry, make: RequestFactory
    ) -> AsyncGenerator[StreamEvent, None]:
        """Validate and run a request, and yield its messages. All resources are released at the
        end.
        """
        timer = self._arm(entry)
        outcome: str = CancelledRequestError.code
        problem: Exception | None = None
        try:
            job = await run_unless_failed(entry, make)
            describe_request(entry.span, job)
            async with aclosing(self.serving.run_request(entry, job)) as events:
                async for event in events:
                    if isinstance(event, FinishInfo):
                        outcome = event.reason.value
                    yield event
        except Exception as error:
            outcome = error.code if isinstance(error, OutriderError) else InternalError.code
            problem = error
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self.running_requests.close_entry(entry)
            log_request_end(entry, outcome, problem, self.metrics, self._clock())

    def _open(
        self,
        request: GenerateRequest,
        timeout_s: float | None,
        caller: Caller,
        traceparent: str,
        own_id: RequestId | None = None,
        passed: AccessGrant | None = None,
        group: RequestGroup | None = None,
    ) -> tuple[RequestEntry, RequestFactory]:
        """Open the entry of a new request. Return it with the function that validates the
        request.
        """
        self.check_accepting()
        name = request.request_id or own_id
        if request.resumable:
            self._check_owner(name, caller)
        entry, allowed = self._intake.open_entry(
            request,
            name,
            timeout_s,
            caller,
            traceparent=traceparent,
            passed=passed,
            group=group,
        )
        return entry, partial(self._intake.validate_request, allowed, caller)

    def _find_answer(self, request_id: RequestId, caller: Caller) -> ResumableAnswer | None:
        """Return the answer of a request of the caller's tenant that is running or ended
        recently.
        """
        answer = self.resumables.get_answer(request_id)
        is_own = answer is not None and answer.entry.caller.tenant == caller.tenant
        return answer if is_own else None

    def _check_owner(self, name: RequestId | None, caller: Caller) -> None:
        """Raise AlreadyExistsError if `name` is the id of an answer of another tenant, which a
        resumable request with this id would replace.
        """
        answer = None if name is None else self.resumables.get_answer(name)
        if answer is not None and answer.entry.caller.tenant != caller.tenant:
            raise AlreadyExistsError(
                f"request {name!r} already exists; request ids must be unique",
                reason="REQUEST_EXISTS",
            )

    def _arm(self, entry: RequestEntry) -> asyncio.TimerHandle | None:
        if entry.deadline is None:
            return None
        error = DeadlineExceededError("the deadline of the request passed", reason="DEADLINE")
        left_s = max(0.0, entry.deadline - self._clock())
        return asyncio.get_running_loop().call_later(left_s, entry.fail_request, error)

    def _on_verifier_up(self, info: VerifierInfo) -> None:
        self.admission.update_verifier(info)
        self._note_readiness()

    def _on_verifier_lost(self, verifier_id: VerifierId) -> None:
        self.admission.drop_verifier(verifier_id)
        self.serving.streams.drop_verifier(verifier_id)
        self._note_readiness()

    def _note_readiness(self) -> None:
        self.readiness.update(self.registry.any_verifier_info() is not None and not self._draining)


def _resumed_parser(
    answer: ResumableAnswer, position: StreamPosition, *, has_ended: bool
) -> AnswerParser | None:
    """Return the parser of an answer from a client's position on; None if it is not parsed."""
    if answer.info is None or answer.info.parsing is None:
        return None
    parser = AnswerParser(answer.info.request_id, answer.info.parsing)
    parser.skip_text(answer.text[: position.characters], has_ended=has_ended)
    return parser


async def _nobody(_event: StreamEvent) -> None:
    """Ignore a message, because the client gets the whole answer at the end."""


def _stopping() -> UnavailableError:
    return UnavailableError(
        "the router is shutting down", reason="SHUTDOWN", retry_after_s=RESTART_RETRY_S
    )
