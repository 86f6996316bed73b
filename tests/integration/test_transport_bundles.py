"""Messages offered together: the same over every transport (part of the contract suite)."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import InvalidMessageError
from outrider.wire.bundles import join_messages
from outrider.wire.codec import encode_drafter_message
from outrider.wire.messages import VerifierMessage, Welcome
from tests.integration.contract_support import Peer, frames_of, next_verdict, only_verdict
from tests.integration.fake_endpoints import hello, proposal


async def test_messages_offered_together_arrive_once_and_in_order(peer: Peer) -> None:
    await peer.connection.send(hello())
    assert isinstance(await peer.connection.receive(), Welcome)
    assert peer.connection.try_send(*map(proposal, range(300)))
    await peer.connection.send(proposal(300))
    assert peer.connection.try_send(proposal(301), proposal(302))
    digests = [(await next_verdict(peer.connection)).prefix_digest for _ in range(303)]
    assert digests == list(range(303))


async def test_verdicts_offered_together_are_ready_together(peer: Peer) -> None:
    # More than one frame holds.
    await peer.connection.send(proposal(0, "together", 700))
    received: list[VerifierMessage] = []
    while len(received) < 700:
        received.append(await asyncio.wait_for(peer.connection.receive(), 20))
        received += peer.connection.receive_ready()
    verdicts = [only_verdict(message) for message in received]
    assert [verdict.prefix_digest for verdict in verdicts] == list(range(700))
    assert all(verdict.features is not None for verdict in verdicts)
    assert peer.connection.receive_ready() == []


async def test_malformed_proposals_among_others_cost_only_themselves(peer: Peer) -> None:
    encoded = [encode_drafter_message(proposal(index)) for index in range(6)]
    encoded[0], encoded[3] = b"\xff\xff garbage", encoded[3][:-1]
    (frame,) = join_messages(encoded)
    await frames_of(peer.connection).send(frame)
    digests = [(await next_verdict(peer.connection)).prefix_digest for _ in range(4)]
    assert digests == [1, 2, 4, 5]
    assert (await peer.info()).rounds_total == 2


async def test_malformed_verdicts_among_others_cost_only_themselves(peer: Peer) -> None:
    await peer.connection.send(proposal(0, "half garbage"))
    for digest in (0, 2):
        assert (await next_verdict(peer.connection)).prefix_digest == digest
        assert peer.connection.receive_ready() == []
        with pytest.raises(InvalidMessageError):
            await peer.connection.receive()
    assert (await next_verdict(peer.connection)).prefix_digest == 4
