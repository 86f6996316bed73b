"""Replicas of verifiers: which offers are taken up, and what a hostile verifier can do with one."""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_drafter.gpu import replicas as module
from outrider_drafter.gpu.replicas import Replicas

from outrider.engine.device.exchange.draft_replica import DraftReplica
from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import (
    allocate_on_host,
    attach_buffer,
    map_host_memory,
    new_buffer,
)
from outrider.engine.heads import load_head
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import load_target
from outrider.errors import InvalidMessageError
from outrider.spec.sampling import SamplingParams
from outrider.timeline import record_timeline
from outrider.wire.messages import (
    MemoryKind,
    ReplicaAnswer,
    ReplicaBlocksAdded,
    ReplicaCommand,
    ReplicaOffer,
    ReplicaReady,
    ReplicaRefused,
    ReplicaRoundLaunched,
    ReplicaSessionBegin,
    ReplicaSessionEnd,
    TensorDtype,
)

CPU = torch.device("cpu")
CONNECTION = 3
GREEDY = SamplingParams().for_drafter()
BEGIN = ReplicaSessionBegin(slot=0, blocks=(1,), sampling=GREEDY, num_rows=0)
ROUND = ReplicaRoundLaunched(rows=1, chunks=0, is_sampled=False)


@pytest.fixture(scope="module")
def replicas(tiny_target: Path, tiny_head: Path) -> Replicas:
    return new_replicas(tiny_target, tiny_head)


def new_replicas(tiny_target: Path, tiny_head: Path) -> Replicas:
    """Replicas of the tiny head."""
    target = load_target(tiny_target, kv_tokens=64, packed=False)
    head = load_head(
        tiny_head, embedding=target.embedding, num_target_layers=6, make_linear=PlainLinear
    )
    return Replicas(
        head,
        vocab_size=target.vocab_size,
        device=CPU,
        cuda_graphs=False,
        max_sessions=8,
        max_kv_rows=1024,
    )


@pytest.fixture
def offer(replicas: Replicas) -> ReplicaOffer:
    """An offer that is taken up."""
    return ReplicaOffer(
        num_slots=9,
        max_rows=8,
        draft_length=3,
        max_chunks=2,
        chunk_tokens=32,
        feature_size=64,
        feature_dtype=TensorDtype.FLOAT32,
        distribution_entries=0,
        depth=4,
        num_blocks=64,
        block_tokens=16,
        table_blocks=16,
        vocab_size=384,
        memory=MemoryKind.HOST,
    )


class Peer:
    """A verifier with an offer, and both its buffers."""

    def __init__(self, replicas: Replicas, connection: int, offer: ReplicaOffer) -> None:
        shape = shape_of(offer)
        self.drafts, self.verdicts = (
            new_buffer(layout, CPU) for layout in (shape.draft_layout(), shape.verdict_layout())
        )
        own = allocate_on_host(shape.draft_layout().num_bytes, CPU)
        attach_buffer(self.drafts, shape.draft_layout(), own)
        self.answer, shared = join(replicas, connection, offer, own.make_descriptor())
        assert shared is not None
        size = shape.verdict_layout().num_bytes
        self._memory = (own, map_host_memory(shared, size, CPU))
        os.close(shared)
        attach_buffer(self.verdicts, shape.verdict_layout(), self._memory[1])

    def publish(self, number: int) -> None:
        """Say that a round is there."""
        self.verdicts.bank(0)[0][0] = number

    @property
    def drafted(self) -> int:
        """The round that the drafter has answered last."""
        return int(self.drafts.bank(0)[0][0])


def shape_of(offer: ReplicaOffer) -> ExchangeShape:
    """The buffers of an offer."""
    return ExchangeShape(
        num_slots=offer.num_slots,
        max_rows=offer.max_rows,
        draft_length=offer.draft_length,
        max_chunks=offer.max_chunks,
        chunk_tokens=offer.chunk_tokens,
        feature_size=offer.feature_size,
        feature_dtype=torch.float32,
        distribution_entries=offer.distribution_entries,
        depth=offer.depth,
    )


def join(
    replicas: Replicas, connection: int, offer: ReplicaOffer, descriptor: int | None
) -> tuple[ReplicaAnswer, int | None]:
    """Make an offer; the answer, and what comes with it."""
    refused = replicas.take_offer(connection, offer, descriptor)
    if refused is not None:
        return refused, None
    while (built := replicas.build_step()) is None:
        pass
    assert built[0] == connection
    return built[1:]


def memory_for(offer: ReplicaOffer) -> int:
    """A descriptor of memory of the verifier."""
    memory = allocate_on_host(shape_of(offer).draft_layout().num_bytes, CPU)
    return memory.make_descriptor()


def test_an_offer_is_taken_up_once_for_each_connection(
    replicas: Replicas, offer: ReplicaOffer
) -> None:
    half = replace(offer, num_blocks=32)
    for connection in (CONNECTION, CONNECTION + 1):
        assert Peer(replicas, connection, half).answer == ReplicaReady(memory=MemoryKind.HOST)
    answer, shared = join(replicas, CONNECTION + 1, half, memory_for(half))
    assert isinstance(answer, ReplicaRefused) and shared is None
    for connection in (CONNECTION, CONNECTION + 1, CONNECTION):
        replicas.close(connection)


def test_all_verifiers_together_have_so_much_room(replicas: Replicas, offer: ReplicaOffer) -> None:
    half = replace(offer, num_blocks=32)
    for connection in (1, 2):
        Peer(replicas, connection, half)
    refused = replicas.take_offer(3, replace(half, num_blocks=16), memory_for(half))
    assert refused is not None and "1024 are taken" in refused.reason
    replicas.close(1)
    Peer(replicas, 3, half)
    for connection in (2, 3):
        replicas.close(connection)


def test_what_a_replica_holds_is_free_when_its_verifier_is_gone(
    replicas: Replicas, offer: ReplicaOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[DraftReplica]] = []

    def make(*given: Any, **named: Any) -> DraftReplica:
        replica = DraftReplica(*given, **named)
        made.append(weakref.ref(replica))
        return replica

    monkeypatch.setattr(module, "DraftReplica", make)
    Peer(replicas, CONNECTION, offer)
    replicas.handle_command(CONNECTION, BEGIN)
    replicas.close(CONNECTION)
    assert [replica() for replica in made] == [None] and not replicas.has_work


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_slots": 10}, "max_sessions"),
        ({"num_blocks": 65}, "exchange_kv_rows"),
        ({"block_tokens": 1024, "num_blocks": 1 << 24}, "exchange_kv_rows"),
        ({"table_blocks": 65}, "65 of 64"),
        ({"vocab_size": 385}, "384 ids"),
        ({"feature_size": 32}, "features of 64"),
        ({"max_rows": 65536, "max_chunks": 1024, "depth": 64}, "bytes"),
    ],
)
def test_what_no_replica_is_for_is_refused(
    replicas: Replicas, offer: ReplicaOffer, change: dict[str, int], words: str
) -> None:
    answer, shared = join(replicas, CONNECTION, replace(offer, **change), memory_for(offer))
    assert isinstance(answer, ReplicaRefused) and shared is None
    assert words in answer.reason


def test_a_verifier_on_the_same_gpu_is_refused(
    replicas: Replicas, offer: ReplicaOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_drafter.gpu.replicas.gpu_uuid", lambda device: "gpu-1")
    answer, shared = join(replicas, CONNECTION, replace(offer, gpu="gpu-1"), memory_for(offer))
    assert isinstance(answer, ReplicaRefused) and shared is None
    assert "on one GPU (gpu-1)" in answer.reason
    Peer(replicas, CONNECTION, replace(offer, gpu="gpu-2"))
    replicas.close(CONNECTION)


def test_memory_that_is_no_good_is_refused(replicas: Replicas, offer: ReplicaOffer) -> None:
    wide = replace(offer, distribution_entries=4096)
    for descriptor in (None, memory_for(offer), os.memfd_create("test")):
        answer, shared = join(replicas, CONNECTION, wide, descriptor)
        assert isinstance(answer, ReplicaRefused) and shared is None


def test_a_verifier_whose_round_does_not_come_holds_up_no_other(
    replicas: Replicas, offer: ReplicaOffer
) -> None:
    half = replace(offer, num_blocks=32)
    slow, other = (Peer(replicas, connection, half) for connection in (1, 2))
    for connection in (1, 2):
        for command in (BEGIN, ROUND):
            replicas.handle_command(connection, command)
    # What comes behind a round is done behind it.
    replicas.handle_command(1, ReplicaBlocksAdded(slot=0, first=16, blocks=(1,)))
    assert replicas.has_work and replicas.run_waiting() == []
    other.publish(1)
    assert replicas.run_waiting() == []
    assert (slow.drafted, other.drafted) == (0, 1)
    slow.publish(1)
    assert replicas.run_waiting() == [(1, "a table has 16 blocks, got 1 from 16 on")]
    assert slow.drafted == 1
    for connection in (1, 2):
        replicas.close(connection)


def test_a_round_that_never_comes_is_given_up(
    replicas: Replicas, offer: ReplicaOffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    Peer(replicas, CONNECTION, offer)
    replicas.handle_command(CONNECTION, ROUND)
    monkeypatch.setattr(module, "ROUND_TIMEOUT_S", 0.0)
    ((connection, why),) = replicas.run_waiting()
    assert connection == CONNECTION and "has not come" in why
    replicas.close(CONNECTION)


def test_commands_that_wait_are_bounded(replicas: Replicas, offer: ReplicaOffer) -> None:
    Peer(replicas, CONNECTION, offer)
    for _ in range(4096):
        replicas.handle_command(CONNECTION, ROUND)
    with pytest.raises(InvalidMessageError, match="wait"):
        replicas.handle_command(CONNECTION, ROUND)
    replicas.close(CONNECTION)


@pytest.mark.parametrize(
    "command",
    [
        ReplicaSessionBegin(slot=8, blocks=(1,), sampling=GREEDY, num_rows=0),
        ReplicaSessionBegin(slot=0, blocks=(64,), sampling=GREEDY, num_rows=0),
        ReplicaSessionBegin(slot=0, blocks=(-1,), sampling=GREEDY, num_rows=0),
        ReplicaSessionBegin(slot=0, blocks=tuple(range(17)), sampling=GREEDY, num_rows=0),
        ReplicaSessionBegin(slot=0, blocks=(1,), sampling=GREEDY, num_rows=17),
        ReplicaBlocksAdded(slot=0, first=16, blocks=(1,)),
        ReplicaBlocksAdded(slot=9, first=0, blocks=(1,)),
        ReplicaSessionEnd(slot=8),
        ReplicaRoundLaunched(rows=9, chunks=0, is_sampled=False),
        ReplicaRoundLaunched(rows=0, chunks=3, is_sampled=False),
    ],
)
def test_what_the_buffers_and_tables_do_not_hold_is_refused(
    replicas: Replicas, offer: ReplicaOffer, command: ReplicaCommand
) -> None:
    # Without a replica nothing happens.
    replicas.handle_command(CONNECTION, command)
    Peer(replicas, CONNECTION, offer).publish(1)
    with pytest.raises(InvalidMessageError):
        replicas.handle_command(CONNECTION, command)
    replicas.close(CONNECTION)


def test_rounds_are_on_the_timeline_where_one_is_recorded(
    tiny_target: Path, tiny_head: Path, offer: ReplicaOffer, tmp_path: Path
) -> None:
    path = tmp_path / "drafter.json"
    with record_timeline(path, "drafter"):
        replicas = new_replicas(tiny_target, tiny_head)
        peer = Peer(replicas, CONNECTION, offer)
        for command in (BEGIN, ROUND):
            replicas.handle_command(CONNECTION, command)
        peer.publish(1)
        assert replicas.run_waiting() == []
        replicas.close(CONNECTION)
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["name"] for event in events].count("draft chains") == 1
