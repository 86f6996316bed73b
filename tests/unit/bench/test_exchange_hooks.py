"""Hooks that make a peer of an exchange between devices lie or late."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from outrider_bench.hooks import exchange_delay, exchange_garbage
from outrider_bench.hooks.exchange_garbage import GarbageWriter
from outrider_drafter.hooks import DrafterHooks

from outrider.engine.device.exchange.layout import NUMBER_BYTES, ExchangeShape
from outrider.engine.device.exchange.memory import allocate_on_host
from outrider.engine.device.exchange.side import ExchangeSide
from outrider.errors import InvalidRequestError
from tests.waiting import wait_until

CPU = torch.device("cpu")
SHAPE = ExchangeShape(
    num_slots=2,
    max_rows=1,
    draft_length=3,
    max_chunks=1,
    chunk_tokens=4,
    feature_size=4,
    feature_dtype=torch.float32,
    distribution_entries=0,
)


@pytest.mark.parametrize("first_byte", [0, NUMBER_BYTES])
def test_garbage_is_written_while_the_file_is_there(tmp_path: Path, first_byte: int) -> None:
    switch = tmp_path / "switch"
    memory = allocate_on_host(4096, CPU)

    def content() -> bytes:
        return ctypes.string_at(memory.address, 4096)

    side = ExchangeSide(SHAPE, CPU, timeout_us=0)
    writer = GarbageWriter(switch, first_byte=first_byte)
    writer.add_target(side, memory)
    assert content() == bytes(4096)
    switch.touch()
    wait_until(lambda: any(content()[NUMBER_BYTES:]), what="garbage")
    wait_until(lambda: any(content()[:NUMBER_BYTES]) or first_byte, what="a number")
    assert first_byte == 0 or not any(content()[:NUMBER_BYTES])
    writer.remove_target(side)
    before = content()
    assert content() == before
    switch.unlink()


def test_options_without_sense_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="buffer"):
        exchange_garbage.install(DrafterHooks(), switch="/nowhere", buffer="features")
    for delay_ms in (0.0, 1e9):
        with pytest.raises(InvalidRequestError, match="delay_ms"):
            exchange_delay.install(DrafterHooks(), delay_ms=delay_ms)
