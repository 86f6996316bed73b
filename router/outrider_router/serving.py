"""One request from its place in the queue to its end: a session on a verifier, or several."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

from outrider.errors import ResourceExhaustedError, UnavailableError
from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.text.tokenizer import Tokenizer
from outrider.transport.sessions import SessionStream
from outrider.wire.inference import Delta, FinishInfo, PromptInfo, StreamEvent
from outrider_router.admission import Ticket
from outrider_router.admission_queue import AdmissionQueue, Lease
from outrider_router.journal import Entry, Journal
from outrider_router.log_records import Row
from outrider_router.metrics import RouterMetrics
from outrider_router.moving import Mover
from outrider_router.output import OutputAssembler
from outrider_router.pacing import Pacer
from outrider_router.planner import drafts_itself, plan_on
from outrider_router.registry import Registry, VerifierPeer
from outrider_router.request import Job
from outrider_router.streaming import EventSink, Feed, lost_error, session_messages

MAX_REFUSALS = 20
"""Refusals of one request by verifiers on which nothing else of ours runs."""


class Serving:
    """Places requests, opens their sessions and reads what these emit; one for each router."""

    def __init__(
        self,
        *,
        journal: Journal,
        admission: AdmissionQueue,
        registry: Registry,
        mover: Mover,
        tokenizer: Tokenizer,
        metrics: RouterMetrics,
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
        self._on_emitted = on_emitted
        self._pacer = Pacer(clock)
        self._numbers = itertools.count()
        self._incarnation = secrets.token_hex(6)
        self._streams: dict[str, SessionStream[Feed]] = {}
        """The stream of sessions of every verifier that served one, by address."""

    async def close(self) -> None:
        """Close the streams to all verifiers."""
        for stream in self._streams.values():
            await stream.close()

    def verifier_lost(self, verifier_id: VerifierId) -> None:
        """A verifier is gone: its sessions are, too."""
        for entry in self._journal:
            if entry.verifier_id == verifier_id:
                entry.fail(lost_error(verifier_id))
        for peer in self._registry.verifiers.values():
            stream = self._streams.get(peer.address)
            known = peer.info is not None and peer.info.verifier_id == verifier_id
            if known and stream is not None:
                stream.drop()

    async def events(
        self, entry: Entry, job: Job, deadline: float | None
    ) -> AsyncGenerator[StreamEvent, None]:
        """What the client of a request hears; closing it frees all that the request holds."""
        ticket = Ticket(
            request_id=entry.request_id,
            kv_tokens=job.kv_tokens,
            sequence=next(self._numbers),
            priority=job.priority,
            deadline=deadline,
        )
        lease = await self._acquire(entry, ticket)
        held = True
        self._metrics.prompt_tokens.inc(len(job.prompt_ids))
        self._metrics.queue_time.observe(self._clock() - entry.started)
        finish: FinishInfo | None = None
        try:
            yield PromptInfo(
                request_id=entry.request_id, prompt_tokens=len(job.prompt_ids), model=job.model
            )
            for attempt in itertools.count(1):
                try:
                    async with aclosing(self._session(entry, job, lease)) as messages:
                        async for message in messages:
                            if isinstance(message, FinishInfo):
                                finish = message
                            else:
                                self._metrics.generation_tokens.inc(len(message.token_ids))
                                yield message
                    break
                except ResourceExhaustedError:
                    self._raise_if_hopeless(entry, lease, attempt)
                self._admission.release(lease, refused=True)
                held = False
                lease = await self._acquire(entry, ticket)
                held = True
        finally:
            if held:
                self._admission.release(lease, service_s=self._clock() - entry.started)
        assert finish is not None, "a session that ends without an error ends with a finish"
        # Last, so that whoever hears of the end finds everything freed.
        yield finish

    def _raise_if_hopeless(self, entry: Entry, lease: Lease, attempt: int) -> None:
        """Re-raise a verifier's refusal unless waiting may help."""
        alone = self._admission.sessions_on(lease.verifier_id) <= 1
        if entry.emitted or (alone and attempt >= MAX_REFUSALS):
            raise

    async def _acquire(self, entry: Entry, ticket: Ticket) -> Lease:
        if entry.ended is not None:
            raise entry.ended
        entry.on_fail = lambda error: self._admission.fail(entry.request_id, error)
        try:
            return await self._admission.acquire(ticket)
        finally:
            entry.on_fail = None

    async def _session(
        self, entry: Entry, job: Job, lease: Lease
    ) -> AsyncGenerator[Delta | FinishInfo, None]:
        peer = self._registry.healthy_verifier(lease.verifier_id)
        if peer is None or peer.control is None:
            raise lost_error(lease.verifier_id)
        entry.verifier_id = lease.verifier_id
        assert peer.info is not None, "a healthy verifier has said who it is"
        plan = plan_on(job.plan, peer.info)
        if plan.speculative and not drafts_itself(plan, peer.info):
            entry.method, entry.prompt_tokens = plan.method, len(job.prompt_ids)
            entry.drafter_id = self._mover.choose(peer, entry)
        session_id = SessionId(f"{self._incarnation}-{next(self._numbers)}")
        feed = Feed(entry, self._pacer)
        assembler = OutputAssembler(self._tokenizer.pieces, job.stop_strings)
        entry.on_fail = feed.interrupt
        spec = job.spec(session_id, entry.epoch, entry.drafter_id, plan)
        opened = self._stream_to(peer).open(spec, feed)
        entry.move = opened.move
        try:
            async with aclosing(
                session_messages(feed, assembler, prompt_tokens=len(job.prompt_ids))
            ) as messages:
                async for message in messages:
                    yield message
        except UnavailableError as error:
            if entry.ended is None:
                raise lost_error(lease.verifier_id) from error
            raise
        finally:
            opened.leave()
            feed.leave()
            entry.leave()

    def _stream_to(self, peer: VerifierPeer) -> SessionStream[Feed]:
        stream = self._streams.get(peer.address)
        if stream is None:
            assert peer.control is not None, peer.address
            sink = EventSink(
                self._metrics,
                self._pacer,
                self._clock,
                on_events=lambda: self._registry.saw_verifier(peer),
                on_drafter_lost=partial(self._on_drafter_lost, peer),
                on_emitted=self._on_emitted,
            )
            stream = self._streams[peer.address] = SessionStream(
                peer.control.sessions, sink.deliver
            )
        return stream

    def _on_drafter_lost(self, peer: VerifierPeer, drafter_id: DrafterId) -> None:
        self._registry.drafter_detached(peer, drafter_id)
        self._mover.wake()
