"""Session slots are told without waiting, and right, while the device is busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.device.slots.session_slots import DeviceSessionSlots
from outrider.engine.kernels.session_tensors import stream_key_row
from outrider.engine.kv_cache import KVPool
from outrider.spec.sampling import SamplingParams

pytestmark = pytest.mark.gpu
SESSIONS = 64
BUSY_CYCLES = 500_000_000
"""Of the device's clock: some tenths of a second."""


@torch.inference_mode()
def test_a_burst_of_sessions_on_a_busy_stream_is_told_of_each() -> None:
    device = torch.device("cuda", 0)
    pool = KVPool(
        num_layers=1,
        num_kv_heads=1,
        head_dim=16,
        num_blocks=4 * SESSIONS,
        block_tokens=16,
        dtype=torch.bfloat16,
        device=device,
    )
    slots = DeviceSessionSlots(
        pool, max_sessions=SESSIONS, max_len=32, max_nodes=4, vocab_size=9, device=device
    )
    sequences = [pool.allocate(32) for _ in range(SESSIONS)]
    places = [slots.open_slot(sequence) for sequence in sequences]
    torch.cuda.synchronize()
    sleep: Callable[[int], None] = torch.cuda._sleep
    sleep(BUSY_CYCLES)
    event: Any = torch.cuda.Event
    woken = event()
    woken.record()
    for number, (place, sequence) in enumerate(zip(places, sequences, strict=True)):
        slots.begin_session(place, sequence, SamplingParams(seed=number), length=5, root=number)
    slots.upload_changes()
    for number in range(0, SESSIONS, 2):
        again = SamplingParams(seed=number)
        slots.begin_session(
            places[number], sequences[number], again, length=9, root=1000 + number // 2
        )
        slots.upload_changes()
    assert not woken.query(), "nothing waited for the device"
    torch.cuda.synchronize()
    assert slots.sequence.tables[places].tolist() == [list(s.blocks) for s in sequences]
    keys = np.stack([stream_key_row(SamplingParams(seed=number)) for number in range(SESSIONS)])
    assert np.array_equal(slots.sampling.stream_keys[places].cpu().numpy(), keys)
    lengths, roots = slots.sequence.lengths[places], slots.sequence.roots[places]
    assert lengths.tolist() == [9, 5] * (SESSIONS // 2)
    assert roots[::2].tolist() == list(range(1000, 1000 + SESSIONS // 2))
    assert roots[1::2].tolist() == list(range(1, SESSIONS, 2))
