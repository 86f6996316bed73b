"""One session at a verifier, from opening to its last event, as messages for the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from outrider.errors import InternalError, OutriderError, UnavailableError
from outrider.ids import VerifierId
from outrider.transport.base import VerifierControl
from outrider.transport.status import copy_of
from outrider.wire.inference import Delta, FinishInfo, Usage
from outrider.wire.messages import FinishReason, SessionEvent, SessionSpec
from outrider_router.journal import Entry
from outrider_router.output import OutputAssembler

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait for a verifier to close a session; a lost one never does."""


async def pump(
    control: VerifierControl,
    spec: SessionSpec,
    entry: Entry,
    on_event: Callable[[SessionEvent], None],
) -> None:
    """Carry a session's events into the entry's inbox, then its end or its error.

    `on_event` hears each event when it arrives.

    Decouples the verifier from a slow client: rounds that came meanwhile become one message.
    """
    try:
        async with _closing(control, spec) as events:
            async for event in events:
                on_event(event)
                entry.put(event)
                if event.finish_reason is not None:
                    return
        entry.put(UnavailableError("the verifier ended the session early", reason="SESSION_LOST"))
    except OutriderError as error:
        entry.put(error)
    except Exception:
        logger.exception("session failed", extra={"request_id": entry.request_id})
        entry.put(InternalError("internal error", reason="INTERNAL"))


def _closing(
    control: VerifierControl, spec: SessionSpec
) -> aclosing[AsyncGenerator[SessionEvent, None]]:
    events = control.open_session(spec)
    assert isinstance(events, AsyncGenerator), "closing the iterator closes the session"
    return aclosing(events)


async def stop_pump(task: asyncio.Task[None]) -> None:
    """End a session at the verifier, without waiting for one that is lost."""
    task.cancel()
    await asyncio.wait((task,), timeout=CLOSE_S)


async def next_events(entry: Entry) -> list[SessionEvent]:
    """Everything that arrived since the last call, at least one event.

    Raises the session's error once what came before it was returned.
    """
    if entry.ended is not None:
        raise copy_of(entry.ended)
    arrivals = [await entry.inbox.get()]
    while not entry.inbox.empty():
        arrivals.append(entry.inbox.get_nowait())
    events: list[SessionEvent] = []
    for arrival in arrivals:
        if isinstance(arrival, OutriderError):
            if not events:
                raise copy_of(arrival)
            entry.inbox.put_nowait(arrival)
            break
        events.append(arrival)
    return events


async def session_messages(
    entry: Entry,
    assembler: OutputAssembler,
    *,
    prompt_tokens: int,
) -> AsyncGenerator[Delta | FinishInfo, None]:
    """What the client hears of a session: deltas, then the finish."""
    while True:
        events = await next_events(entry)
        last = events[-1]
        if last.finish_reason is FinishReason.CANCELLED:
            raise UnavailableError("the verifier gave the session up", reason="SESSION_LOST")
        ids = [token for event in events for token in event.tokens]
        stopped = last.finish_reason is FinishReason.STOP_TOKEN
        piece = assembler.push(ids, last_is_stop=stopped)
        reason = last.finish_reason
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
                stats=last.stats,
                stop_string=assembler.stop_string,
                stop_token_id=ids[-1] if reason is FinishReason.STOP_TOKEN else None,
            )
            return


def lost_error(verifier_id: VerifierId) -> UnavailableError:
    """The error of the streams whose verifier died."""
    return UnavailableError(
        f"verifier {verifier_id} was lost; the answer is incomplete", reason="VERIFIER_LOST"
    )
