"""One request from its place in the queue to its end: a session on a verifier, or several.

A session that is lost, refused or drained is followed by another one, which begins with all that
the request has emitted, in the next epoch and with the same seed: so its text goes on as it would
have done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from outrider.errors import OutriderError, UnavailableError
from outrider.ids import DrafterId, SessionId
from outrider.text.tokenizer import Tokenizer
from outrider.transport.session_stream import Opened
from outrider.wire.inference import Delta, FinishInfo, StreamEvent
from outrider.wire.messages import FinishReason, SessionSpec, VerifierInfo
from outrider_router.admission.capacity_ledger import Lease
from outrider_router.admission.policy import NO_VERIFIER
from outrider_router.admission.queue import AdmissionQueue
from outrider_router.admission.wait_order import Ticket
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.reasons import FailoverCause
from outrider_router.config import RouterConfig
from outrider_router.fleet.peer_types import VerifierPeer
from outrider_router.fleet.registry import Registry
from outrider_router.requests.course import Course
from outrider_router.requests.drafter_rebalancer import Mover
from outrider_router.requests.failover import (
    DRAINING,
    ENDING,
    Past,
    cause_of,
    goes_on,
    incomplete,
    pause_s,
)
from outrider_router.requests.log_records import Row
from outrider_router.requests.request import Job
from outrider_router.requests.request_options import drafts_itself, plan_on
from outrider_router.requests.request_spans import queue_span, traced
from outrider_router.requests.running_requests import Entry, Journal
from outrider_router.requests.session_output import Feed, Reply, lost_error, session_messages
from outrider_router.requests.stop_checker import StopChecker
from outrider_router.requests.verifier_streams import VerifierStreams

logger = logging.getLogger(__name__)


class Serving:
    """Places requests, opens their sessions and reads what these emit; one for each router."""

    def __init__(
        self,
        config: RouterConfig,
        journal: Journal,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
        *,
        admission: AdmissionQueue,
        registry: Registry,
        mover: Mover,
        clock: Callable[[], float],
        on_emitted: Callable[[list[Row]], None],
    ) -> None:
        """`on_emitted` logs ids of entries with a number, before anybody is told of them."""
        self._journal = journal
        self._admission = admission
        self._registry = registry
        self._mover = mover
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._failover_s = config.failover_s
        self._max_failovers = config.max_failovers
        self._numbers = itertools.count()
        self._incarnation = secrets.token_hex(6)
        self.streams = VerifierStreams(
            metrics,
            registry=registry,
            mover=mover,
            clock=clock,
            on_emitted=on_emitted,
            on_draining=self._on_draining,
        )
        self._open: set[Course] = set()
        """Requests that have a session."""

    async def events(
        self, entry: Entry, job: Job, deadline: float | None
    ) -> AsyncGenerator[StreamEvent, None]:
        """What the client of a request hears; closing it frees all that the request holds.

        An entry that has emitted tokens or is of a later epoch already (its router ended) goes on
        behind them: the client hears of all of them first, from PromptInfo on.
        """
        course = self._course(entry, job, deadline)
        finish: FinishInfo | None = None
        try:
            async with aclosing(self._messages(course)) as messages:
                async for message in messages:
                    if isinstance(message, FinishInfo):
                        finish = message
                    else:
                        if isinstance(message, Delta):
                            self._metrics.generation_tokens.inc(len(message.token_ids))
                        yield message
        finally:
            self._free(course)
        assert finish is not None, "a request that ends without an error ends with a finish"
        # Last, so that whoever hears of the end finds everything freed.
        yield finish

    def _course(self, entry: Entry, job: Job, deadline: float | None) -> Course:
        number = next(self._numbers)
        entry.top_logprobs, entry.max_new_tokens = job.top_logprobs, job.max_new_tokens
        return Course(
            entry=entry,
            job=job,
            ticket=Ticket(
                request_id=entry.request_id,
                kv_tokens=job.kv_tokens,
                prompt_tokens=len(job.prompt_ids),
                max_new_tokens=job.max_new_tokens,
                sequence=number,
                priority=job.priority,
                deadline=deadline,
                tenant=job.tenant,
                returns=job.returns,
            ),
            reply=Reply(
                entry,
                job.assembler(self._tokenizer),
                prompt_tokens=len(job.prompt_ids),
            ),
            session_id=SessionId(f"{self._incarnation}-{number}"),
            stop_checker=self._stop_checker(entry, job),
            cause=FailoverCause.ROUTER_LOST if entry.emitted or entry.epoch else None,
        )

    def _stop_checker(self, entry: Entry, job: Job) -> StopChecker | None:
        """The search for the request's stop strings, behind what the entry has emitted; ids behind
        a stop that is among these are dropped from it."""
        checker, ids = job.stop_checker(self._tokenizer), entry.emitted
        if checker is not None and ids:
            kept = checker.count_tokens(ids, last_is_stop=ids[-1] in job.stop_ids)
            del ids[kept:], entry.logprobs[kept:]
        return checker

    async def _messages(self, course: Course) -> AsyncGenerator[StreamEvent, None]:
        reply = course.reply
        if course.cause is not None:
            course.stuck_since = self._clock()
            yield course.info
            for known in reply.catch_up(course.end):
                yield known
            course.informed = True
        placed = course.cause is not None
        while not reply.ended:
            await self._place(course)
            if not placed:
                placed = True
                self._metrics.prompt_tokens.inc(len(course.job.prompt_ids))
                self._metrics.request_prompt_tokens.observe(len(course.job.prompt_ids))
                self._metrics.queue_time.observe(self._clock() - course.entry.started)
            try:
                async with aclosing(self._session(course)) as messages:
                    async for message in messages:
                        yield message
            except OutriderError as error:
                self._judge(course, error)
                # What came after the reader last looked, and an end that nobody could tell of.
                for known in reply.catch_up(course.end):
                    yield known

    # ---- places --------------------------------------------------------------------------------

    async def _place(self, course: Course) -> None:
        """Wait for a place.

        Raises what admission raises; an error that says so where part of the answer was emitted.
        """
        course.lease, course.next_lease = course.next_lease, None
        if course.lease is not None:
            return
        entry, ticket = course.entry, course.ticket
        if course.cause is not None:
            await self._pause(entry, pause_s(course.losses))
            since = self._clock() if course.stuck_since is None else course.stuck_since
            ticket = replace(ticket, patient_until=since + self._failover_s)
        try:
            course.lease = await self._acquire(entry, ticket)
        except UnavailableError as error:
            if error.reason == NO_VERIFIER and course.cause is not None and entry.emitted:
                raise incomplete(course.cause, self._past(course)) from error
            raise

    async def _acquire(self, entry: Entry, ticket: Ticket) -> Lease:
        if entry.ended is not None:
            raise entry.ended
        entry.on_fail = lambda error: self._admission.fail(entry.request_id, error)
        try:
            with queue_span(entry, ticket.priority) as span:
                lease = await self._admission.acquire(ticket, entry.party)
                span.set({"outrider.verifier": lease.verifier_id})
                return lease
        finally:
            entry.on_fail = None

    async def _pause(self, entry: Entry, seconds: float) -> None:
        """Let some time pass, unless the request ends first."""
        if seconds <= 0 or entry.ended is not None:
            return
        ended = asyncio.Event()
        entry.on_fail = lambda _error: ended.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ended.wait()
        entry.on_fail = None

    def _finish_session(self, course: Course, reason: FinishReason) -> None:
        """A session has come to its end, before a slow client has heard of it. At a stop string it
        is ended here: the verifier knows nothing of these."""
        if reason is FinishReason.STOP_STRING and course.opened is not None:
            course.opened.leave()
        self._give_back(course)

    def _give_back(self, course: Course) -> None:
        """The place of a session that has ended, before a slow client has heard of it."""
        if course.lease is not None:
            self._admission.release(course.lease)
            course.lease = None

    def _interrupt(self, course: Course, feed: Feed, opened: Opened, _error: OutriderError) -> None:
        """The request ends, and its session with it, before a slow client has heard of it."""
        opened.leave()
        self._give_back(course)
        feed.wake()

    def _free(self, course: Course) -> None:
        """Give back what a request holds that is over."""
        for lease in (course.lease, course.next_lease):
            if lease is not None:
                self._admission.release(lease)
        self._admission.leave(course.entry.request_id)

    # ---- what becomes of it --------------------------------------------------------------------

    def _judge(self, course: Course, error: OutriderError) -> None:
        """A session has ended with an error; raises unless the request goes on in another."""
        entry, now = course.entry, self._clock()
        if entry.ended is not None:
            raise error
        cause = cause_of(error)
        course.refusals += cause is FailoverCause.REFUSED
        course.losses += cause in (FailoverCause.VERIFIER_LOST, FailoverCause.FAILED)
        if course.stuck_since is None or len(entry.emitted) > course.began_with:
            # A verifier that hung had kept the client waiting before it was given up.
            course.stuck_since = now - (0.0 if course.peer is None else course.peer.stalled_s)
        past = self._past(course)
        if cause is None or not goes_on(cause, past, max_failovers=self._max_failovers):
            if cause is FailoverCause.VERIFIER_LOST or cause is FailoverCause.DRAINING:
                raise incomplete(cause, past) from error
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
        course.cause = cause
        if course.lease is not None:
            self._admission.release(course.lease, refused=cause is FailoverCause.REFUSED)
            course.lease = None

    def _past(self, course: Course) -> Past:
        lease, since = course.lease, course.stuck_since
        return Past(
            losses=course.losses,
            refusals=course.refusals,
            emitted=len(course.entry.emitted),
            alone=lease is not None and self._admission.sessions_on(lease.verifier_id) <= 1,
            in_time=since is None or self._clock() < since + self._failover_s,
        )

    # ---- sessions ------------------------------------------------------------------------------

    async def _session(self, course: Course) -> AsyncGenerator[StreamEvent, None]:
        entry, lease = course.entry, course.lease
        assert lease is not None, "a session needs a place"
        peer = self._registry.healthy_verifier(lease.verifier_id)
        if peer is None or peer.info is None or peer.control is None:
            raise lost_error(lease.verifier_id)
        feed = Feed(
            entry,
            self.streams.pacer,
            partial(self._finish_session, course),
            end=lambda: course.end,
            stop_checker=course.stop_checker,
        )
        spec = self._spec(course, peer.info, partial(self._mover.choose, peer, entry))
        span, spec = traced(entry, spec)
        opened = self.streams.to(peer).open(spec, feed)
        entry.on_fail = partial(self._interrupt, course, feed, opened)
        entry.move = opened.move
        course.peer, course.feed, course.opened = peer, feed, opened
        peer.open_sessions += 1
        self._open.add(course)
        incarnation = peer.info.incarnation
        try:
            with span:
                if not course.informed:
                    # Once the session is on its way: the verifier need not wait for the client.
                    course.informed = True
                    yield course.info
                async with aclosing(session_messages(feed, course.reply)) as messages:
                    async for message in messages:
                        yield message
        finally:
            # Nothing that is said of this session from here on reaches the entry.
            opened.leave()
            feed.leave()
            entry.leave()
            peer.open_sessions -= 1
            self._open.discard(course)
            await self._stay(course)
            if feed.error is not None and peer.info.incarnation == incarnation:
                self._doubt(peer, feed.error)

    def _spec(
        self, course: Course, info: VerifierInfo, choose: Callable[[], DrafterId | None]
    ) -> SessionSpec:
        """The request's next session, on the verifier that said `info`."""
        entry, job = course.entry, course.job
        entry.verifier_id, entry.drafter_attached = info.verifier_id, False
        entry.vocab_size = info.vocab_size
        plan = plan_on(job.plan, info)
        if plan.speculative and not drafts_itself(plan, info):
            entry.method, entry.prompt_tokens = plan.method, len(job.prompt_ids)
            entry.drafter_id = choose()
        course.began_with = len(entry.emitted)
        if course.cause is not None:
            entry.epoch += 1
            self._metrics.resumed_sessions.labels(course.cause.value).inc()
        entry.session_id = course.session_id
        return job.spec(course.session_id, entry.epoch, entry.drafter_id, plan, entry.emitted)

    def _doubt(self, peer: VerifierPeer, error: OutriderError) -> None:
        """Let nothing be placed on a verifier whose sessions end with such an error."""
        if error.reason == DRAINING:
            self._registry.verifier_draining(peer)
        elif error.reason in ENDING:
            self._registry.verifier_broke(peer, error.message)

    # ---- draining verifiers --------------------------------------------------------------------

    def _on_draining(self, peer: VerifierPeer, seconds: float) -> None:
        """A verifier stops in so many seconds: its sessions leave it as others have room."""
        logger.info("verifier drains", extra={"address": peer.address, "seconds": seconds})
        self._registry.verifier_draining(peer)
        until = self._clock() + max(0.0, seconds)
        for course in self._open:
            if course.peer is peer and course.moving is None:
                course.moving = asyncio.create_task(self._move_away(course, until))

    async def _move_away(self, course: Course, until: float) -> None:
        """Have a session end when there is a place elsewhere; until then it goes on."""
        ticket = replace(course.ticket, patient_until=until)
        with contextlib.suppress(OutriderError):
            course.next_lease = await self._admission.acquire(ticket)
            assert course.feed is not None
            course.feed.fail(UnavailableError("the verifier is about to stop", reason=DRAINING))

    async def _stay(self, course: Course) -> None:
        """Look for no place elsewhere any more; one that was found is kept."""
        moving, course.moving = course.moving, None
        if moving is not None:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)
