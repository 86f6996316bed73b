"""One session at a verifier, from opening to its last event, as messages for the client.

What a round emitted arrives as one message for all sessions. Its rows are appended to where their
clients will look; a client's stream sends whatever is there by the time it runs, so that rounds
which came meanwhile become one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from outrider.errors import OutriderError, UnavailableError
from outrider.ids import DrafterId, VerifierId
from outrider.transport.status import copy_of
from outrider.wire.inference import Delta, FinishInfo, Usage
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    MALFORMED_ROW,
    REASONS,
    FinishReason,
    SessionEvents,
)
from outrider_router.journal import Entry
from outrider_router.log_records import Row
from outrider_router.metrics import RouterMetrics
from outrider_router.output import OutputAssembler
from outrider_router.pacing import Pacer

logger = logging.getLogger(__name__)


class Feed:
    """What a session has said; its request reads it, the verifier's stream fills it."""

    __slots__ = ("_pacer", "_turn", "_waiter", "entry", "error", "reason", "sent")

    def __init__(self, entry: Entry, pacer: Pacer) -> None:
        """`pacer` hears when the reader comes back for more."""
        self.entry = entry
        self._pacer = pacer
        self.sent = len(entry.emitted)
        """Ids of the entry that were read."""
        self.reason: FinishReason | None = None
        """Set by the session's last event."""
        self.error: OutriderError | None = None
        """Why the session failed; what came before is read first."""
        self._turn = False
        """Whether the pacer has let the reader go on."""
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> bool:
        """Let the reader look again; whether it was waiting."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return False
        waiter.set_result(None)
        self._turn = True
        return True

    def fail(self, error: OutriderError) -> None:
        """The session was refused or failed, or its verifier is lost."""
        self.error = error
        self.wake()

    def moved(self, drafter_id: DrafterId | None) -> None:
        """The verifier has said who drafts for the session."""
        entry = self.entry
        if entry.moving_to not in (None, drafter_id):
            entry.refused_moves += 1
        entry.drafter_id, entry.moving_to = drafter_id, None

    def leave(self) -> None:
        """Nobody reads any more."""
        self._pacer.came_back(self)

    def interrupt(self, _error: OutriderError) -> None:
        """The request has ended otherwise; `Entry.ended` says why."""
        self.wake()

    async def take(self) -> list[int]:
        """All ids that have arrived and were not read; waits for some, or for the end.

        Raises the request's error at once, the session's once everything before it was read.
        """
        entry = self.entry
        while True:
            if entry.ended is not None:
                raise copy_of(entry.ended)
            more = len(entry.emitted) > self.sent
            # First tokens and ends do not wait for their turn.
            if self.reason is not None or (more and (self._turn or not self.sent)):
                self._turn = False
                ids = entry.emitted[self.sent :]
                self.sent += len(ids)
                return ids
            if self.error is not None and not more:
                raise copy_of(self.error)
            # Coming back may wake this very reader.
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            self._pacer.came_back(self, more=more)
            await waiter


class EventSink:
    """Takes the events of one verifier to the feeds of its sessions."""

    def __init__(
        self,
        metrics: RouterMetrics,
        pacer: Pacer,
        clock: Callable[[], float],
        *,
        on_events: Callable[[], None],
        on_drafter_lost: Callable[[DrafterId], None],
        on_emitted: Callable[[list[Row]], None],
    ) -> None:
        """`on_events` hears of every message: a sign of life. `on_emitted` hears of a message's
        ids of entries with a number, before any reader does."""
        self._metrics = metrics
        self._pacer = pacer
        self._clock = clock
        self._on_events = on_events
        self._on_drafter_lost = on_drafter_lost
        self._on_emitted = on_emitted

    def deliver(self, events: SessionEvents, feeds: Mapping[int, Feed]) -> None:
        """Append each row to its session's feed and wake its reader: at once for a first token and
        for an end, otherwise at the pacer's pace."""
        now = self._clock()
        self._on_events()
        self._metrics.add_events(events)
        tokens = events.tokens.tolist()
        woken: list[Feed] = []
        waits: list[float] = []
        gaps: list[float] = []
        logged: list[Row] = []
        start = 0
        for handle, count, round_id, reason, flags, proposed, accepted in zip(
            events.handles.tolist(),
            events.counts.tolist(),
            events.round_ids.tolist(),
            events.finish_reasons.tolist(),
            events.flags.tolist(),
            events.proposed.tolist(),
            events.accepted.tolist(),
            strict=True,
        ):
            end = start + count
            feed = feeds.get(handle)
            if feed is None or reason == MALFORMED_ROW:
                start = end
                continue
            entry = feed.entry
            if count:
                if entry.number:
                    logged.append((entry.number, len(entry.emitted), tokens[start:end]))
                entry.emitted += tokens[start:end]
                if round_id:
                    entry.tally.add_round(
                        emitted=count, flags=flags, proposed=proposed, accepted=accepted
                    )
                if entry.first_token is None:
                    entry.first_token = now
                    waits.append(now - entry.started)
                    feed.wake()
                else:
                    gaps.append((now - entry.last_token) / count)
                entry.last_token = now
            if bool(flags & DRAFTER_ATTACHED) is not entry.drafter_attached:
                self._note_drafter(entry)
            if reason:
                feed.reason = REASONS[reason]
                feed.wake()
            woken.append(feed)
            start = end
        # Readers that were woken above run later.
        if logged:
            self._on_emitted(logged)
        self._pacer.wake(woken)
        self._metrics.time_to_first_token.observe(*waits)
        self._metrics.inter_token_latency.observe(*gaps)

    def _note_drafter(self, entry: Entry) -> None:
        entry.drafter_attached = not entry.drafter_attached
        if not entry.drafter_attached and entry.drafter_id is not None:
            self._metrics.drafter_detached_sessions.inc()
            logger.warning(
                "session lost its drafter",
                extra={"request_id": entry.request_id, "drafter_id": entry.drafter_id},
            )
            self._on_drafter_lost(entry.drafter_id)


async def session_messages(
    feed: Feed,
    assembler: OutputAssembler,
    *,
    prompt_tokens: int,
) -> AsyncGenerator[Delta | FinishInfo, None]:
    """What the client hears of a session: deltas, then the finish."""
    while True:
        ids = await feed.take()
        reason = feed.reason
        if reason is FinishReason.CANCELLED:
            raise UnavailableError("the verifier gave the session up", reason="SESSION_LOST")
        piece = assembler.push(ids, last_is_stop=reason is FinishReason.STOP_TOKEN)
        text = piece.text
        if reason is not None:
            text += assembler.finish()
        if assembler.stop_string is not None:
            reason = FinishReason.STOP_STRING
        if text or piece.token_ids:
            yield Delta(text=text, token_ids=piece.token_ids)
        if reason is not None:
            usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=assembler.num_tokens)
            yield FinishInfo(
                reason=reason,
                usage=usage,
                stats=feed.entry.tally.stats(),
                stop_string=assembler.stop_string,
                stop_token_id=ids[-1] if reason is FinishReason.STOP_TOKEN else None,
            )
            return


def lost_error(verifier_id: VerifierId) -> UnavailableError:
    """The error of the streams whose verifier died."""
    return UnavailableError(
        f"verifier {verifier_id} was lost; the answer is incomplete", reason="VERIFIER_LOST"
    )
