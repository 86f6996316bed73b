"""One contract, every transport: `pytest --transport inproc,grpc,ray` runs it over each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from outrider.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InternalError,
    InvalidMessageError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.ids import SessionId
from outrider.spec.plan import SpeculationPlan
from outrider.transport.heartbeat import HeartbeatConnection
from outrider.wire.messages import (
    FinishReason,
    SessionMove,
    SessionMoved,
    SessionOpen,
    VerifierMessage,
    Welcome,
)
from tests.integration.contract_support import (
    NOTICE_S,
    Peer,
    frames_of,
    next_verdict,
    no_sessions,
    only_verdict,
    open_idle,
    tasks_at_rest,
    until,
)
from tests.integration.fake_endpoints import DRAFTER, features, hello, proposal, spec
from tests.integration.transport_harness import Harness
from tests.waiting import PATIENCE_S, soon


async def test_hello_is_answered_by_welcome(peer: Peer) -> None:
    await peer.connection.send(hello())
    message: VerifierMessage = await asyncio.wait_for(peer.connection.receive(), 20)
    assert isinstance(message, Welcome)


async def test_messages_arrive_once_and_in_order(peer: Peer) -> None:
    async def send_all() -> None:
        for index in range(400):
            await peer.connection.send(proposal(index))

    sending = asyncio.create_task(send_all())
    digests = [(await next_verdict(peer.connection)).prefix_digest for _ in range(400)]
    await sending
    assert digests == list(range(400))


async def test_a_verdict_arrives_as_it_was_sent(peer: Peer) -> None:
    sent = replace(proposal(3), digests=np.array([2**63], dtype=np.uint64))
    await peer.connection.send(sent)
    verdict = await next_verdict(peer.connection)
    assert verdict.prefix_digest == 2**63
    assert verdict.tokens.tolist() == sent.tokens.tolist()
    assert verdict.draft_wanted
    assert verdict.features is None


async def test_features_of_several_megabytes_arrive_intact(peer: Peer) -> None:
    rows = 8192
    await peer.connection.send(proposal(1, "features", rows))
    verdict = await next_verdict(peer.connection)
    assert verdict.features is not None
    np.testing.assert_array_equal(verdict.features.data, features(rows))


async def test_a_malformed_frame_costs_the_verifier_one_message(peer: Peer) -> None:
    await frames_of(peer.connection).send(b"\xff\xff garbage")
    await peer.connection.send(proposal(5))
    assert (await next_verdict(peer.connection)).prefix_digest == 5
    assert (await peer.info()).rounds_total == 1


async def test_a_malformed_frame_costs_the_drafter_one_message(peer: Peer) -> None:
    await peer.connection.send(proposal(6, "garbage"))
    with pytest.raises(InvalidMessageError):
        await asyncio.wait_for(peer.connection.receive(), 20)
    assert (await next_verdict(peer.connection)).prefix_digest == 6


async def test_a_peer_that_does_not_read_makes_the_sender_wait(peer: Peer) -> None:
    await peer.connection.send(proposal(0, "sleep", 1_500_000))
    frames, chunk, sent = frames_of(peer.connection), b"\xff" * (1 << 20), 0

    async def send_much() -> None:
        nonlocal sent
        for _ in range(128):
            await frames.send(chunk)
            sent += 1

    sending = asyncio.create_task(send_much())
    await asyncio.wait((sending,), timeout=1.0)
    assert not sending.done() and sent < 100, "the sender ran ahead of its peer without bound"
    await asyncio.wait_for(sending, 60)
    await peer.connection.send(proposal(1))
    assert (await next_verdict(peer.connection)).prefix_digest == 1
    assert (await peer.info()).rounds_total == 128


async def test_a_drafter_that_does_not_read_makes_the_verifier_wait(peer: Peer) -> None:
    await peer.connection.send(proposal(0, "flood", 64))
    await asyncio.sleep(0.5)
    digests = [(await next_verdict(peer.connection)).prefix_digest for _ in range(64)]
    assert digests == list(range(64))


async def test_a_cancelled_receive_loses_nothing(peer: Peer) -> None:
    await peer.connection.send(proposal(7, "late", 300_000))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(peer.connection.receive(), 0.05)
    assert (await next_verdict(peer.connection)).prefix_digest == 7


async def test_closing_delivers_what_was_sent_and_ends_the_exchange(peer: Peer) -> None:
    for index in range(50):
        await peer.connection.send(proposal(index, "silent"))
    await peer.connection.close()
    await peer.connection.close()

    async def all_seen() -> bool:
        info = await peer.info()
        return info.tokens_total == 50 and not info.drafters

    await until(all_seen)


async def test_a_closed_connection_is_lost_to_its_own_side(peer: Peer) -> None:
    receiving = asyncio.create_task(peer.connection.receive())
    await asyncio.sleep(0.05)
    await peer.connection.close()
    with pytest.raises(ConnectionLostError):
        await soon(receiving)
    with pytest.raises(ConnectionLostError):
        await peer.connection.receive()
    with pytest.raises(ConnectionLostError):
        await peer.connection.send(proposal(1))


async def test_an_exchange_that_the_verifier_ends_is_lost_to_the_drafter(peer: Peer) -> None:
    await peer.connection.send(proposal(0))
    await peer.connection.send(proposal(0, "quit"))
    assert (await next_verdict(peer.connection)).prefix_digest == 0
    with pytest.raises(ConnectionLostError):
        await asyncio.wait_for(peer.connection.receive(), 20)

    async def sending_fails() -> bool:
        try:
            await peer.connection.send(proposal(1))
        except ConnectionLostError:
            return True
        return False

    await until(sending_fails)


async def test_a_handshake_misfit_reaches_the_drafter_as_such(peer: Peer) -> None:
    await peer.connection.send(hello(vocab_size=999))
    with pytest.raises(FailedPreconditionError, match="must be 1000, got 999") as caught:
        await asyncio.wait_for(peer.connection.receive(), 20)
    assert caught.value.reason == "VOCAB_MISMATCH"


async def test_a_bug_in_the_verifier_shows_no_details(peer: Peer) -> None:
    await peer.connection.send(proposal(0, "bug"))
    with pytest.raises(InternalError) as caught:
        await asyncio.wait_for(peer.connection.receive(), 20)
    assert "secret" not in caught.value.message


async def test_exchanges_are_independent(peer: Peer) -> None:
    other = await peer.harness.dialer.exchange(peer.address)
    await other.send(proposal(1))
    await peer.connection.send(proposal(2))
    assert (await next_verdict(other)).prefix_digest == 1
    assert await peer.exchanges() == 2
    await other.close()
    assert (await next_verdict(peer.connection)).prefix_digest == 2


async def test_an_address_without_a_verifier_is_unavailable(harness: Harness) -> None:
    with pytest.raises(UnavailableError):
        await harness.dialer.exchange("127.0.0.1:1")
    control = await harness.dialer.verifier("127.0.0.1:1")
    with pytest.raises(UnavailableError):
        await control.info()
    with pytest.raises(UnavailableError):
        await anext(aiter(control.open_session(spec("count"))))


async def test_a_session_streams_its_events_in_order(peer: Peer) -> None:
    control = await peer.harness.dialer.verifier(peer.address)
    events = [event async for event in control.open_session(spec("count", 20))]
    assert [event.tokens for event in events] == [(i, i + 1) for i in range(20)]
    assert [event.finish_reason for event in events] == [None] * 19 + [FinishReason.LENGTH]
    assert (await peer.info()).sessions == 0


async def test_closing_a_session_stream_closes_the_session(peer: Peer) -> None:
    stream = await open_idle(peer)
    assert (await peer.info()).sessions == 1
    await stream.aclose()
    await until(lambda: no_sessions(peer))


async def test_cancelling_the_reader_of_a_session_closes_it(peer: Peer) -> None:
    stream = await open_idle(peer)
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.1)
    reading.cancel()
    await asyncio.wait((reading,))
    await stream.aclose()
    await until(lambda: no_sessions(peer))


async def test_an_idle_session_outlives_the_heartbeat_timeout(peer: Peer) -> None:
    stream = await open_idle(peer)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(2.5)
    assert not waiting.done()
    control = await peer.harness.dialer.verifier(peer.address)
    await control.close_session(SessionId("idle"))
    assert (await soon(waiting)).finish_reason is FinishReason.CANCELLED
    await stream.aclose()


async def test_an_idle_exchange_outlives_the_heartbeat_timeout(peer: Peer) -> None:
    receiving = asyncio.create_task(peer.connection.receive())
    await asyncio.sleep(2.5)
    assert not receiving.done()
    await peer.connection.send(proposal(3))
    message = await soon(receiving)
    assert only_verdict(message).prefix_digest == 3


async def test_a_move_of_a_session_is_answered_on_its_stream(peer: Peer) -> None:
    connection = await (await peer.harness.dialer.verifier(peer.address)).sessions()
    await connection.send(SessionOpen(5, spec("idle")))
    await connection.send(SessionMove(5, DRAFTER))
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(message := await connection.receive(), SessionMoved):
            pass
    # The fake keeps it where it is: nowhere.
    assert message == SessionMoved(5, None)
    await connection.close()


async def test_closing_a_session_is_idempotent(peer: Peer) -> None:
    control = await peer.harness.dialer.verifier(peer.address)
    await control.close_session(SessionId("nobody"))
    await control.close_session(SessionId("nobody"))


async def test_errors_of_a_session_keep_their_type(peer: Peer) -> None:
    control = await peer.harness.dialer.verifier(peer.address)
    with pytest.raises(InvalidRequestError, match="must be at most 4") as invalid:
        await anext(aiter(control.open_session(spec("invalid"))))
    assert type(invalid.value) is InvalidRequestError and invalid.value.reason == "TOO_LONG"
    with pytest.raises(ResourceExhaustedError) as full:
        await anext(aiter(control.open_session(spec("full"))))
    assert full.value.retry_after_s == pytest.approx(1.5)
    assert full.value.reason == "KV_FULL"
    with pytest.raises(InternalError) as bug:
        await anext(aiter(control.open_session(spec("bug"))))
    assert "secret" not in bug.value.message


async def test_errors_of_a_control_call_keep_their_type(peer: Peer) -> None:
    control = await peer.harness.dialer.verifier(peer.address)
    with pytest.raises(NotFoundError, match="no session nobody") as caught:
        await control.set_plan(SessionId("nobody"), SpeculationPlan())
    assert caught.value.reason == "NO_SESSION"


async def test_a_drafter_is_attached_and_detached_by_address(harness: Harness) -> None:
    control = await harness.dialer.drafter(await harness.drafter())
    await control.attach("verifier:1")
    await control.attach("verifier:1")
    assert (await control.info()).verifiers == ("verifier:1",)
    await control.detach("verifier:1")
    await control.detach("verifier:1")
    assert (await control.info()).verifiers == ()
    for draining in (True, True, False):
        await control.set_draining(draining)
        assert (await control.info()).draining is draining
    with pytest.raises(FailedPreconditionError, match="another vocabulary"):
        await control.attach("misfit")


async def test_a_killed_verifier_is_noticed(harness: Harness) -> None:
    address = await harness.mortal_verifier()
    connection = await harness.dialer.exchange(address)
    stream = await open_idle(Peer(harness, address, connection))
    receiving = asyncio.create_task(connection.receive())
    waiting = asyncio.create_task(anext(stream))
    await connection.send(proposal(0, "silent"))
    await harness.kill(address)
    with pytest.raises(ConnectionLostError):
        await asyncio.wait_for(receiving, NOTICE_S)
    with pytest.raises(ConnectionLostError):
        await asyncio.wait_for(waiting, NOTICE_S)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(harness.dialer.exchange(address), NOTICE_S)
    await connection.close()


async def test_a_frozen_verifier_is_noticed(harness: Harness) -> None:
    address = await harness.mortal_verifier()
    connection = await harness.dialer.exchange(address)
    stream = await open_idle(Peer(harness, address, connection))
    receiving = asyncio.create_task(connection.receive())
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.1)
    await harness.freeze(address)
    with pytest.raises(ConnectionLostError, match="nothing heard from"):
        await asyncio.wait_for(receiving, NOTICE_S)
    if harness.separate:  # the sessions of one event loop cannot freeze alone
        with pytest.raises(ConnectionLostError):
            await asyncio.wait_for(waiting, NOTICE_S)
    else:
        waiting.cancel()
        await asyncio.wait((waiting,))
    await connection.close()


async def test_a_silent_drafter_is_noticed(peer: Peer) -> None:
    await peer.connection.send(proposal(0))
    await next_verdict(peer.connection)
    assert await peer.exchanges() == 1
    assert isinstance(peer.connection, HeartbeatConnection)
    peer.connection.stop_heartbeats()

    async def gone() -> bool:
        return await peer.exchanges() == 0

    await until(gone)


async def test_a_thousand_cancelled_streams_leak_nothing(peer: Peer) -> None:
    control = await peer.harness.dialer.verifier(peer.address)

    async def open_and_cancel(index: int) -> None:
        stream = control.open_session(spec(f"idle-{index}"))
        assert isinstance(stream, AsyncGenerator)
        async with aclosing(stream):
            await anext(stream)

    async def batch(start: int) -> None:
        await asyncio.gather(*(open_and_cancel(start + i) for i in range(50)))

    await batch(0)
    await until(lambda: no_sessions(peer))
    tasks_before = await tasks_at_rest()
    for start in range(50, 1000, 50):
        await batch(start)
    await until(lambda: no_sessions(peer))

    async def settled() -> bool:
        return await tasks_at_rest() <= tasks_before

    await until(settled)


async def test_a_hundred_closed_exchanges_leak_nothing(peer: Peer) -> None:
    await peer.connection.send(hello())
    await peer.connection.receive()
    tasks_before = await tasks_at_rest()
    for index in range(100):
        connection = await peer.harness.dialer.exchange(peer.address)
        await connection.send(proposal(index))
        await next_verdict(connection)
        await connection.close()

    async def settled() -> bool:
        return await peer.exchanges() == 1 and await tasks_at_rest() <= tasks_before

    await until(settled)
