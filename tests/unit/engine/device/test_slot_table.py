"""What the device is told of each session slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.device.slots.session_slots import (
    BLOCKS_PER_WRITE,
    SLOTS_PER_WRITE,
    DeviceSessionSlots,
)
from outrider.engine.device.transfer.uploads import upload_int32s
from outrider.engine.kernels.session_tensors import RULE_NUMBERS
from outrider.engine.kv_cache import KVPool
from outrider.errors import ResourceExhaustedError
from outrider.spec.noise import NoiseStream, stream_key
from outrider.spec.sampling import Rule, SamplingParams

CPU = torch.device("cpu")
SAMPLING = SamplingParams(temperature=0.7, rule=Rule.TARGET_ONLY, seed=2**64 - 5)


def make_pool(num_blocks: int = 16) -> KVPool:
    return KVPool(
        num_layers=1,
        num_kv_heads=1,
        head_dim=4,
        num_blocks=num_blocks,
        block_tokens=4,
        dtype=torch.float32,
        device=CPU,
    )


def make_slots(pool: KVPool, max_len: int = 16, sessions: int = 2) -> DeviceSessionSlots:
    return DeviceSessionSlots(
        pool, max_sessions=sessions, max_len=max_len, max_nodes=3, vocab_size=9, device=CPU
    )


def test_a_slot_holds_its_sessions_blocks_rule_and_prefix() -> None:
    pool = make_pool()
    slots = make_slots(pool)
    kv = pool.allocate(13)
    slot = slots.open_slot(kv)
    slots.begin_session(slot, kv, SAMPLING, length=5, root=17)
    slots.upload_changes()
    assert slots.sequence.tables[slot].tolist() == list(kv.blocks)
    assert (int(slots.sequence.lengths[slot]), int(slots.sequence.roots[slot])) == (5, 17)
    keys = slots.sampling.stream_keys.numpy().view(np.uint64)[slot]
    assert keys.tolist() == [stream_key(SAMPLING.seed, stream) for stream in NoiseStream]
    assert float(slots.sampling.temperatures[slot]) == pytest.approx(0.7)
    assert int(slots.sampling.rules[slot]) == RULE_NUMBERS[Rule.TARGET_ONLY]


def test_the_hosts_word_moves_one_session_and_no_other() -> None:
    pool = make_pool()
    slots = make_slots(pool)
    first, second = (slots.open_slot(pool.allocate(8)) for _ in range(2))
    for slot in (first, second):
        slots.begin_session(slot, pool.allocate(8), SAMPLING, length=3, root=slot)
    slots.upload_changes()
    slots.begin_session(first, pool.allocate(8), SAMPLING, length=9, root=40)
    slots.upload_changes()
    assert slots.sequence.lengths[[first, second]].tolist() == [9, 3]
    assert slots.sequence.roots[[first, second]].tolist() == [40, second]


def test_a_tables_end_is_nobodys() -> None:
    """What a padded row writes past its session's blocks goes to the padding slot's."""
    pool = make_pool()
    slots = make_slots(pool)
    spare = int(slots.sequence.tables[slots.padding, 0])
    first = pool.allocate(16)
    slot = slots.open_slot(first)
    slots.begin_session(slot, first, SAMPLING)
    slots.close_slot(slot)
    first.release()
    second = pool.allocate(5)
    assert slots.open_slot(second) == slot
    slots.begin_session(slot, second, SAMPLING)
    slots.upload_changes()
    assert slots.sequence.tables[slot].tolist() == [*second.blocks, spare, spare]
    assert spare not in second.blocks


def test_blocks_that_are_added_are_told_of_at_once() -> None:
    pool = make_pool()
    slots = make_slots(pool)
    spare = int(slots.sequence.tables[slots.padding, 0])
    held = [pool.new_sequence() for _ in range(2)]
    assert all(kv.reserve(4) for kv in held)
    places = [slots.open_slot(kv) for kv in held]
    for slot, kv in zip(places, held, strict=True):
        slots.begin_session(slot, kv, SAMPLING, length=3, root=slot)
    assert held[0].reserve(12) and held[1].reserve(8)
    slots.upload_changes([(slot, 1, kv.blocks[1:]) for slot, kv in zip(places, held, strict=True)])
    tables = slots.sequence.tables[places].tolist()
    assert tables == [[*held[0].blocks, spare], [*held[1].blocks, spare, spare]]
    assert slots.sequence.roots[places].tolist() == places


def test_more_blocks_than_a_launch_adds_are_told_of_all_the_same() -> None:
    longest = 4 * (BLOCKS_PER_WRITE + 9)
    pool = make_pool(2 * BLOCKS_PER_WRITE)
    slots = make_slots(pool, longest)
    before, padding = pool.new_sequence(), slots.sequence.tables[slots.padding].tolist()
    assert before.reserve(4)
    slot = slots.open_slot(before)
    slots.begin_session(slot, before, SAMPLING)
    assert before.reserve(longest)
    slots.upload_changes([(slot, 1, before.blocks[1:])])
    assert slots.sequence.tables[slot].tolist() == list(before.blocks)
    assert slots.sequence.tables[slots.padding].tolist() == padding
    slots.upload_changes([])
    assert slots.sequence.tables[slot].tolist() == list(before.blocks)


@pytest.mark.parametrize(
    "many", [1, 2, SLOTS_PER_WRITE, SLOTS_PER_WRITE + 1, 2 * SLOTS_PER_WRITE + 3]
)
def test_sessions_that_begin_are_told_of_at_once_with_what_they_were_given_since(
    many: int,
) -> None:
    longest = 4 * 5
    pool = make_pool(8 * many)
    slots = make_slots(pool, longest, many)
    spare = int(slots.sequence.tables[slots.padding, 0])
    held = [pool.new_sequence() for _ in range(many)]
    assert all(kv.reserve(4 + 4 * (n % 3)) for n, kv in enumerate(held))
    places = [slots.open_slot(kv) for kv in held]
    for number, (slot, kv) in enumerate(zip(places, held, strict=True)):
        # The first word of a slot's next session is not the last one.
        slots.begin_session(slot, kv, SAMPLING, length=99, root=99)
        slots.begin_session(slot, kv, SAMPLING, length=1 + number, root=70 + number)
    assert not slots.sequence.lengths[places].any()
    told = [kv.num_blocks for kv in held]
    assert all(kv.reserve(longest) for kv in held[::2])
    slots.upload_changes(
        [(s, n, kv.blocks[n:]) for s, n, kv in zip(places, told, held, strict=True)]
    )
    assert slots.sequence.tables[places].tolist() == [
        [*kv.blocks, *[spare] * (5 - kv.num_blocks)] for kv in held
    ]
    assert slots.sequence.lengths[places].tolist() == list(range(1, 1 + many))
    assert slots.sequence.roots[places].tolist() == list(range(70, 70 + many))
    assert int(slots.sequence.lengths[slots.padding]) == 1


def test_what_is_uploaded_may_change_at_once() -> None:
    words, out = np.arange(3, dtype=np.int32), torch.zeros(3, dtype=torch.int32)
    upload_int32s(out, words)
    words[:] = -1
    assert out.tolist() == [0, 1, 2]


def test_padding_has_blocks_of_its_own_until_the_release() -> None:
    pool = make_pool()
    slots = make_slots(pool)
    held = pool.total_blocks - pool.free_blocks
    assert held == pool.blocks_for(2 * 3)
    assert len(set(slots.sequence.tables[slots.padding, :held].tolist())) == held
    slots.release_padding()
    assert pool.free_blocks == pool.total_blocks


def test_a_session_that_no_table_holds_is_refused_and_takes_no_slot() -> None:
    pool = make_pool()
    slots = make_slots(pool)
    with pytest.raises(ResourceExhaustedError) as caught:
        slots.open_slot(pool.allocate(17))
    assert caught.value.reason == "CONTEXT_TOO_LONG"
    assert {slots.open_slot(pool.allocate(4)) for _ in range(2)} == {0, 1}
    with pytest.raises(ResourceExhaustedError) as caught:
        slots.open_slot(pool.allocate(4))
    assert caught.value.reason == "SESSIONS_EXHAUSTED"
    slots.close_slot(1)
    assert slots.open_slot(pool.allocate(4)) == 1
