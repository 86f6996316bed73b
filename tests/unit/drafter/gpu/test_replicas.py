"""Replicas of verifiers: which offers are taken up, and what a hostile verifier can do with one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from outrider_drafter.gpu.replicas import Replicas

from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import allocate_on_host
from outrider.engine.heads import load_head
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import load_target
from outrider.errors import InvalidMessageError
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import (
    MemoryKind,
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


@pytest.fixture(scope="module")
def replicas(tiny_target: Path, tiny_head: Path) -> Replicas:
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


def memory_for(offer: ReplicaOffer) -> int:
    """A descriptor of memory of the verifier."""
    shape = ExchangeShape(
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
    return allocate_on_host(shape.draft_layout().num_bytes, CPU).make_descriptor()


def test_an_offer_is_taken_up_once_for_each_connection(
    replicas: Replicas, offer: ReplicaOffer
) -> None:
    for connection in (CONNECTION, CONNECTION + 1):
        answer, shared = replicas.make_replica(connection, offer, memory_for(offer))
        assert answer == ReplicaReady(memory=MemoryKind.HOST)
        assert shared is not None
        os.close(shared)
    answer, shared = replicas.make_replica(CONNECTION + 1, offer, memory_for(offer))
    assert isinstance(answer, ReplicaRefused) and shared is None
    for connection in (CONNECTION, CONNECTION + 1, CONNECTION):
        replicas.close(connection)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_slots": 10}, "max_sessions"),
        ({"num_blocks": 65}, "exchange_kv_rows"),
        ({"block_tokens": 1024, "num_blocks": 1 << 24}, "exchange_kv_rows"),
        ({"table_blocks": 65}, "K/V rows"),
        ({"vocab_size": 385}, "384 ids"),
        ({"feature_size": 32}, "features of 64"),
        ({"max_rows": 65536, "max_chunks": 1024, "depth": 64}, "bytes"),
    ],
)
def test_what_no_replica_is_for_is_refused(
    replicas: Replicas, offer: ReplicaOffer, change: dict[str, int], words: str
) -> None:
    answer, shared = replicas.make_replica(CONNECTION, replace(offer, **change), memory_for(offer))
    assert isinstance(answer, ReplicaRefused) and shared is None
    assert words in answer.reason


def test_memory_that_is_no_good_is_refused(replicas: Replicas, offer: ReplicaOffer) -> None:
    wide = replace(offer, distribution_entries=4096)
    for descriptor in (None, memory_for(offer), os.memfd_create("test")):
        answer, shared = replicas.make_replica(CONNECTION, wide, descriptor)
        assert isinstance(answer, ReplicaRefused) and shared is None


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
    assert replicas.handle_command(CONNECTION, command)
    _, shared = replicas.make_replica(CONNECTION, offer, memory_for(offer))
    assert shared is not None
    os.close(shared)
    with pytest.raises(InvalidMessageError):
        replicas.handle_command(CONNECTION, command)
    replicas.close(CONNECTION)
