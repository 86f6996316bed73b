"""Request run: serves one request to its end, on one or several verifier sessions.

A session that is lost, refused or drained is followed by another one. The new session starts from
all tokens that the request has emitted, in the next epoch and with the same seed, so that the text
continues unchanged. `RequestRunner` runs all requests of a router, and moves their sessions off
verifiers that are about to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from outrider.errors import OutriderError, UnavailableError
from outrider.ids import SessionId
from outrider.spans import RequestSpan
from outrider.spec.plan import SpeculationPlan
from outrider.text.tokenizer import Tokenizer
from outrider.transport.session_stream import OpenedSession
from outrider.wire.inference import Delta, FinishInfo, StreamEvent
from outrider.wire.messages import FinishReason, SessionSpec, VerifierInfo
from outrider_router.admission.capacity_ledger import CapacityReservation
from outrider_router.admission.policy import NO_VERIFIER, AdmissionRequest
from outrider_router.admission.queue import AdmissionQueue
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
from outrider_router.requests.request import ValidatedRequest, needs_no_drafter, plan_for_verifier
from outrider_router.requests.request_output import ClientReply, OutputLimits, StopChecker
from outrider_router.requests.request_spans import queue_span, start_session_span
from outrider_router.requests.resumption.log_records import EmittedRow
from outrider_router.requests.running_requests import (
    DrafterAttachment,
    RequestEntry,
    RequestPhase,
    RequestSession,
)
from outrider_router.requests.session_output import (
    SessionFeed,
    VerifierStreams,
    session_messages,
    verifier_lost_error,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext:
    """Parts of the router that requests use while they run, shared by all requests."""

    admission: AdmissionQueue
    registry: PeerRegistry
    rebalancer: DrafterRebalancer
    streams: VerifierStreams
    tokenizer: Tokenizer
    metrics: RouterMetrics
    clock: Callable[[], float]
    """Monotonic clock, in seconds."""
    failover_timeout_s: float
    max_failovers: int


@dataclass(slots=True, kw_only=True)
class FailoverRecord:
    """Sessions that one request has had, and how they ended."""

    cause: FailoverCause | None = None
    """Reason for which the request needs another session; None if it has lost none."""
    epoch: int = 0
    """Epoch of the newest session; a session that replaces a lost one has a higher epoch."""
    stuck_since: float | None = None
    """Clock time in seconds since which the request has been losing sessions without emitting
    tokens; None if it has lost none.
    """
    losses: int = 0
    """Number of sessions that were lost or failed."""
    refusals: int = 0
    """Number of sessions that verifiers refused for lack of capacity."""
    emitted_before: int = 0
    """Number of tokens that were emitted before the newest session was opened."""

    def record_session(self, num_emitted: int) -> None:
        """Record that a session is opened after `num_emitted` tokens."""
        self.emitted_before = num_emitted
        if self.cause is not None:
            self.epoch += 1

    def record_error(self, cause: FailoverCause | None, num_emitted: int, since: float) -> None:
        """Record that a session ended with an error after `num_emitted` tokens.

        `since` is the clock time in seconds at which the client last got something. If the session
        emitted tokens, or if it is the first that was lost, the time limit of the failover starts
        at this time.
        """
        self.refusals += cause is FailoverCause.REFUSED
        self.losses += cause in (FailoverCause.VERIFIER_LOST, FailoverCause.FAILED)
        if self.stuck_since is None or num_emitted > self.emitted_before:
            self.stuck_since = since

    def record_failover(self, cause: FailoverCause) -> None:
        """Record that the request continues in another session."""
        self.cause = cause


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ServingSession:
    """The session that serves a request, or the last one that did."""

    peer: VerifierPeer
    feed: SessionFeed
    opened: OpenedSession


class RequestRun:
    """Runs one request: waits for capacity, opens its sessions and reads their output."""

    def __init__(
        self,
        context: RunContext,
        entry: RequestEntry,
        job: ValidatedRequest,
        *,
        sequence: int,
        session_id: SessionId,
    ) -> None:
        """Create the run of a request. `sequence` is the arrival number of the request, and
        `session_id` is the id of all of its sessions. If the entry has emitted tokens or was
        restored, the run continues after these tokens.
        """
        self._context = context
        self._entry = entry
        self._job = job
        self._admission_request = AdmissionRequest(
            request_id=entry.request_id,
            kv_tokens=job.kv_tokens,
            prompt_tokens=len(job.prompt_ids),
            max_new_tokens=job.max_new_tokens,
            sequence=sequence,
            priority=job.priority,
            deadline=entry.deadline,
            tenant=job.tenant,
            is_client_named=job.is_client_named,
        )
        self._session_id = session_id
        self._reply = ClientReply(
            entry.output,
            job.make_assembler(context.tokenizer),
            prompt_tokens=len(job.prompt_ids),
        )
        self._stop_checker = _resumed_stop_checker(entry, job, context.tokenizer)
        """Checker of the request's stop strings over all of its sessions; None if it has no stop
        strings.
        """
        self._failovers = FailoverRecord()
        if entry.is_restored or entry.output.token_ids:
            self._failovers = FailoverRecord(
                cause=FailoverCause.ROUTER_LOST,
                epoch=int(entry.is_restored),
                stuck_since=context.clock(),
            )
        self._has_sent_prompt_info = False
        """Whether `PromptInfo` was sent to the client."""
        self._reservation: CapacityReservation | None = None
        self._next_reservation: CapacityReservation | None = None
        """Reservation on another verifier, for a session whose verifier is about to stop."""
        self._session: _ServingSession | None = None
        self._relocation: asyncio.Task[None] | None = None
        """Task that waits for `_next_reservation`."""

    async def stream_messages(self) -> AsyncGenerator[StreamEvent, None]:
        """Yield the messages to the request's client, the finish last.

        A request that continues after emitted tokens first yields PromptInfo and all of these
        tokens.
        """
        reply, metrics = self._reply, self._context.metrics
        placed = self._failovers.cause is not None
        if placed:
            yield self._job.prompt_info(self._entry.request_id)
            for known in reply.catch_up(self._implied_finish()):
                yield known
            self._has_sent_prompt_info = True
        while not reply.ended:
            await self._admit()
            if not placed:
                placed = True
                metrics.prompt_tokens.inc(len(self._job.prompt_ids))
                metrics.request_prompt_tokens.observe_values(len(self._job.prompt_ids))
                metrics.queue_time.observe_values(self._context.clock() - self._entry.arrived_at)
            try:
                async with aclosing(self._stream_session()) as messages:
                    async for message in messages:
                        yield message
            except OutriderError as error:
                self._fail_over(error)
                # Sends the tokens that arrived after the last message, and the end that they imply.
                for known in reply.catch_up(self._implied_finish()):
                    yield known

    def free(self) -> None:
        """Release the reservations of the request and remove it from the queue."""
        for reservation in (self._reservation, self._next_reservation):
            if reservation is not None:
                self._context.admission.release_capacity(reservation)
        self._context.admission.remove_request(self._entry.request_id)

    def relocate(self, peer: VerifierPeer, until: float) -> None:
        """Move the session from `peer` to another verifier as soon as one has capacity. `until` is
        the clock time in seconds at which `peer` stops. Has no effect if the session is not on
        `peer`.
        """
        session, lifecycle = self._session, self._entry.lifecycle
        if (
            session is not None
            and session.peer is peer
            and lifecycle.phase is RequestPhase.STREAMING
        ):
            lifecycle.relocate()
            self._relocation = asyncio.create_task(self._move_away(session, until))

    def _implied_finish(self) -> FinishReason | None:
        """Return the finish reason that follows from the emitted tokens although the verifier has
        not reported it, or None.
        """
        if self._stop_checker is not None and self._stop_checker.is_stopped:
            return FinishReason.STOP_STRING
        return implied_finish(
            self._entry.output.token_ids,
            stop_ids=self._job.stop_ids,
            max_new_tokens=self._job.max_new_tokens,
        )

    # ---- reservations --------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Wait for a reservation. Raises the errors of admission; if tokens were emitted and no
        verifier is left, the error says that the output is incomplete.
        """
        self._reservation, self._next_reservation = self._next_reservation, None
        if self._reservation is not None:
            return
        failovers, admission_request = self._failovers, self._admission_request
        if failovers.cause is not None:
            await self._back_off(pause_s(failovers.losses))
            since = failovers.stuck_since
            since = self._context.clock() if since is None else since
            until = since + self._context.failover_timeout_s
            admission_request = replace(admission_request, waits_until=until)
        try:
            self._reservation = await self._acquire(admission_request)
        except UnavailableError as error:
            emitted = self._entry.output.token_ids
            if error.reason == NO_VERIFIER and failovers.cause is not None and emitted:
                raise incomplete_error(failovers.cause, self._history()) from error
            raise

    async def _acquire(self, admission_request: AdmissionRequest) -> CapacityReservation:
        entry, admission = self._entry, self._context.admission
        with (
            entry.lifecycle.during(
                RequestPhase.QUEUED, partial(admission.fail_request, entry.request_id)
            ),
            queue_span(entry, admission_request.priority) as span,
        ):
            reservation = await admission.reserve_capacity(admission_request, entry.group)
            span.set_attributes({"outrider.verifier": reservation.verifier_id})
            return reservation

    async def _back_off(self, seconds: float) -> None:
        """Wait for `seconds`, or until the request fails."""
        if seconds <= 0:
            return
        failed = asyncio.Event()
        with (
            self._entry.lifecycle.during(RequestPhase.BACKING_OFF, lambda _error: failed.set()),
            contextlib.suppress(TimeoutError),
        ):
            async with asyncio.timeout(seconds):
                await failed.wait()

    def _give_back(self) -> None:
        """Release the reservation of a session that has ended, even if the client has not read all
        of its output.
        """
        if self._reservation is not None:
            self._context.admission.release_capacity(self._reservation)
            self._reservation = None

    # ---- failover ------------------------------------------------------------------------------

    def _fail_over(self, error: OutriderError) -> None:
        """Prepare another session after one that ended with `error`. Raises an error if the request
        does not continue.
        """
        entry, failovers = self._entry, self._failovers
        if entry.lifecycle.error is not None:
            raise error
        cause, num_emitted = failover_cause(error), len(entry.output.token_ids)
        # A verifier that hung kept the client waiting before it counted as lost.
        stalled_s = 0.0 if self._session is None else self._session.peer.stalled_s
        failovers.record_error(cause, num_emitted, self._context.clock() - stalled_s)
        history = self._history()
        if cause is None or not should_retry(
            cause, history, max_failovers=self._context.max_failovers
        ):
            if cause is FailoverCause.VERIFIER_LOST or cause is FailoverCause.DRAINING:
                raise incomplete_error(cause, history) from error
            raise error
        if cause is not FailoverCause.REFUSED:
            self._context.metrics.failovers.inc()
            entry.span.event("session_lost", {"outrider.cause": cause.value})
            logger.warning(
                "request lost its session",
                extra={
                    **entry.log_ids,
                    "cause": cause.value,
                    "problem": error.message,
                    "tokens": num_emitted,
                },
            )
        failovers.record_failover(cause)
        if self._reservation is not None:
            self._context.admission.release_capacity(
                self._reservation, refused=cause is FailoverCause.REFUSED
            )
            self._reservation = None

    def _history(self) -> RequestHistory:
        reservation, since = self._reservation, self._failovers.stuck_since
        return RequestHistory(
            losses=self._failovers.losses,
            refusals=self._failovers.refusals,
            emitted=len(self._entry.output.token_ids),
            is_alone=reservation is not None
            and self._context.admission.sessions_on(reservation.verifier_id) <= 1,
            is_in_time=since is None
            or self._context.clock() < since + self._context.failover_timeout_s,
        )

    # ---- sessions ------------------------------------------------------------------------------

    async def _stream_session(self) -> AsyncGenerator[StreamEvent, None]:
        """Open a session, yield its messages to the client, and leave the session."""
        entry, registry, reservation = self._entry, self._context.registry, self._reservation
        assert reservation is not None, "a session needs a reservation"
        # No session is opened for a request that ends anyway.
        entry.lifecycle.raise_error()
        peer = registry.healthy_verifier(reservation.verifier_id)
        if peer is None or peer.info is None or peer.control is None:
            raise verifier_lost_error(reservation.verifier_id)
        incarnation = peer.info.incarnation
        session, span = self._open_session(peer, peer.info)
        try:
            with span:
                if not self._has_sent_prompt_info:
                    # Sent after the session is opened, so that the verifier does not wait for the
                    # client.
                    self._has_sent_prompt_info = True
                    yield self._job.prompt_info(entry.request_id)
                async with aclosing(session_messages(session.feed, self._reply)) as messages:
                    async for message in messages:
                        yield message
        finally:
            # From here on, events of this session do not reach the entry.
            session.opened.leave_session()
            session.feed.detach_reader()
            entry.leave_session()
            peer.open_sessions -= 1
            await self._stop_relocation()
            if session.feed.error is not None and peer.info.incarnation == incarnation:
                _doubt_verifier(registry, peer, session.feed.error)

    def _open_session(
        self, peer: VerifierPeer, info: VerifierInfo
    ) -> tuple[_ServingSession, RequestSpan]:
        """Open the request's next session on a verifier, whose latest info is `info`."""
        entry, job, streams = self._entry, self._job, self._context.streams
        plan = plan_for_verifier(job.plan, info)
        drafter = self._choose_drafter(peer, info, plan)
        span, spec = start_session_span(
            entry, self._session_spec(plan, drafter), verifier_id=info.verifier_id
        )
        feed = SessionFeed(
            entry,
            streams.pacer,
            self._finish_session,
            self._implied_finish,
            limits=OutputLimits(
                max_new_tokens=job.max_new_tokens,
                vocab_size=info.vocab_size,
                top_logprobs=job.top_logprobs,
                prompt_tokens=len(job.prompt_ids),
            ),
            drafter=drafter,
            stop_checker=self._stop_checker,
        )
        opened = streams.get_stream(peer).open_session(spec, feed)
        session = self._session = _ServingSession(peer=peer, feed=feed, opened=opened)
        entry.start_session(
            RequestSession(
                session_id=self._session_id,
                verifier_id=info.verifier_id,
                prompt_tokens=len(job.prompt_ids),
                drafter=drafter,
                opened=opened,
            ),
            partial(self._interrupt_session, session),
        )
        peer.open_sessions += 1
        return session, span

    def _choose_drafter(
        self, peer: VerifierPeer, info: VerifierInfo, plan: SpeculationPlan
    ) -> DrafterAttachment:
        """Return the drafter attachment of the request's next session, which has no drafter if none
        is needed or available.
        """
        last = self._entry.session
        last_move_at = -math.inf if last is None else last.drafter.last_move_at
        if not plan.is_speculative or needs_no_drafter(plan, info):
            return DrafterAttachment(last_move_at=last_move_at)
        return DrafterAttachment(
            method=plan.method,
            drafter_id=self._context.rebalancer.choose_drafter(peer, plan.method),
            last_move_at=last_move_at,
        )

    def _session_spec(self, plan: SpeculationPlan, drafter: DrafterAttachment) -> SessionSpec:
        emitted, failovers = self._entry.output.token_ids, self._failovers
        failovers.record_session(len(emitted))
        if failovers.cause is not None:
            self._context.metrics.resumed_sessions.labels(failovers.cause.value).inc()
        return self._job.session_spec(
            self._session_id, failovers.epoch, drafter.drafter_id, plan, emitted
        )

    def _finish_session(self, reason: FinishReason) -> None:
        """Handle the end of a session, even if the client has not read all of its output. After a
        stop string the router ends the session itself, because verifiers do not check stop strings.
        """
        if reason is FinishReason.STOP_STRING and self._session is not None:
            self._session.opened.leave_session()
        self._give_back()

    def _interrupt_session(self, session: _ServingSession, _error: OutriderError) -> None:
        """End the session because its request fails, even if the client has not read all of its
        output.
        """
        session.opened.leave_session()
        self._give_back()
        session.feed.wake_reader()

    # ---- draining verifiers --------------------------------------------------------------------

    async def _move_away(self, session: _ServingSession, until: float) -> None:
        """Wait for a reservation on another verifier, then end the session on this one."""
        admission_request = replace(self._admission_request, waits_until=until)
        with contextlib.suppress(OutriderError):
            self._next_reservation = await self._context.admission.reserve_capacity(
                admission_request
            )
            session.feed.fail_session(
                UnavailableError("the verifier is about to stop", reason=DRAINING)
            )

    async def _stop_relocation(self) -> None:
        """Stop waiting for a reservation on another verifier. A reservation that was already made
        is kept.
        """
        relocation, self._relocation = self._relocation, None
        if relocation is not None:
            relocation.cancel()
            await asyncio.gather(relocation, return_exceptions=True)


def _resumed_stop_checker(
    entry: RequestEntry, job: ValidatedRequest, tokenizer: Tokenizer
) -> StopChecker | None:
    """Return the checker of the request's stop strings after the emitted tokens, or None if there
    are no stop strings. Emitted tokens after a stop are dropped.
    """
    checker, ids = job.stop_checker(tokenizer), entry.output.token_ids
    if checker is not None and ids:
        kept = checker.count_tokens(ids, last_is_stop=ids[-1] in job.stop_ids)
        entry.output.truncate_tokens(kept)
    return checker


def _doubt_verifier(registry: PeerRegistry, peer: VerifierPeer, error: OutriderError) -> None:
    """Mark a verifier as draining or lost if the error of its session says so."""
    if error.reason == DRAINING:
        registry.mark_verifier_draining(peer)
    elif error.reason in FINAL_REASONS:
        registry.mark_verifier_lost(peer, error.message)


class RequestRunner:
    """Runs the requests of one router."""

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
        """Create a runner. `on_emitted` logs the new token ids of logged requests, and is called
        before clients receive them.
        """
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
        """Yield the messages to the request's client. Closing the generator releases the resources
        of the request.

        If the entry has emitted tokens or was restored from the durable log, the client first gets
        PromptInfo and all of these tokens.
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
        # Yielded last, so that all resources are free when the client sees the end.
        yield finish

    def _on_draining(self, peer: VerifierPeer, seconds: float) -> None:
        """Handle a verifier that will stop in `seconds`: its sessions move to other verifiers when
        these have capacity.
        """
        logger.info("verifier drain started", extra={"address": peer.address, "seconds": seconds})
        self._registry.mark_verifier_draining(peer)
        until = self._clock() + max(0.0, seconds)
        for run in self._runs:
            run.relocate(peer, until)
