"""Frames that no honest peer sends get a typed error at every port, soon."""

from __future__ import annotations

import random

import numpy as np
import pytest
from outrider_chaos import fuzz_runner
from outrider_chaos.fuzz_runner import LANE, MAX_GROWTH_MB, honest_frames

from outrider.chaos import fuzz
from outrider.chaos.fuzz import (
    DECODERS,
    PORTS,
    Decoder,
    FuzzReport,
    fuzz_port,
    mutated,
    random_frame,
)
from outrider.chaos.fuzz_shm import fuzz_shm_channel
from outrider.wire.v1 import inference_pb2

FRAMES = 1500


@pytest.mark.parametrize("port", PORTS)
def test_every_frame_is_read_or_refused_with_a_typed_error(port: str) -> None:
    report = fuzz_port(port, FRAMES, seed=1, corpus=honest_frames())
    assert report.failures == []
    assert report.frames[port] >= FRAMES
    # Fuzzing that never gets past the first check finds nothing behind it.
    assert 0.05 < report.accepted[port] / report.frames[port] < 0.95


def test_every_packet_of_a_lane_is_read_or_ends_it() -> None:
    report = fuzz_shm_channel(FRAMES, seed=1)
    assert report.failures == []
    assert report.frames["shm"] == FRAMES
    assert report.accepted["shm"] > FRAMES / 4


def test_every_decoder_reads_some_honest_frame() -> None:
    honest = honest_frames()
    for decoder in DECODERS:
        assert any(fuzz.can_read(decoder, frame) for frame in honest), decoder.name


def test_a_decoder_that_breaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(data: bytes) -> object:
        if len(data) % 7 == 3:
            raise IndexError("list index out of range")
        return data

    broken = Decoder("port", "name", inference_pb2.AbortRequest, breaks)
    monkeypatch.setattr(fuzz, "DECODERS", (broken,))
    report = fuzz_port("port", 300, seed=1)
    assert report.failures
    assert "IndexError" in report.failures[0]


def test_frames_are_a_matter_of_the_seed_and_bounded() -> None:
    kind = inference_pb2.GenerateRequest
    for seed in range(5):
        one, other = random.Random(seed), random.Random(seed)
        frame = random_frame(kind, one)
        assert frame == random_frame(kind, other)
        assert mutated(frame, one, [frame]) == mutated(frame, other, [frame])
    assert len(mutated(bytes(fuzz.MAX_FRAME_BYTES + 9), random.Random(1), [b"x"])) <= (
        fuzz.MAX_FRAME_BYTES
    )


@pytest.mark.parametrize("keeps", [False, True])
def test_growth_is_what_is_kept_not_a_large_frame_that_came_by(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[bytearray] = []

    def read(frames: int, *, seed: int) -> FuzzReport:
        frame = bytearray(b"x") * (40 << 20 if seed in (3, 6) else 0)
        if keeps:
            kept.append(frame)
        return FuzzReport()

    monkeypatch.setattr(fuzz_runner, "fuzz_shm_channel", read)
    _leave_room_in_the_heap()
    grown = fuzz_runner.fuzz_decoder(LANE, frames=100, seed=0).growth_mb
    assert (grown > MAX_GROWTH_MB) == keeps


def _leave_room_in_the_heap() -> None:
    """As a process has it that computed before: the allocator then keeps a frame that is freed."""
    np.empty(31 << 20, np.uint8)  # what is freed raises the size from which pages are mapped
    rooms = [np.empty(25 << 20, np.uint8) for _ in range(2)]
    del rooms
