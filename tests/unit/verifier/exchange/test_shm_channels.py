"""The verifier's end of lanes: what a drafter does wrong costs that drafter, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from outrider_verifier.exchange.message_checks import DrafterMessageChecker, VerifierIdentity
from outrider_verifier.exchange.shm_channels import DrafterShmChannels
from outrider_verifier.state.commands import (
    MalformedMessage,
    ProposalsReceived,
    ReplicaAnswered,
    SessionsLostByDrafter,
)

from outrider.ids import VerifierId
from outrider.transport.shm import RING_POLL_S, ShmChannel
from outrider.transport.shm.channel import MAX_PART_BYTES
from outrider.wire.codec import (
    decode_verifier_messages,
    encode_drafter_message,
    encode_drafter_messages,
    encode_verdicts,
)
from outrider.wire.messages import (
    EncodedMessage,
    Heartbeat,
    MemoryKind,
    Proposals,
    ReplicaReady,
    ReplicaRefused,
    SessionEnd,
    SessionsLost,
    ShmAnswer,
    TensorDtype,
    Verdict,
    Verdicts,
    Welcome,
    WireTensor,
)
from tests.fakes.shm_channels import lane_pair
from tests.wire.samples import CHAIN

LINK = 7


class Rig:
    """Lanes with one link, whose drafter is `theirs`."""

    def __init__(self, ours: ShmChannel, theirs: ShmChannel) -> None:
        self.theirs = theirs
        self.lost: list[int] = []
        identity = VerifierIdentity(
            welcome=Welcome(protocol_version=1, verifier_id=VerifierId("v"), incarnation="i"),
            vocab_size=49152,
            tokenizer_hash="",
            feature_fingerprint="",
            max_tree_nodes=64,
        )
        checks = DrafterMessageChecker(identity)
        self.lanes = DrafterShmChannels(
            checks, queue_bytes=1 << 20, on_lost=self.lost.append, pin=lambda memory: True
        )
        self.lanes.attach_channel(LINK, ours)

    @property
    def invalid(self) -> int:
        return self.lanes.counters["messages_invalid"]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with lane_pair() as (ours, theirs):
        yield Rig(ours, theirs)


def test_messages_become_commands_in_order(rig: Rig) -> None:
    together = [Proposals.of_proposals([CHAIN]), SessionsLost((3,)), Heartbeat(1)]
    rig.theirs.send(*encode_drafter_messages(together))
    offered, lost = rig.lanes.receive_commands(rig.lanes.readers)
    assert isinstance(offered, ProposalsReceived) and offered.valid.tolist() == [True]
    assert lost == SessionsLostByDrafter(LINK, (3,))


def test_garbage_is_counted_and_what_follows_it_is_heard(rig: Rig) -> None:
    lost = encode_drafter_message(SessionsLost((3,)))
    rig.theirs.send(b"\xff\xff garbage", b"", encode_drafter_message(ShmAnswer(True)), lost)
    garbled = [MalformedMessage(LINK)] * 2
    assert rig.lanes.receive_commands(rig.lanes.readers) == [
        *garbled,
        SessionsLostByDrafter(LINK, (3,)),
    ]
    assert rig.invalid == 3
    assert rig.lost == []


def test_answers_to_offers_are_commands(rig: Rig) -> None:
    answers = [ReplicaReady(memory=MemoryKind.HOST), ReplicaRefused(reason="no memory")]
    rig.theirs.send(*encode_drafter_messages([*answers, SessionsLost((3,))]))
    found = rig.lanes.receive_commands(rig.lanes.readers)
    assert found == [
        *(ReplicaAnswered(LINK, answer) for answer in answers),
        SessionsLostByDrafter(LINK, (3,)),
    ]
    assert rig.invalid == 0


def test_a_drafter_that_leaves_is_lost_once_and_told_nothing(rig: Rig) -> None:
    (reader,) = rig.lanes.readers
    rig.theirs.close()
    assert rig.lanes.receive_commands([reader]) == []
    rig.lanes.send_messages(LINK, [SessionEnd(handle=3)])
    rig.lanes.flush()
    assert rig.lost == [LINK]
    # Nothing may go by another way before the hub knows.
    assert rig.lanes.has_channel(LINK)
    assert rig.lanes.readers == []
    rig.lanes.detach_channel(LINK)
    rig.lanes.detach_channel(LINK)
    assert not rig.lanes.has_channel(LINK)


def test_a_drafter_that_does_not_read_is_lost_when_too_much_waits(rig: Rig) -> None:
    piece = EncodedMessage((bytes(30_000),))
    for _ in range(200):
        rig.lanes.send_messages(LINK, [piece])
    assert rig.lost == [LINK]
    assert rig.lanes.counters["drafters_overflowed"] == 1


def test_what_waited_goes_on_in_order_when_there_is_room(rig: Rig) -> None:
    for handle in range(3000):
        rig.lanes.send_messages(LINK, [SessionEnd(handle=handle)])
    assert rig.lanes.writers
    heard: list[int] = []
    while len(heard) < 3000:
        for frame in rig.theirs.receive():
            for message in decode_verifier_messages(frame):
                assert isinstance(message, SessionEnd)
                heard.append(message.handle)
        rig.lanes.flush()
    assert heard == list(range(3000))
    assert rig.lanes.writers == []
    assert rig.lost == []


def test_a_full_ring_is_looked_at_now_and_then_and_a_full_socket_waited_for(rig: Rig) -> None:
    assert rig.lanes.poll_timeout(None) is None and rig.lanes.poll_timeout(0.5) == 0.5
    rig.lanes.send_frames(LINK, *[bytes(MAX_PART_BYTES)] * 5)
    # The socket could be written to: who waits for that would not rest.
    assert rig.lanes.writers == []
    assert rig.lanes.poll_timeout(None) == rig.lanes.poll_timeout(0.5) == RING_POLL_S
    assert rig.lanes.poll_timeout(0.0) == 0.0
    heard = len(rig.theirs.receive())
    while heard < 5:
        rig.lanes.flush()
        heard += len(rig.theirs.receive())
    assert rig.lanes.poll_timeout(None) is None
    for handle in range(3000):
        rig.lanes.send_messages(LINK, [SessionEnd(handle=handle)])
    assert rig.lanes.writers and rig.lanes.poll_timeout(None) is None


def test_large_messages_go_alone_and_in_their_order() -> None:
    ends = [SessionEnd(handle=handle) for handle in range(4)]
    features = WireTensor(dtype=TensorDtype.FLOAT32, data=np.ones((20, 1024), dtype=np.float32))
    verdict = Verdict(
        handle=1,
        start=0,
        tokens=np.arange(20, dtype=np.int32),
        prefix_digest=5,
        feature_start=0,
        features=features,
        draft_wanted=True,
    )
    large = EncodedMessage(encode_verdicts(Verdicts.of_verdicts([verdict])))
    with lane_pair() as (ours, theirs):
        rig = Rig(ours, theirs)
        rig.lanes.send_messages(LINK, [ends[0], ends[1], large, ends[2], large, ends[3]])
        frames = rig.theirs.receive()
    heard = [message for frame in frames for message in decode_verifier_messages(frame)]
    workload_classes = [type(message).__name__ for message in heard]
    assert workload_classes == [
        "SessionEnd",
        "SessionEnd",
        "Verdicts",
        "SessionEnd",
        "Verdicts",
        "SessionEnd",
    ]
    assert len(frames) == 5
