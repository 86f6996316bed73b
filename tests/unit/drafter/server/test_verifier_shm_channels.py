"""The drafter's end of shared-memory channels: offers of replicas are answered, and a replica that
cannot go on ends its connection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.server.shm_channels import VerifierShmChannels

from outrider.errors import InvalidMessageError
from outrider.transport.shm import ShmChannel
from outrider.wire.codec import decode_drafter_messages, encode_verifier_messages
from outrider.wire.messages import (
    MemoryKind,
    ReplicaAnswer,
    ReplicaCommand,
    ReplicaOffer,
    ReplicaReady,
    ReplicaRefused,
    ReplicaRoundLaunched,
    ReplicaSessionEnd,
    SessionEnd,
)
from tests.fakes.shm_channels import lane_pair
from tests.wire.samples import REPLICA_OFFER, SAMPLES

CONNECTION = 7
ROUND = ReplicaRoundLaunched(rows=4, chunks=0, is_sampled=False)


@dataclass
class ScriptedReplicas:
    """Replicas that do as they are told by their fields."""

    answer: ReplicaAnswer
    goes_on: bool = True
    raises: bool = False
    handled: list[ReplicaCommand] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    offered: list[bytes] = field(default_factory=list)
    """What was in the memory that came with offers."""

    def make_replica(
        self, connection: int, offer: ReplicaOffer, descriptor: int | None
    ) -> tuple[ReplicaAnswer, int | None]:
        assert descriptor is not None
        self.offered.append(os.pread(descriptor, 4, 0))
        os.close(descriptor)
        if not isinstance(self.answer, ReplicaReady):
            return self.answer, None
        return self.answer, _memory(b"mine")

    def handle_command(self, connection: int, command: ReplicaCommand) -> bool:
        if self.raises:
            raise InvalidMessageError("no such slot")
        self.handled.append(command)
        return self.goes_on

    def close(self, connection: int) -> None:
        self.closed.append(connection)


def _memory(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


@contextmanager
def serving(
    replicas: ScriptedReplicas | None,
) -> Iterator[tuple[VerifierShmChannels, ShmChannel, list[int]]]:
    """A drafter's channels, the verifier's end of one, and the connections that were lost."""
    lost: list[int] = []
    with lane_pair() as (ours, theirs):
        channels = VerifierShmChannels(
            DrafterMetrics(),
            max_unsent=4,
            on_lost=lost.append,
            pin=lambda memory: True,
            replicas=replicas,
        )
        channels.attach_channel(CONNECTION, theirs)
        yield channels, ours, lost


def offer(ours: ShmChannel) -> None:
    """Make an offer, with memory."""
    memory = _memory(b"your")
    ours.send_descriptor(memory)
    os.close(memory)
    ours.send(*encode_verifier_messages([REPLICA_OFFER]))


def test_an_offer_is_answered_with_memory() -> None:
    replicas = ScriptedReplicas(ReplicaReady(memory=MemoryKind.DEVICE))
    with serving(replicas) as (channels, ours, lost):
        offer(ours)
        ours.send(*encode_verifier_messages([ROUND, SessionEnd(handle=3)]))
        assert channels.receive_messages(channels.readers) == [(CONNECTION, SessionEnd(handle=3))]
        (frame,) = ours.receive()
        assert list(decode_drafter_messages(frame)) == [replicas.answer]
        descriptor = ours.take_descriptor()
        assert descriptor is not None and os.pread(descriptor, 4, 0) == b"mine"
        os.close(descriptor)
        assert (replicas.offered, replicas.handled, lost) == ([b"your"], [ROUND], [])
        channels.detach_channel(CONNECTION)
        assert replicas.closed == [CONNECTION]


def test_a_drafter_without_replicas_refuses_offers_and_ignores_the_rest() -> None:
    names = [name for name, (kind, _) in SAMPLES.items() if kind == "verifier"]
    commands = [SAMPLES[name][1] for name in names if name.startswith("replica_")]
    with serving(None) as (channels, ours, lost):
        offer(ours)
        others = [each for each in commands if not isinstance(each, ReplicaOffer)]
        assert len(others) == 4
        ours.send(*encode_verifier_messages([*others, SessionEnd(handle=3)]))
        assert channels.receive_messages(channels.readers) == [(CONNECTION, SessionEnd(handle=3))]
        (frame,) = ours.receive()
        (answer,) = decode_drafter_messages(frame)
        assert isinstance(answer, ReplicaRefused)
        assert ours.take_descriptor() is None and lost == []


def test_a_replica_that_cannot_go_on_ends_its_connection() -> None:
    for replicas in (
        ScriptedReplicas(ReplicaRefused(reason="none"), goes_on=False),
        ScriptedReplicas(ReplicaRefused(reason="none"), raises=True),
    ):
        with serving(replicas) as (channels, ours, lost):
            ours.send(*encode_verifier_messages([ROUND, ReplicaSessionEnd(slot=1)]))
            assert channels.receive_messages(channels.readers) == []
            assert lost == [CONNECTION]
