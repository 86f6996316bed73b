"""Memory that a lane shares is as good for a device's copies as its own pinned memory."""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.device.current_device import init_launching_thread
from outrider.engine.device.transfer.buffers import Downloader
from outrider.engine.device.transfer.pinned_memory import pin_memory
from outrider.transport.shm import make_channel_pair
from outrider.wire.messages import EncodedMessage

pytestmark = pytest.mark.gpu
ROWS, WIDTH = 320, 4096
SPIN = 400_000_000
"""Cycles: some tenths of a second."""


def test_copies_into_a_lane_wait_for_nobody_and_are_read_from_there(device: torch.device) -> None:
    init_launching_thread(device)
    downloads = Downloader(device)
    result = torch.arange(7, dtype=torch.int32, device=device)
    rows = torch.arange(ROWS * WIDTH, dtype=torch.int32, device=device).view(ROWS, WIDTH)
    features = rows.to(torch.bfloat16)
    others = features + 1
    pinned: list[bool] = []

    def pin_it(memory: NDArray[np.uint8]) -> bool:
        pinned.append(pin_memory(memory, device))
        return pinned[-1]

    for _ in range(3):
        # Memory of the same address may come again: it must have been let go of.
        ours, theirs = make_channel_pair()
        with torch.inference_mode(), closing(ours), closing(theirs):
            ours.allow_reservations(pin_it)
            place = ours.reserve_frame(features.nbytes)
            assert place is not None
            downloads.start_downloads((result, features), last_into=place)
            torch.cuda.synchronize(device)
            torch.cuda._sleep(SPIN)
            began = time.perf_counter()
            words, landed = downloads.start_downloads((result, others), last_into=place)
            took_s = time.perf_counter() - began
            assert not words.has_arrived and not landed.has_arrived
            assert took_s < 0.02
            array = landed.wait_array()
            ours.send(EncodedMessage((b"head", memoryview(array).cast("B"))))
            (frame,) = theirs.receive_views()
            expected = others.cpu().view(torch.uint16).numpy()
            found = np.frombuffer(frame[4:], np.uint16).reshape(ROWS, WIDTH)
            assert np.array_equal(found, expected)
            assert words.wait_array().tolist() == list(range(7))
            del place, landed, array, frame, found
    assert pinned == [True] * 3
