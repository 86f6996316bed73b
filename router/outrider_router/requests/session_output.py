"""Session output: turns the events of a verifier session into messages for the client.

The tokens of a round arrive as one message for all sessions. Its rows are appended to the feeds of
their sessions. When a client's stream runs, it sends all tokens in its feed, so rounds that have
arrived meanwhile become one message.

A message to a client costs some tens of microseconds, mostly in gRPC, regardless of its size. So
`WakeupPacer` passes the next round on only when most messages of the previous round have been sent
and a short pause has passed. Rounds that arrive meanwhile are sent together with it. A router that
falls behind thus does less work per event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from outrider.errors import OutriderError, UnavailableError
from outrider.ids import DrafterId, VerifierId
from outrider.transport.session_stream import SessionStream
from outrider.wire.inference import Delta, FinishInfo, TokenLogprobs
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    MALFORMED_ROW,
    REASONS,
    FinishReason,
    SessionEvents,
)
from outrider_router.base.metrics import RouterMetrics
from outrider_router.fleet.peers import VerifierPeer
from outrider_router.fleet.registry import PeerRegistry
from outrider_router.requests.drafter_rebalancer import DrafterRebalancer
from outrider_router.requests.request_output import ClientReply, OutputLimits, StopChecker
from outrider_router.requests.resumption.log_records import EmittedRow
from outrider_router.requests.running_requests import DrafterAttachment, RequestEntry

logger = logging.getLogger(__name__)

MAX_SLOW_SHARE = 8
"""One reader in this number may be slow without delaying the next round."""
MAX_DELAY_S = 0.02
"""Longest time in seconds that a round waits for the messages of the previous round."""
MIN_DELAY_S = 0.0005
"""Pauses that are not longer than this time in seconds are left out, because timers have a coarse
resolution.
"""
PAUSE_SHARE = 0.25
"""Pause after a round of messages, as a fraction of the time that sending the round took. Messages
of verifiers are read in the pause.
"""


class WakeableReader(Protocol):
    """Interface of a reader that waits for output until `WakeupPacer` wakes it."""

    def wake_reader(self) -> bool:
        """Let the reader check for output again. Return whether it was waiting."""
        ...


class WakeupPacer:
    """Decides when waiting readers are woken. All readers of one event loop share one pacer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create a pacer without readers. `clock` returns monotonic seconds."""
        self._clock = clock
        self._waiting: dict[WakeableReader, None] = {}
        """Readers with output that has arrived since the last round was passed on. A dict is used
        as an ordered set.
        """
        self._busy: set[WakeableReader] = set()
        """Readers that were woken and do not wait again yet."""
        self._slow = 0
        """Number of readers in `_busy` at which the next round may be passed on."""
        self._began = 0.0
        self._next = 0.0
        """Clock time in seconds before which no round is passed on."""
        self._timer: asyncio.TimerHandle | None = None

    def wake_readers(self, readers: Iterable[WakeableReader]) -> None:
        """Wake these readers: now, or once most of the readers that were woken before wait again
        and a short pause has passed."""
        self._waiting.update(dict.fromkeys(readers))
        self._pass_on()

    def record_reader_return(self, reader: WakeableReader, *, more: bool = False) -> None:
        """Record that a reader waits again or has left. With `more`, output for it has already
        arrived.
        """
        if more:
            self._waiting[reader] = None
        if reader in self._busy:
            self._busy.discard(reader)
            if len(self._busy) == self._slow:
                now = self._clock()
                self._next = min(self._next, now + PAUSE_SHARE * (now - self._began))
        elif not more:
            return
        self._pass_on()

    def _pass_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        delay_s = self._next - self._clock()
        if delay_s > MIN_DELAY_S:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._pass_on)
            return
        waiting, self._waiting = self._waiting, {}
        self._busy = {reader for reader in waiting if reader.wake_reader()}
        self._slow = len(self._busy) // MAX_SLOW_SHARE
        self._began = self._clock()
        self._next = self._began + (MAX_DELAY_S if self._busy else 0.0)


class SessionFeed:
    """Output of one session. The stream of the verifier writes to it, and the request's task reads
    it.
    """

    __slots__ = (
        "_on_finish",
        "_pacer",
        "_turn",
        "_waiter",
        "drafter",
        "end",
        "entry",
        "error",
        "limits",
        "output",
        "reason",
        "stop_checker",
    )

    def __init__(
        self,
        entry: RequestEntry,
        pacer: WakeupPacer,
        on_finish: Callable[[FinishReason], None] = lambda reason: None,
        end: Callable[[], FinishReason | None] = lambda: None,
        *,
        limits: OutputLimits,
        drafter: DrafterAttachment,
        stop_checker: StopChecker | None = None,
    ) -> None:
        """Create an empty feed.

        `pacer` is told when the reader waits again. `on_finish` is called when the session ends by
        itself or its text reaches a stop string, even if the reader is slow. `end` returns the
        finish reason that follows from the emitted tokens. `limits` are checked for all output of
        the verifier. `drafter` is the drafter attachment of the session. `stop_checker` is the stop
        string checker of the request; None if the request has no stop strings.
        """
        self.entry = entry
        self.output = entry.output
        self.limits = limits
        self.drafter = drafter
        self.stop_checker = stop_checker
        self._pacer = pacer
        self._on_finish = on_finish
        self.end = end
        self.reason: FinishReason | None = None
        """Finish reason in the session's last event; None before it."""
        self.error: OutriderError | None = None
        """Error with which the session failed. The reader gets it after all tokens before it."""
        self._turn = False
        """Whether the pacer has woken the reader."""
        self._waiter: asyncio.Future[None] | None = None

    def wake_reader(self) -> bool:
        """Let the reader check for output again. Return whether it was waiting."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return False
        waiter.set_result(None)
        self._turn = True
        return True

    def count_tokens(self, token_ids: list[int], reason: FinishReason | None) -> int:
        """Return how many of the token ids of one round belong to the output: all of them, or those
        up to the one that completes a stop string. `reason` is the finish reason that the verifier
        sent with them, or None.
        """
        if self.stop_checker is None:
            return len(token_ids)
        return self.stop_checker.count_tokens(
            token_ids, last_is_stop=reason is FinishReason.STOP_TOKEN
        )

    def finish_session(self, reason: FinishReason) -> None:
        """Record that the session has ended with this finish reason."""
        self.reason = reason
        self.wake_reader()
        if reason is not FinishReason.CANCELLED:
            self._on_finish(reason)

    def fail_session(self, error: OutriderError) -> None:
        """Record that the session was refused or failed, or that its verifier was lost."""
        self.error = error
        self.wake_reader()

    def handle_drafter_change(self, drafter_id: DrafterId | None) -> None:
        """Record the drafter that the verifier reports for the session."""
        self.drafter.record_drafter(drafter_id)
        self.entry.span.event("drafter_moved", {"outrider.drafter": drafter_id or ""})

    def detach_reader(self) -> None:
        """Record that the request does not read the feed any more."""
        self._pacer.record_reader_return(self)

    async def wait_news(self, told: int) -> None:
        """Wait until the output has more than `told` token ids and the pacer lets the reader
        continue, or until the session has ended.

        Raises the request's error at once, and the session's error after all tokens before it were
        read.
        """
        lifecycle, token_ids = self.entry.lifecycle, self.output.token_ids
        while True:
            if lifecycle.error is not None:
                raise lifecycle.error.copy()
            more = len(token_ids) > told
            # First tokens and ends do not wait for the pacer.
            if self.reason is not None or (more and (self._turn or not told)):
                self._turn = False
                return
            if self.error is not None and not more:
                raise self.error.copy()
            # The waiter must exist first, because this call may wake this reader.
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            self._pacer.record_reader_return(self, more=more)
            await waiter


class _MessageUpdates:
    """Output of all sessions in one message of a verifier, collected for readers, log and
    metrics.
    """

    __slots__ = ("_now", "cuts", "gaps", "logged", "readers", "waits")

    def __init__(self, now: float) -> None:
        self._now = now
        self.readers: list[SessionFeed] = []
        self.waits: list[float] = []
        """Times in seconds from arrival to the first token."""
        self.gaps: list[float] = []
        """Times in seconds between tokens; one mean for each row."""
        self.logged: list[EmittedRow] = []
        self.cuts: list[tuple[int, int]] = []
        """Rows with token ids that do not belong to the output, and the number of ids that do."""

    def add_row(
        self,
        feed: SessionFeed,
        tokens: list[int],
        told: list[TokenLogprobs],
        cached_tokens: int,
    ) -> None:
        """Append a row's token ids to its entry. Wake the reader at once if these are the first
        tokens.
        """
        output = feed.output
        start = len(output.token_ids)
        gap_s = output.add_tokens(tokens, told, self._now, cached_tokens)
        if output.log_number:
            found = output.cached_tokens if gap_s is None else 0
            self.logged.append(EmittedRow(output.log_number, start, tokens, told, found))
        if gap_s is None:
            self.waits.append(self._now - feed.entry.arrived_at)
            feed.entry.span.event("first_token")
            feed.wake_reader()
        else:
            self.gaps.append(gap_s / len(tokens))


class EventDispatcher:
    """Delivers the events of one verifier to the feeds of its sessions."""

    def __init__(
        self,
        metrics: RouterMetrics,
        pacer: WakeupPacer,
        clock: Callable[[], float],
        *,
        on_events: Callable[[], None],
        on_drafter_lost: Callable[[DrafterId], None],
        on_emitted: Callable[[list[EmittedRow]], None],
    ) -> None:
        """Create a dispatcher. `on_events` is called for every message, as a sign of life.
        `on_drafter_lost` is called with the drafter that a session lost. `on_emitted` is called
        with the new token ids of logged requests, before any reader is woken.
        """
        self._metrics = metrics
        self._pacer = pacer
        self._clock = clock
        self._on_events = on_events
        self._on_drafter_lost = on_drafter_lost
        self._on_emitted = on_emitted

    def deliver_events(self, events: SessionEvents, feeds: Mapping[int, SessionFeed]) -> None:
        """Append each row of a verifier's message, which has the new tokens of one session, to the
        session's feed. Wake the feed's reader: at once for a first token or an end, otherwise when
        the pacer allows it. `feeds` maps session handles to feeds.

        A row is treated as malformed if it has more ids than its request may have, ids beyond the
        vocabulary, not the requested log-probabilities, or more cached tokens than the prompt has
        tokens. Tokens after a stop string, and tokens of sessions that are not read any more, are
        dropped and not counted in metrics. A request that has reached its token limit ends even if
        its verifier has not reported the end.
        """
        self._on_events()
        news = _MessageUpdates(self._clock())
        tokens, counts = events.tokens.tolist(), events.counts.tolist()
        cached = None if events.cached_tokens is None else events.cached_tokens.tolist()
        end = 0
        for row, (handle, count, round_id, reason, flags, proposed, accepted, told) in enumerate(
            zip(
                events.handles.tolist(),
                counts,
                events.round_ids.tolist(),
                events.finish_reasons.tolist(),
                events.flags.tolist(),
                events.proposed.tolist(),
                events.accepted.tolist(),
                _logprobs(events, counts),
                strict=True,
            )
        ):
            start, end = end, end + count
            feed = feeds.get(handle)
            if feed is None or reason == MALFORMED_ROW or feed.reason is not None:
                news.cuts.append((row, 0))
                continue
            output, ids = feed.output, tokens[start:end]
            found = 0 if cached is None else cached[row]
            if not feed.limits.accepts(len(output.token_ids), ids, told, found):
                events.finish_reasons[row] = MALFORMED_ROW
                news.cuts.append((row, 0))
                continue
            ended = REASONS[reason]
            if count:
                kept = feed.count_tokens(ids, ended)
                if kept < count:
                    news.cuts.append((row, kept))
                    ids, told = ids[:kept], told[:kept]
                news.add_row(feed, ids, told, found)
                if round_id:
                    output.counters.add_round(
                        emitted=kept, flags=flags, proposed=proposed, accepted=min(accepted, kept)
                    )
            if bool(flags & DRAFTER_ATTACHED) is not feed.drafter.is_attached:
                self._note_drafter(feed)
            if feed.stop_checker is not None and feed.stop_checker.is_stopped:
                ended = FinishReason.STOP_STRING
            elif ended is None and len(output.token_ids) >= feed.limits.max_new_tokens:
                ended = feed.end()
            if ended is not None:
                feed.finish_session(ended)
            news.readers.append(feed)
        # Readers that were woken above run later.
        if news.logged:
            self._on_emitted(news.logged)
        self._pacer.wake_readers(news.readers)
        if news.waits:
            # Runs after the readers, so that it does not delay a first token.
            asyncio.get_running_loop().call_soon(self._count, events, news)
        else:
            self._count(events, news)

    def _count(self, events: SessionEvents, news: _MessageUpdates) -> None:
        self._metrics.record_events(_cut(events, news.cuts) if news.cuts else events)
        self._metrics.time_to_first_token.observe_values(*news.waits)
        self._metrics.inter_token_latency.observe_values(*news.gaps)

    def _note_drafter(self, feed: SessionFeed) -> None:
        drafter, entry = feed.drafter, feed.entry
        drafter.record_attached(not drafter.is_attached)
        if not drafter.is_attached and drafter.drafter_id is not None:
            self._metrics.drafter_detached_sessions.inc()
            logger.warning(
                "session lost its drafter",
                extra={**entry.log_ids, "drafter_id": drafter.drafter_id},
            )
            entry.span.event("drafter_lost", {"outrider.drafter": drafter.drafter_id})
            self._on_drafter_lost(drafter.drafter_id)


def _logprobs(events: SessionEvents, counts: list[int]) -> list[list[TokenLogprobs]]:
    """Return the log-probabilities of the token ids of each row."""
    if events.logprobs is None:
        return [_NO_LOGPROBS] * len(counts)
    return list(events.logprobs.split_rows(counts))


_NO_LOGPROBS: Final[list[TokenLogprobs]] = []


def _cut(events: SessionEvents, cuts: list[tuple[int, int]]) -> SessionEvents:
    """Return events whose counts include only the token ids that belong to the output. `cuts` has
    the rows concerned and the number of ids of each. The token ids themselves are unchanged.
    """
    counts, accepted = events.counts.copy(), events.accepted.copy()
    for row, kept in cuts:
        counts[row], accepted[row] = kept, min(int(accepted[row]), kept)
    return replace(events, counts=counts, accepted=accepted)


async def session_messages(
    feed: SessionFeed, reply: ClientReply
) -> AsyncGenerator[Delta | FinishInfo, None]:
    """Yield the messages of a session to the client: deltas, then the finish if the request ends in
    this session. Raises UnavailableError if the verifier cancelled the session.
    """
    while not reply.ended:
        await feed.wait_news(reply.told)
        if feed.reason is FinishReason.CANCELLED:
            raise UnavailableError(
                "the verifier ended the session without an answer", reason="SESSION_LOST"
            )
        for message in reply.catch_up(feed.reason):
            yield message


def verifier_lost_error(verifier_id: VerifierId) -> UnavailableError:
    """Return the error of the sessions of a verifier that was lost."""
    return UnavailableError(f"verifier {verifier_id} was lost", reason="VERIFIER_LOST")


class VerifierStreams:
    """Session streams from one router to its verifiers. They report lost and draining peers to the
    registry and the rebalancer.
    """

    def __init__(
        self,
        metrics: RouterMetrics,
        *,
        registry: PeerRegistry,
        rebalancer: DrafterRebalancer,
        clock: Callable[[], float],
        on_emitted: Callable[[list[EmittedRow]], None],
        on_draining: Callable[[VerifierPeer, float], None],
    ) -> None:
        """Create an object without streams. `on_emitted` logs new token ids of logged requests
        before clients receive them. `on_draining` is called with a verifier that is about to stop
        and the seconds until then.
        """
        self.pacer = WakeupPacer(clock)
        """Pacer of the messages to clients, shared by all streams."""
        self._metrics = metrics
        self._registry = registry
        self._rebalancer = rebalancer
        self._clock = clock
        self._on_emitted = on_emitted
        self._on_draining = on_draining
        self._streams: dict[VerifierPeer, SessionStream[SessionFeed]] = {}
        """Streams by peer record. The address is no key, because another verifier may get the
        address of one that was removed.
        """

    async def close(self) -> None:
        """Close all streams."""
        for stream in self._streams.values():
            await stream.close()

    def drop_verifier(self, verifier_id: VerifierId) -> None:
        """Close the stream to a verifier that was lost, which ends its sessions."""
        for peer, stream in self._streams.items():
            if peer.info is not None and peer.info.verifier_id == verifier_id:
                stream.close_in_background()

    def get_stream(self, peer: VerifierPeer) -> SessionStream[SessionFeed]:
        """Return the stream to a verifier; create it if there is none."""
        stream = self._streams.get(peer)
        if stream is None:
            known = self._registry.verifiers
            for gone in [other for other in self._streams if known.get(other.address) is not other]:
                # The peer was lost before it was removed, so its stream has no open session.
                del self._streams[gone]
            stream = self._streams[peer] = self._make(peer)
        return stream

    def _make(self, peer: VerifierPeer) -> SessionStream[SessionFeed]:
        assert peer.control is not None, peer.address
        sink = EventDispatcher(
            self._metrics,
            self.pacer,
            self._clock,
            on_events=lambda: self._registry.record_heartbeat(peer),
            on_drafter_lost=partial(self._drafter_lost, peer),
            on_emitted=self._on_emitted,
        )
        return SessionStream(
            peer.control.sessions,
            sink.deliver_events,
            on_lost=lambda error: self._registry.mark_verifier_lost(peer, error.message),
            on_draining=lambda seconds: self._on_draining(peer, seconds),
        )

    def _drafter_lost(self, peer: VerifierPeer, drafter_id: DrafterId) -> None:
        self._registry.mark_drafter_detached(peer, drafter_id)
        self._rebalancer.wake_up()
