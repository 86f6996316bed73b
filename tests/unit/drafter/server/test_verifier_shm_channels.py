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
    fails: bool = False
    """Whether no command can be done."""
    handled: list[ReplicaCommand] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    offered: list[bytes] = field(default_factory=list)
    """What was in the memory that came with offers."""
    steps: int = 2
    """Steps until a replica is built."""
    waits: bool = False
    """Whether a command waits, which then fails."""

    @property
    def has_work(self) -> bool:
        return self.waits or bool(self.offered)

    def take_offer(
        self, connection: int, offer: ReplicaOffer, descriptor: int | None
    ) -> ReplicaRefused | None:
        assert descriptor is not None
        self.offered.append(os.pread(descriptor, 4, 0))
        os.close(descriptor)
        return self.answer if isinstance(self.answer, ReplicaRefused) else None

    def build_step(self) -> tuple[int, ReplicaAnswer, int | None] | None:
        self.steps -= 1
        return (CONNECTION, self.answer, _memory(b"mine")) if self.steps == 0 else None

    def handle_command(self, connection: int, command: ReplicaCommand) -> None:
        if self.fails:
            raise InvalidMessageError("no such slot")
        self.handled.append(command)

    def run_waiting(self) -> list[tuple[int, str]]:
        return [(CONNECTION, "it has not come")] if self.waits else []

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


def test_an_offer_is_answered_with_memory_once_the_replica_is_built() -> None:
    replicas = ScriptedReplicas(ReplicaReady(memory=MemoryKind.DEVICE))
    with serving(replicas) as (channels, ours, lost):
        assert channels.poll_timeout(None) is None
        offer(ours)
        ours.send(*encode_verifier_messages([ROUND, SessionEnd(handle=3)]))
        # Others are served between the steps.
        assert channels.receive_messages(channels.readers) == [(CONNECTION, SessionEnd(handle=3))]
        channels.build_replica()
        timeout_s = channels.poll_timeout(None)
        assert timeout_s is not None and timeout_s < 0.01
        assert ours.receive() == []
        channels.build_replica()
        (frame,) = ours.receive()
        assert list(decode_drafter_messages(frame)) == [replicas.answer]
        descriptor = ours.take_descriptor()
        assert descriptor is not None and os.pread(descriptor, 4, 0) == b"mine"
        os.close(descriptor)
        assert (replicas.offered, replicas.handled, lost) == ([b"your"], [ROUND], [])
        channels.detach_channel(CONNECTION)
        assert replicas.closed == [CONNECTION]


def test_a_refusal_is_answered_at_once() -> None:
    replicas = ScriptedReplicas(ReplicaRefused(reason="no room"))
    with serving(replicas) as (channels, ours, lost):
        offer(ours)
        channels.receive_messages(channels.readers)
        (frame,) = ours.receive()
        assert list(decode_drafter_messages(frame)) == [replicas.answer]
        assert ours.take_descriptor() is None and lost == []


def test_a_drafter_without_replicas_refuses_offers_and_ignores_the_rest() -> None:
    names = [name for name, (kind, _) in SAMPLES.items() if kind == "verifier"]
    commands = [SAMPLES[name][1] for name in names if name.startswith("replica_")]
    with serving(None) as (channels, ours, lost):
        offer(ours)
        others = [each for each in commands if not isinstance(each, ReplicaOffer)]
        assert len({type(each) for each in others}) == 4
        ours.send(*encode_verifier_messages([*others, SessionEnd(handle=3)]))
        assert channels.receive_messages(channels.readers) == [(CONNECTION, SessionEnd(handle=3))]
        (frame,) = ours.receive()
        (answer,) = decode_drafter_messages(frame)
        assert isinstance(answer, ReplicaRefused)
        assert ours.take_descriptor() is None and lost == []


def test_a_replica_that_cannot_go_on_ends_its_connection() -> None:
    for replicas in (
        ScriptedReplicas(ReplicaRefused(reason="none"), fails=True),
        ScriptedReplicas(ReplicaRefused(reason="none"), waits=True),
    ):
        with serving(replicas) as (channels, ours, lost):
            ours.send(*encode_verifier_messages([ROUND, ReplicaSessionEnd(slot=1)]))
            assert channels.receive_messages(channels.readers) == []
            channels.run_replicas()
            assert lost == [CONNECTION]
            assert replicas.closed == [CONNECTION] * len(replicas.closed) != []
