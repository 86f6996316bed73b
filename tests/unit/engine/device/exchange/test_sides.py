"""Both sides of a pair over their lives: buffers of an earlier peer are read by nobody."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.exchange.draft_replica import ReplicaRound
from outrider.engine.device.exchange.layout import BufferLayout, ExchangeShape
from outrider.engine.device.exchange.memory import (
    SharedMemory,
    allocate_on_host,
    attach_buffer,
    map_host_memory,
    new_buffer,
)
from outrider.engine.device.exchange.remote_drafter import RemoteDrafter
from outrider.engine.device.exchange.side import ExchangeSide
from outrider.engine.kernels.exchange.buffers import ExchangeBuffer
from outrider.engine.kernels.exchange.numbers import is_round_there, wait_round
from outrider.spec.sampling import SamplingParams

CPU = torch.device("cpu")
SHAPE = ExchangeShape(
    num_slots=3,
    max_rows=2,
    draft_length=3,
    max_chunks=1,
    chunk_tokens=4,
    feature_size=4,
    feature_dtype=torch.float32,
    distribution_entries=0,
)
DRAFT = [7, 8, 9]


class Host:
    """A drafter's host that does nothing."""

    def begin_session(self, *args: object, **options: object) -> None: ...

    def add_blocks(self, *args: object) -> None: ...

    def end_session(self, slot: int) -> None: ...

    def launch_round(self, announced: ReplicaRound) -> None: ...


def pair(layout: BufferLayout) -> tuple[SharedMemory, ExchangeBuffer, SharedMemory]:
    """Memory of one side, and the buffer in it as the peer sees it, with the peer's mapping."""
    own = allocate_on_host(layout.num_bytes, CPU)
    descriptor = own.make_descriptor()
    mapped = map_host_memory(descriptor, layout.num_bytes, CPU)
    os.close(descriptor)
    buffer = new_buffer(layout, CPU)
    attach_buffer(buffer, layout, mapped)
    return own, buffer, mapped


@pytest.fixture
def rows() -> NewRows:
    """A round of the session in slot 0."""
    return NewRows(
        slots=torch.tensor([0], dtype=torch.int32),
        tables=torch.zeros((3, 1), dtype=torch.int32),
        tokens=torch.tensor([[5, 0, 0, 0]], dtype=torch.int32),
        features=torch.zeros(1, 4, 4),
        counts=torch.tensor([1], dtype=torch.int32),
        starts=torch.tensor([0], dtype=torch.int32),
    )


def test_a_verifier_reads_nothing_of_an_earlier_drafter(rows: NewRows) -> None:
    remote = RemoteDrafter(SHAPE, vocab_size=50, device=CPU, timeout_us=1000)
    keep = []

    def join() -> ExchangeBuffer:
        """A drafter joins; the draft buffer as it sees it."""
        drafts, theirs, mapped = pair(SHAPE.draft_layout())
        verdicts = allocate_on_host(SHAPE.verdict_layout().num_bytes, CPU)
        keep.append(mapped)
        remote.attach(drafts, verdicts, Host())
        remote.begin_session(0, [1], SamplingParams(), num_rows=0, digest=3)
        return theirs

    def draft(buffer: ExchangeBuffer, number: int) -> None:
        """Write a draft that fits, and then the number of its round."""
        published, digests, tokens, *_ = buffer.bank(0)
        digests[:], tokens[0] = remote.digests, torch.tensor(DRAFT, dtype=torch.int32)
        published[0] = number

    def received() -> list[int]:
        remote.receive_drafts(rows.slots, num_nodes=rows.tokens.shape[1], rejection=False)
        tokens: list[int] = remote.tokens[0].tolist()
        return tokens

    def run_round() -> None:
        remote.begin_rows()
        remote.draft_round(rows, num_nodes=rows.tokens.shape[1], sampled=False)

    early = join()
    run_round()
    draft(early, 1)
    assert received() == DRAFT
    remote.detach()
    later = join()
    run_round()
    draft(early, 1)
    assert received() == [-1, -1, -1] and remote.is_late
    draft(later, 1)
    assert received() == DRAFT
    remote.detach()


def test_a_drafter_sees_no_round_of_an_earlier_verifier() -> None:
    side = ExchangeSide(SHAPE, CPU, timeout_us=0)
    keep = []

    def join() -> ExchangeBuffer:
        """A verifier joins; the verdict buffer as it sees it."""
        verdicts, theirs, mapped = pair(SHAPE.verdict_layout())
        drafts = allocate_on_host(SHAPE.draft_layout().num_bytes, CPU)
        keep.append(mapped)
        side.attach(verdicts=verdicts, drafts=drafts)
        return theirs

    def is_there() -> bool:
        return is_round_there(side.verdicts, side.state)

    early = join()
    assert not is_there()
    early.bank(0)[0][0] = 1
    assert is_there()
    wait_round(side.verdicts, side.state)
    side.detach()
    # A closed side waits for nothing.
    assert is_there() and not side.is_open
    later = join()
    early.bank(0)[0][0] = 1
    assert not is_there()
    later.bank(0)[0][0] = 1
    assert is_there()
    side.detach()
