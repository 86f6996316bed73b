"""Memory of a pair: both sides see the same bytes, and a peer's descriptor is checked."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest
import torch

from outrider.engine.device.exchange.layout import BufferLayout, ExchangeShape, distribution_entries
from outrider.engine.device.exchange.memory import (
    allocate_on_host,
    attach_buffer,
    map_host_memory,
    new_buffer,
)
from outrider.errors import InvalidMessageError, InvalidRequestError

CPU = torch.device("cpu")
SHAPE = ExchangeShape(
    num_slots=3,
    max_rows=2,
    draft_length=4,
    max_chunks=2,
    chunk_tokens=8,
    feature_size=6,
    feature_dtype=torch.bfloat16,
    distribution_entries=5,
    depth=3,
)


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield made
    os.close(made)


@pytest.mark.parametrize("layout", [SHAPE.verdict_layout(), SHAPE.draft_layout()])
def test_both_sides_see_the_same_arrays(layout: BufferLayout) -> None:
    mine = allocate_on_host(layout.num_bytes, CPU)
    shared = mine.make_descriptor()
    theirs = map_host_memory(shared, layout.num_bytes, CPU)
    os.close(shared)
    ours, others = new_buffer(layout, CPU), new_buffer(layout, CPU)
    attach_buffer(ours, layout, mine)
    attach_buffer(others, layout, theirs)
    value = 0
    for number in range(layout.depth):
        for array in ours.bank(number)[1:]:
            assert not bool(array.any())
            value += 1
            array.fill_(value)
    ours.bank(0)[0][0] = -5
    value = 0
    for number in range(layout.depth):
        assert others.bank(number)[0].tolist() == [-5]
        for array, field in zip(others.bank(number)[1:], layout.fields, strict=True):
            value += 1
            assert (array.dtype, array.shape) == (field.dtype, field.shape)
            assert bool((array == value).all())
    for memory in (mine, theirs, mine):
        memory.close()


def test_arrays_are_aligned_and_apart() -> None:
    end = 0
    for field in SHAPE.verdict_layout().fields:
        assert field.offset % 256 == 0 and field.offset >= end
        end = field.offset + field.num_bytes
    assert SHAPE.verdict_layout().bank_bytes >= end


@pytest.mark.parametrize("size", [0, 4096])
def test_memory_that_is_too_small_is_refused(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(InvalidMessageError, match="8192 bytes or more"):
        map_host_memory(descriptor, 8192, CPU)


def test_memory_that_a_peer_could_take_away_is_refused(descriptor: int) -> None:
    os.ftruncate(descriptor, 8192)
    with pytest.raises(InvalidMessageError, match="seal against shrinking"):
        map_host_memory(descriptor, 8192, CPU)


def test_a_descriptor_of_something_else_is_refused() -> None:
    reader, writer = os.pipe()
    with pytest.raises(InvalidMessageError):
        map_host_memory(reader, 8192, CPU)
    for each in (reader, writer):
        os.close(each)
    with pytest.raises(InvalidMessageError):
        map_host_memory(reader, 8192, CPU)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_slots", 0),
        ("draft_length", 0),
        ("distribution_entries", -1),
        ("max_chunks", -1),
        ("depth", 0),
    ],
)
def test_a_shape_without_sense_is_refused(name: str, value: int) -> None:
    given = {field: getattr(SHAPE, field) for field in SHAPE.__dataclass_fields__}
    with pytest.raises(InvalidRequestError, match=name):
        ExchangeShape(**{**given, name: value})


@pytest.mark.parametrize(
    ("wanted", "num_slots", "draft_length", "expected"),
    [(2048, 257, 3, 2048), (0, 257, 3, 0), (4096, 1025, 8, 1023), (2048, 65_537, 64, 1)],
)
def test_distributions_of_many_sessions_have_fewer_entries(
    wanted: int, num_slots: int, draft_length: int, expected: int
) -> None:
    found = distribution_entries(wanted, num_slots=num_slots, draft_length=draft_length)
    assert found == expected


def test_a_buffer_is_bounded() -> None:
    given = {field: getattr(SHAPE, field) for field in SHAPE.__dataclass_fields__}
    huge = ExchangeShape(**{**given, "max_rows": 1 << 20, "feature_size": 1 << 14})
    with pytest.raises(InvalidRequestError, match="at most"):
        huge.verdict_layout()
