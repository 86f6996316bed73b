"""A router's side of a stream of sessions: who hears of what, also when the verifier misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from outrider.errors import ConnectionLostError, InternalError, OutriderError, UnavailableError
from outrider.ids import DrafterId
from outrider.transport.framed_connection import router_end
from outrider.transport.heartbeat import HeartbeatConfig
from outrider.transport.in_process import make_byte_pipe
from outrider.transport.session_stream import SessionStream
from outrider.wire.codec import decode_sessions_request, encode_sessions_message
from outrider.wire.messages import (
    Heartbeat,
    MalformedOpen,
    SessionEvents,
    SessionFailure,
    SessionLeave,
    SessionMove,
    SessionMoved,
    SessionOpen,
    SessionsDraining,
    SessionsMessage,
    SessionsRequest,
)
from tests.integration.fake_endpoints import spec
from tests.waiting import soon, until

QUIET = HeartbeatConfig(interval_s=50.0, timeout_s=100.0)


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error: OutriderError | None = None
        self.drafters: list[DrafterId | None] = []

    def handle_drafter_change(self, drafter_id: DrafterId | None) -> None:
        self.drafters.append(drafter_id)

    def fail_session(self, error: OutriderError) -> None:
        assert self.error is None
        self.error = error


def deliver(events: SessionEvents, listeners: Mapping[int, Heard]) -> None:
    ends = np.cumsum(events.counts).tolist()
    for handle, end, count in zip(events.handles.tolist(), ends, events.counts, strict=True):
        if handle in listeners:
            listeners[handle].tokens += events.tokens[end - count : end].tolist()


def events(*rows: tuple[int, list[int], int]) -> SessionEvents:
    """Rows of (handle, tokens, finish reason)."""
    count = len(rows)
    return SessionEvents(
        handles=np.array([row[0] for row in rows], np.uint32),
        round_ids=np.zeros(count, np.uint32),
        counts=np.array([len(row[1]) for row in rows], np.uint32),
        tokens=np.array([token for row in rows for token in row[1]], np.int32),
        finish_reasons=np.array([row[2] for row in rows], np.uint8),
        flags=np.zeros(count, np.uint8),
        proposed=np.zeros(count, np.uint16),
        accepted=np.zeros(count, np.uint16),
    )


class Far:
    """The verifier's end as bytes, for one connection after the other."""

    def __init__(self) -> None:
        self.connections = 0
        self.end: Any = None
        self.up = asyncio.Event()
        self.up.set()

    async def connect(self) -> Any:
        await self.up.wait()
        self.connections += 1
        self.end, near = make_byte_pipe("verifier", "router")
        return router_end(near, QUIET)

    async def said(self) -> SessionsRequest | MalformedOpen:
        while self.end is None:
            await asyncio.sleep(0)
        while True:
            message = decode_sessions_request(await soon(self.end.receive()))
            if not isinstance(message, Heartbeat):
                return message

    async def say(self, message: SessionsMessage) -> None:
        await self.end.send(encode_sessions_message(message))
        await asyncio.sleep(0.01)


async def test_each_listener_hears_of_its_own_session() -> None:
    far, first, second = Far(), Heard(), Heard()
    stream = SessionStream(far.connect, deliver)
    stream.open_session(spec("a"), first)
    stream.open_session(spec("b"), second)
    openings = [await far.said(), await far.said()]
    one, two = (message.handle for message in openings if isinstance(message, SessionOpen))
    await far.say(events((one, [1, 2], 0), (two, [3], 3)))
    await far.say(events((one, [4], 0), (two, [5], 0)))
    assert (first.tokens, second.tokens) == ([1, 2, 4], [3])
    failure = SessionFailure(
        handle=one, code="UNAVAILABLE", kind="UnavailableError", message="m", reason="R"
    )
    await far.say(failure)
    await far.say(replace(failure, handle=99))
    assert type(first.error) is UnavailableError and first.error.reason == "R"
    assert second.error is None
    await stream.close()


async def test_a_row_without_sense_ends_its_session_alone() -> None:
    far, bad, good = Far(), Heard(), Heard()
    stream = SessionStream(far.connect, deliver)
    stream.open_session(spec("a"), bad)
    stream.open_session(spec("b"), good)
    await far.said()
    await far.said()
    await far.say(events((1, [-1], 0), (2, [7], 0)))
    assert isinstance(bad.error, InternalError)
    assert good.tokens == [7] and good.error is None
    assert await far.said() == SessionLeave(1)
    await stream.close()


async def test_columns_that_do_not_fit_lose_the_stream_and_the_next_opening_makes_another() -> None:
    far, first, second = Far(), Heard(), Heard()
    stream = SessionStream(far.connect, deliver)
    stream.open_session(spec("a"), first)
    await far.said()
    await far.say(replace(events((1, [7], 0)), flags=np.zeros(2, np.uint8)))
    assert isinstance(first.error, ConnectionLostError)
    far.end = None
    stream.open_session(spec("b"), second)
    opening = await far.said()
    assert isinstance(opening, SessionOpen) and far.connections == 2
    await far.say(events((opening.handle, [8], 0)))
    assert second.tokens == [8]
    await stream.close()
    assert isinstance(second.error, ConnectionLostError)


async def test_what_is_left_before_there_is_a_connection_is_left_on_it() -> None:
    far, heard = Far(), Heard()
    far.up.clear()
    stream = SessionStream(far.connect, deliver)
    opened = stream.open_session(spec("a"), heard)
    await asyncio.sleep(0)
    opened.leave_session()
    opened.leave_session()
    far.up.set()
    assert isinstance(await far.said(), SessionOpen)
    assert await far.said() == SessionLeave(1)
    await stream.close()
    assert heard.error is None


async def test_who_moves_a_session_hears_whose_it_is_and_nothing_after_leaving() -> None:
    far, heard = Far(), Heard()
    stream = SessionStream(far.connect, deliver)
    opened = stream.open_session(spec("a"), heard)
    assert isinstance(await far.said(), SessionOpen)
    opened.request_drafter(DrafterId("d"))
    assert await far.said() == SessionMove(1, DrafterId("d"))
    await far.say(SessionMoved(1, DrafterId("d")))
    await far.say(SessionMoved(1, None))
    await far.say(SessionMoved(99, DrafterId("d")))
    assert heard.drafters == ["d", None]
    opened.leave_session()
    opened.request_drafter(DrafterId("e"))
    await far.say(SessionMoved(1, DrafterId("d")))
    assert await far.said() == SessionLeave(1)
    await stream.close()
    assert heard.drafters == ["d", None] and far.end is not None


async def test_a_verifier_that_cannot_be_reached_fails_the_opening() -> None:
    async def refused() -> Any:
        raise UnavailableError("nobody there", reason="UNREACHABLE")

    stream, heard = SessionStream(refused, deliver), Heard()
    stream.open_session(spec("a"), heard)
    await until(lambda: heard.error is not None)
    assert heard.error is not None and heard.error.reason == "UNREACHABLE"
    await stream.close()


async def test_a_stream_that_need_not_last_ends_with_its_last_session() -> None:
    far = Far()
    stream = SessionStream(far.connect, deliver, lasting=False)
    first, second = stream.open_session(spec("a"), Heard()), stream.open_session(spec("b"), Heard())
    await far.said()
    before = len(asyncio.all_tasks())
    first.leave_session()
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == before
    second.leave_session()
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_late_frames_of_a_session_that_was_left_reach_nobody() -> None:
    far, old, new = Far(), Heard(), Heard()
    stream = SessionStream(far.connect, deliver)
    opened = stream.open_session(spec("a"), old)
    first = await far.said()
    assert isinstance(first, SessionOpen)
    await far.say(events((first.handle, [1, 2], 0)))
    opened.leave_session()
    stream.open_session(replace(spec("a"), epoch=1), new)
    assert isinstance(await far.said(), SessionLeave)
    second = await far.said()
    assert isinstance(second, SessionOpen) and second.handle != first.handle
    # The verifier had not read of the leave yet.
    await far.say(events((first.handle, [3], 0), (second.handle, [9], 0)))
    await far.say(events((first.handle, [4], 3)))
    assert (old.tokens, new.tokens) == ([1, 2], [9])
    await stream.close()


async def test_late_frames_of_a_stream_that_was_dropped_reach_nobody() -> None:
    far, old, new = Far(), Heard(), Heard()
    drains: list[float] = []
    stream = SessionStream(far.connect, deliver, on_draining=drains.append)
    stream.open_session(spec("a"), old)
    opening = await far.said()
    assert isinstance(opening, SessionOpen)
    end = far.end
    # These are in the pipe, or read but not looked at, when the stream is given up.
    for message in (events((opening.handle, [1], 0)), SessionsDraining(5.0)):
        await end.send(encode_sessions_message(message))
    stream.close_in_background()
    assert isinstance(old.error, ConnectionLostError)
    far.end = None
    stream.open_session(replace(spec("a"), epoch=1), new)
    again = await far.said()
    assert isinstance(again, SessionOpen) and again.handle != opening.handle
    assert old.tokens == [] and drains == []
    await far.say(events((again.handle, [7], 0)))
    await far.say(SessionsDraining(2.0))
    assert new.tokens == [7] and drains == [2.0]
    await stream.close()


async def test_who_watches_hears_of_a_loss_before_the_sessions_do_and_of_no_closing() -> None:
    far, order = Far(), list[str]()

    class Noting(Heard):
        def fail_session(self, error: OutriderError) -> None:
            order.append("session")

    stream = SessionStream(far.connect, deliver, on_lost=lambda error: order.append("stream"))
    stream.open_session(spec("a"), Noting())
    await far.said()
    await far.end.close()
    await until(lambda: order == ["stream", "session"])
    far.end = None
    stream.open_session(spec("b"), Noting())
    await far.said()
    stream.close_in_background()
    await asyncio.sleep(0.01)
    assert order == ["stream", "session", "session"]
    await stream.close()
