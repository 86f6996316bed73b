"""Request runner: serves a request to its end, on one verifier session or several.

A session that is lost, refused or drained is followed by another one, which begins with all tokens
that the request has emitted, in the next epoch and with the same seed, so that the text continues
unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from outrider.errors import OutriderError, UnavailableError
from outrider.ids import DrafterId, SessionId
from outrider.text.tokenizer import Tokenizer
from outrider.transport.session_stream import OpenedSession
from outrider.wire.inference import Delta, FinishInfo, PromptInfo, StreamEvent
from outrider.wire.messages import FinishReason, SessionSpec, VerifierInfo
from outrider_router.admission.capacity_ledger import CapacityReservation
from outrider_router.admission.policy import NO_VERIFIER
from outrider_router.admission.queue import AdmissionQueue
from outrider_router.admission.wait_order import AdmissionRequest
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.reasons import FailoverCause
from outrider_router.config import RouterConfig
from outrider_router.fleet.peers import VerifierPeer
from outrider_router.fleet.registry import PeerRegistry
from outrider_router.requests.drafter_rebalancer import DrafterRebalancer
from outrider_router.requests.failover import (
    DRAINING,
    FINAL_REASONS,
    RequestHistory,
    failover_cause,
    implied_finish,
    incomplete_error,
    pause_s,
    should_retry,
)
from outrider_router.requests.log_records import EmittedRow
from outrider_router.requests.request import ValidatedRequest
from outrider_router.requests.request_options import needs_no_drafter, plan_for_verifier
from outrider_router.requests.request_spans import queue_span, start_session_span
from outrider_router.requests.running_requests import RequestEntry, RunningRequests
from outrider_router.requests.session_output import (
    ClientReply,
    SessionFeed,
    session_messages,
    verifier_lost_error,
)
from outrider_router.requests.stop_checker import StopChecker
from outrider_router.requests.verifier_streams import VerifierStreams


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A request, the session that serves it now, and its history."""

    entry: RequestEntry
    job: ValidatedRequest
    admission_request: AdmissionRequest
    reply: ClientReply
    session_id: SessionId
    stop_checker: StopChecker | None = None
    """The search for its stop strings, over all of its sessions; None: it has none."""
    has_sent_prompt_info: bool = False
    """Whether the client has heard of its prompt."""
    cause: FailoverCause | None = None
    """What became of the session before; None: there was none."""
    losses: int = 0
    refusals: int = 0
    stuck_since: float | None = None
    """Clock time since which it has lost sessions and emitted nothing, seconds."""
    emitted_before: int = 0
    """Tokens that were emitted when its session was opened."""
    reservation: CapacityReservation | None = None
    next_reservation: CapacityReservation | None = None
    """Reservation on another verifier, for a session whose verifier is about to stop."""
    peer: VerifierPeer | None = None
    """Where its session is."""
    session_feed: SessionFeed | None = None
    opened: OpenedSession | None = None
    """Its session on the verifier's stream."""
    relocation: asyncio.Task[None] | None = None
    """Task that waits for `next_reservation`."""

    @property
    def prompt_info(self) -> PromptInfo:
        """What the client hears first."""
        return self.job.prompt_info(self.entry.request_id)

    @property
    def implied_finish(self) -> FinishReason | None:
        """The end that its text has come to, although nobody said so."""
        if self.stop_checker is not None and self.stop_checker.is_stopped:
            return FinishReason.STOP_STRING
        return implied_finish(
            self.entry.emitted,
            stop_ids=self.job.stop_ids,
            max_new_tokens=self.job.max_new_tokens,
        )


logger = logging.getLogger(__name__)


class RequestRunner:
    """Places requests, opens their sessions and reads what these emit; one for each router."""

    def __init__(
        self,
        config: RouterConfig,
        running_requests: RunningRequests,
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
        self._running_requests = running_requests
        self._admission = admission
        self._registry = registry
        self._rebalancer = rebalancer
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._failover_s = config.failover_timeout_s
        self._max_failovers = config.max_failovers
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
        self._open: set[RequestState] = set()
        """Requests that have a session."""

    async def run_request(
        self, entry: RequestEntry, job: ValidatedRequest, deadline: float | None
    ) -> AsyncGenerator[StreamEvent, None]:
        """What the client of a request hears; closing it frees all that the request holds.

        An entry that has emitted tokens or is of a later epoch already (its router ended) goes on
        behind them: the client hears of all of them first, from PromptInfo on.
        """
        request_run = self._request_run(entry, job, deadline)
        finish: FinishInfo | None = None
        try:
            async with aclosing(self._messages(request_run)) as messages:
                async for message in messages:
                    if isinstance(message, FinishInfo):
                        finish = message
                    else:
                        if isinstance(message, Delta):
                            self._metrics.generation_tokens.inc(len(message.token_ids))
                        yield message
        finally:
            self._free(request_run)
        assert finish is not None, "a request that ends without an error ends with a finish"
        # Last, so that whoever hears of the end finds everything freed.
        yield finish

    def _request_run(
        self, entry: RequestEntry, job: ValidatedRequest, deadline: float | None
    ) -> RequestState:
        number = next(self._numbers)
        entry.top_logprobs, entry.max_new_tokens = job.top_logprobs, job.max_new_tokens
        return RequestState(
            entry=entry,
            job=job,
            admission_request=AdmissionRequest(
                request_id=entry.request_id,
                kv_tokens=job.kv_tokens,
                prompt_tokens=len(job.prompt_ids),
                max_new_tokens=job.max_new_tokens,
                sequence=number,
                priority=job.priority,
                deadline=deadline,
                tenant=job.tenant,
                is_client_named=job.is_client_named,
            ),
            reply=ClientReply(
                entry,
                job.make_assembler(self._tokenizer),
                prompt_tokens=len(job.prompt_ids),
            ),
            session_id=SessionId(f"{self._incarnation}-{number}"),
            stop_checker=self._stop_checker(entry, job),
            cause=FailoverCause.ROUTER_LOST if entry.emitted or entry.epoch else None,
        )

    def _stop_checker(self, entry: RequestEntry, job: ValidatedRequest) -> StopChecker | None:
        """The search for the request's stop strings, behind what the entry has emitted; ids behind
        a stop that is among these are dropped from it."""
        checker, ids = job.stop_checker(self._tokenizer), entry.emitted
        if checker is not None and ids:
            kept = checker.count_tokens(ids, last_is_stop=ids[-1] in job.stop_ids)
            del ids[kept:], entry.logprobs[kept:]
        return checker

    async def _messages(self, request_run: RequestState) -> AsyncGenerator[StreamEvent, None]:
        reply = request_run.reply
        if request_run.cause is not None:
            request_run.stuck_since = self._clock()
            yield request_run.prompt_info
            for known in reply.catch_up(request_run.implied_finish):
                yield known
            request_run.has_sent_prompt_info = True
        placed = request_run.cause is not None
        while not reply.ended:
            await self._admit(request_run)
            if not placed:
                placed = True
                self._metrics.prompt_tokens.inc(len(request_run.job.prompt_ids))
                self._metrics.request_prompt_tokens.observe_values(len(request_run.job.prompt_ids))
                self._metrics.queue_time.observe_values(
                    self._clock() - request_run.entry.arrived_at
                )
            try:
                async with aclosing(self._session(request_run)) as messages:
                    async for message in messages:
                        yield message
            except OutriderError as error:
                self._judge(request_run, error)
                # What came after the reader last looked, and an end that nobody could tell of.
                for known in reply.catch_up(request_run.implied_finish):
                    yield known

    # ---- reservations --------------------------------------------------------------------------

    async def _admit(self, request_run: RequestState) -> None:
        """Wait for a reservation.

        Raises what admission raises; an error that says so where part of the answer was emitted.
        """
        request_run.reservation, request_run.next_reservation = request_run.next_reservation, None
        if request_run.reservation is not None:
            return
        entry, admission_request = request_run.entry, request_run.admission_request
        if request_run.cause is not None:
            await self._pause(entry, pause_s(request_run.losses))
            since = self._clock() if request_run.stuck_since is None else request_run.stuck_since
            admission_request = replace(admission_request, waits_until=since + self._failover_s)
        try:
            request_run.reservation = await self._acquire(entry, admission_request)
        except UnavailableError as error:
            if error.reason == NO_VERIFIER and request_run.cause is not None and entry.emitted:
                raise incomplete_error(request_run.cause, self._past(request_run)) from error
            raise

    async def _acquire(
        self, entry: RequestEntry, admission_request: AdmissionRequest
    ) -> CapacityReservation:
        if entry.end_error is not None:
            raise entry.end_error
        entry.on_fail = lambda error: self._admission.fail_request(entry.request_id, error)
        try:
            with queue_span(entry, admission_request.priority) as span:
                reservation = await self._admission.reserve_capacity(admission_request, entry.group)
                span.set_attributes({"outrider.verifier": reservation.verifier_id})
                return reservation
        finally:
            entry.on_fail = None

    async def _pause(self, entry: RequestEntry, seconds: float) -> None:
        """Let some time pass, unless the request ends first."""
        if seconds <= 0 or entry.end_error is not None:
            return
        ended = asyncio.Event()
        entry.on_fail = lambda _error: ended.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ended.wait()
        entry.on_fail = None

    def _finish_session(self, request_run: RequestState, reason: FinishReason) -> None:
        """A session has come to its end, before a slow client has heard of it. At a stop string it
        is ended here: the verifier knows nothing of these."""
        if reason is FinishReason.STOP_STRING and request_run.opened is not None:
            request_run.opened.leave_session()
        self._give_back(request_run)

    def _give_back(self, request_run: RequestState) -> None:
        """End the reservation of a session that has ended, before a slow client has heard of it."""
        if request_run.reservation is not None:
            self._admission.release_capacity(request_run.reservation)
            request_run.reservation = None

    def _interrupt(
        self,
        request_run: RequestState,
        feed: SessionFeed,
        opened: OpenedSession,
        _error: OutriderError,
    ) -> None:
        """The request ends, and its session with it, before a slow client has heard of it."""
        opened.leave_session()
        self._give_back(request_run)
        feed.wake_reader()

    def _free(self, request_run: RequestState) -> None:
        """Give back what a request holds that is over."""
        for reservation in (request_run.reservation, request_run.next_reservation):
            if reservation is not None:
                self._admission.release_capacity(reservation)
        self._admission.remove_request(request_run.entry.request_id)

    # ---- what becomes of it --------------------------------------------------------------------

    def _judge(self, request_run: RequestState, error: OutriderError) -> None:
        """A session has ended with an error; raises unless the request goes on in another."""
        entry, now = request_run.entry, self._clock()
        if entry.end_error is not None:
            raise error
        cause = failover_cause(error)
        request_run.refusals += cause is FailoverCause.REFUSED
        request_run.losses += cause in (FailoverCause.VERIFIER_LOST, FailoverCause.FAILED)
        if request_run.stuck_since is None or len(entry.emitted) > request_run.emitted_before:
            # A verifier that hung had kept the client waiting before it was given up.
            request_run.stuck_since = now - (
                0.0 if request_run.peer is None else request_run.peer.stalled_s
            )
        past = self._past(request_run)
        if cause is None or not should_retry(cause, past, max_failovers=self._max_failovers):
            if cause is FailoverCause.VERIFIER_LOST or cause is FailoverCause.DRAINING:
                raise incomplete_error(cause, past) from error
            raise error
        if cause is not FailoverCause.REFUSED:
            self._metrics.failovers.inc()
            entry.span.event("session_lost", {"outrider.cause": cause.value})
            logger.warning(
                "request has lost its session",
                extra={
                    **entry.log_ids,
                    "cause": cause.value,
                    "problem": error.message,
                    "tokens": len(entry.emitted),
                },
            )
        request_run.cause = cause
        if request_run.reservation is not None:
            self._admission.release_capacity(
                request_run.reservation, refused=cause is FailoverCause.REFUSED
            )
            request_run.reservation = None

    def _past(self, request_run: RequestState) -> RequestHistory:
        reservation, since = request_run.reservation, request_run.stuck_since
        return RequestHistory(
            losses=request_run.losses,
            refusals=request_run.refusals,
            emitted=len(request_run.entry.emitted),
            is_alone=reservation is not None
            and self._admission.sessions_on(reservation.verifier_id) <= 1,
            is_in_time=since is None or self._clock() < since + self._failover_s,
        )

    # ---- sessions ------------------------------------------------------------------------------

    async def _session(self, request_run: RequestState) -> AsyncGenerator[StreamEvent, None]:
        entry, reservation = request_run.entry, request_run.reservation
        assert reservation is not None, "a session needs a reservation"
        peer = self._registry.healthy_verifier(reservation.verifier_id)
        if peer is None or peer.info is None or peer.control is None:
            raise verifier_lost_error(reservation.verifier_id)
        feed = SessionFeed(
            entry,
            self.streams.pacer,
            partial(self._finish_session, request_run),
            end=lambda: request_run.implied_finish,
            stop_checker=request_run.stop_checker,
        )
        spec = self._spec(
            request_run, peer.info, partial(self._rebalancer.choose_drafter, peer, entry)
        )
        span, spec = start_session_span(entry, spec)
        opened = self.streams.get_stream(peer).open_session(spec, feed)
        entry.on_fail = partial(self._interrupt, request_run, feed, opened)
        entry.move = opened.request_drafter
        request_run.peer, request_run.session_feed, request_run.opened = peer, feed, opened
        peer.open_sessions += 1
        self._open.add(request_run)
        incarnation = peer.info.incarnation
        try:
            with span:
                if not request_run.has_sent_prompt_info:
                    # Once the session is on its way: the verifier need not wait for the client.
                    request_run.has_sent_prompt_info = True
                    yield request_run.prompt_info
                async with aclosing(session_messages(feed, request_run.reply)) as messages:
                    async for message in messages:
                        yield message
        finally:
            # Nothing that is said of this session from here on reaches the entry.
            opened.leave_session()
            feed.detach_reader()
            entry.leave_session()
            peer.open_sessions -= 1
            self._open.discard(request_run)
            await self._stay(request_run)
            if feed.error is not None and peer.info.incarnation == incarnation:
                self._doubt(peer, feed.error)

    def _spec(
        self, request_run: RequestState, info: VerifierInfo, choose: Callable[[], DrafterId | None]
    ) -> SessionSpec:
        """The request's next session, on the verifier that said `info`."""
        entry, job = request_run.entry, request_run.job
        entry.verifier_id, entry.drafter_attached = info.verifier_id, False
        entry.vocab_size = info.vocab_size
        plan = plan_for_verifier(job.plan, info)
        if plan.is_speculative and not needs_no_drafter(plan, info):
            entry.method, entry.prompt_tokens = plan.method, len(job.prompt_ids)
            entry.drafter_id = choose()
        request_run.emitted_before = len(entry.emitted)
        if request_run.cause is not None:
            entry.epoch += 1
            self._metrics.resumed_sessions.labels(request_run.cause.value).inc()
        entry.session_id = request_run.session_id
        return job.session_spec(
            request_run.session_id, entry.epoch, entry.drafter_id, plan, entry.emitted
        )

    def _doubt(self, peer: VerifierPeer, error: OutriderError) -> None:
        """Let nothing be placed on a verifier whose sessions end with such an error."""
        if error.reason == DRAINING:
            self._registry.mark_verifier_draining(peer)
        elif error.reason in FINAL_REASONS:
            self._registry.mark_verifier_lost(peer, error.message)

    # ---- draining verifiers --------------------------------------------------------------------

    def _on_draining(self, peer: VerifierPeer, seconds: float) -> None:
        """A verifier stops in so many seconds: its sessions leave it as others have room."""
        logger.info("verifier drains", extra={"address": peer.address, "seconds": seconds})
        self._registry.mark_verifier_draining(peer)
        until = self._clock() + max(0.0, seconds)
        for request_run in self._open:
            if request_run.peer is peer and request_run.relocation is None:
                request_run.relocation = asyncio.create_task(self._move_away(request_run, until))

    async def _move_away(self, request_run: RequestState, until: float) -> None:
        """Wait for a reservation on another verifier, then end the session on this one."""
        admission_request = replace(request_run.admission_request, waits_until=until)
        with contextlib.suppress(OutriderError):
            request_run.next_reservation = await self._admission.reserve_capacity(admission_request)
            assert request_run.session_feed is not None
            request_run.session_feed.fail_session(
                UnavailableError("the verifier is about to stop", reason=DRAINING)
            )

    async def _stay(self, request_run: RequestState) -> None:
        """Stop waiting for a reservation on another verifier; one that was made is kept."""
        moving, request_run.relocation = request_run.relocation, None
        if moving is not None:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
