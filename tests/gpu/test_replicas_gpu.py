"""Replicas of several verifiers on one GPU: what one of them waits for holds up neither the rounds
of another nor its joining, and what they leave is not kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from outrider_drafter.gpu.replicas import Replicas

from outrider.engine.device.current_device import init_launching_thread
from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import allocate_on_device, map_device_memory
from outrider.engine.device.exchange.side import ExchangeSide
from outrider.engine.heads import load_head
from outrider.engine.kernels.exchange.numbers import publish_number, wait_drafts
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import load_target
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import (
    MemoryKind,
    ReplicaOffer,
    ReplicaReady,
    ReplicaRoundLaunched,
    ReplicaSessionBegin,
    TensorDtype,
)

pytestmark = pytest.mark.gpu

OFFER = ReplicaOffer(
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
    memory=MemoryKind.DEVICE,
)
SHAPE = ExchangeShape(
    num_slots=9,
    max_rows=8,
    draft_length=3,
    max_chunks=2,
    chunk_tokens=32,
    feature_size=64,
    feature_dtype=torch.float32,
    distribution_entries=0,
)
BEGIN = ReplicaSessionBegin(
    slot=0, blocks=(1,), sampling=SamplingParams().for_drafter(), num_rows=0
)
ROUND = ReplicaRoundLaunched(rows=1, chunks=0, is_sampled=False)
SLEEP_CYCLES = 40_000_000_000
"""More than 20 s of any clock."""


@pytest.fixture(scope="module")
def verifier_kernels(device: torch.device) -> None:
    """The kernels of a verifier's side are compiled: a first round that compiled them could outlast
    the drafter's wait."""
    side = ExchangeSide(SHAPE, device, timeout_us=1)
    side.attach(
        verdicts=allocate_on_device(SHAPE.verdict_layout().num_bytes, device),
        drafts=allocate_on_device(SHAPE.draft_layout().num_bytes, device),
    )
    put_round(side)
    torch.cuda.synchronize()


@pytest.fixture
def replicas(
    device: torch.device, tiny_target: Path, tiny_head: Path, verifier_kernels: None
) -> Iterator[Replicas]:
    init_launching_thread(str(device))
    target = load_target(tiny_target, kv_tokens=64, packed=False, device=str(device))
    head = load_head(
        tiny_head,
        embedding=target.embedding,
        num_target_layers=6,
        make_linear=PlainLinear,
        device=str(device),
    )
    replicas = Replicas(
        head,
        vocab_size=target.vocab_size,
        device=device,
        cuda_graphs=True,
        max_sessions=8,
        max_kv_rows=4096,
    )
    with torch.inference_mode():
        yield replicas
    torch.cuda.synchronize()


def put_round(side: ExchangeSide) -> bool:
    """A round of one session, whose outcome nobody has drafted for; whether drafts came."""
    publish_number(side.verdicts, side.state, step=1)
    slots = torch.zeros(1, dtype=torch.int32, device="cuda")
    outcomes = torch.full((2,), -1, dtype=torch.int32, device="cuda")
    wait_drafts(side.drafts, side.state, slots, outcomes, padding=1)
    return bool(side.state.words[3])


class Verifier:
    """A verifier's side of an exchange, in this process and on a stream of its own."""

    def __init__(self, replicas: Replicas, connection: int, device: torch.device) -> None:
        self._replicas, self._connection = replicas, connection
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own = allocate_on_device(SHAPE.draft_layout().num_bytes, device)
        assert replicas.take_offer(connection, OFFER, own.make_descriptor()) is None
        self.longest_step_s = 0.0
        built, began = None, time.monotonic()
        while built is None:
            built = replicas.build_step()
            now = time.monotonic()
            self.longest_step_s, began = max(self.longest_step_s, now - began), now
        at, answer, shared = built
        assert (at, answer) == (connection, ReplicaReady(memory=MemoryKind.DEVICE))
        assert shared is not None
        peer = map_device_memory(shared, SHAPE.verdict_layout().num_bytes, device)
        os.close(shared)
        with torch.cuda.stream(self._stream):
            self.side = ExchangeSide(SHAPE, device, timeout_us=2_000_000)
            self.side.attach(verdicts=peer, drafts=own)
        replicas.handle_command(connection, BEGIN)
        self.announce()
        assert self.is_answered()

    def announce(self) -> None:
        self._replicas.handle_command(self._connection, ROUND)

    def is_answered(self) -> bool:
        """Put a round; whether the drafter answers."""
        with torch.cuda.stream(self._stream):
            return put_round(self.side)

    def leave(self) -> None:
        with torch.cuda.stream(self._stream):
            self.side.detach()
        self._replicas.close(self._connection)


def test_a_round_that_does_not_come_holds_up_no_other_verifier(
    replicas: Replicas, device: torch.device
) -> None:
    slow, other = (Verifier(replicas, connection, device) for connection in (1, 2))
    slow.announce()
    began = time.monotonic()
    for _ in range(20):
        # Sessions begin behind the round that has not come, and in the other's replica.
        replicas.handle_command(1, BEGIN)
        replicas.handle_command(2, BEGIN)
        other.announce()
        assert other.is_answered()
    # The wait of the first replica ends after 5 s.
    assert time.monotonic() - began < 2.0
    assert slow.is_answered()
    # Ending a replica cancels its wait.
    slow.announce()
    began = time.monotonic()
    slow.leave()
    assert time.monotonic() - began < 1.0
    other.announce()
    assert other.is_answered()
    other.leave()


def test_nothing_of_a_join_waits_for_the_device(replicas: Replicas, device: torch.device) -> None:
    first = Verifier(replicas, 1, device)
    Verifier(replicas, 2, device).leave()
    busy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(busy):
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record()
    began = time.monotonic()
    late = Verifier(replicas, 3, device)
    late.announce()
    assert late.is_answered()
    first.announce()
    assert first.is_answered()
    late.leave()
    took_s = time.monotonic() - began
    assert not ended.query(), (  # type: ignore[no-untyped-call]
        f"something has waited for the whole device, or all this took too long: {took_s:.1f} s"
    )
    # Kernels are compiled by then: a step captures one graph.
    assert late.longest_step_s < 0.03
    first.leave()


def test_verifiers_that_come_again_take_no_more_memory(
    replicas: Replicas, device: torch.device
) -> None:
    Verifier(replicas, 1, device).leave()
    before = torch.cuda.memory_reserved(device)
    for connection in range(2, 8):
        Verifier(replicas, connection, device).leave()
    assert torch.cuda.memory_reserved(device) <= before


def test_kernels_of_usual_verifiers_are_compiled_ahead(
    replicas: Replicas, device: torch.device
) -> None:
    replicas.warm_up()
    verifier = Verifier(replicas, 1, device)
    verifier.announce()
    assert verifier.is_answered()
    verifier.leave()
