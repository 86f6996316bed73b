"""Sessions that grow, go and come back on a GPU: bits are kept, texts do not change, and nothing
waits on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner

from outrider.engine.kv_cache import KVPool
from outrider.engine.swap import SwapSpace
from tests.unit.verifier.device_serving import OWN, SAMPLINGS
from tests.unit.verifier.kv.test_suspend_resume import NAMES, PLAIN, disturb, specs
from tests.unit.verifier.round_driver import Driver, device_runner, texts

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"
MIB = 1 << 20
BUSY_CYCLES = 500_000_000
"""Of the device's clock: some tenths of a second."""


def make_pool(dtype: torch.dtype) -> KVPool:
    pool = KVPool(
        num_layers=4,
        num_kv_heads=2,
        head_dim=64,
        num_blocks=256,
        block_tokens=16,
        dtype=dtype,
        device=CUDA,
    )
    pool.storage.normal_()
    pool.use_block_tables()
    return pool


def kv_bits(storage: torch.Tensor, blocks: Any, rows: int) -> torch.Tensor:
    slots = [block * 16 + n for block in blocks for n in range(16)][:rows]
    held = storage[:, :, :, torch.tensor(slots, device=storage.device)]
    return held.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fetched", [False, True])
def test_every_bit_comes_back_though_the_blocks_are_given_away_at_once(
    dtype: torch.dtype, fetched: bool
) -> None:
    pool = make_pool(dtype)
    block_bytes = pool.storage.nbytes // pool.total_blocks
    space = SwapSpace(
        200 * block_bytes,
        [pool.storage],
        block_tokens=16,
        run_bytes=8 * block_bytes,
        # Less than a sequence takes: staging memory is used more than once.
        staging_bytes=4 * 8 * block_bytes,
    )
    kv = pool.new_sequence()
    assert kv.reserve(1024)
    kv.advance(1000)
    before = kv_bits(pool.storage, kv.blocks, 1000)
    sleep: Callable[[int], None] = torch.cuda._sleep
    sleep(BUSY_CYCLES)
    event: Any = torch.cuda.Event
    woken = event()
    woken.record()
    saved = space.swap_out_sequence(kv)
    assert saved is not None
    kv.reset()
    pool.storage.fill_(-1.0)
    assert kv.reserve(1024)
    if fetched:
        assert not space.prefetch(saved)
    space.swap_in_sequence(saved, kv)
    assert not woken.query(), "nothing waited for the device"
    assert torch.equal(kv_bits(pool.storage, kv.blocks, 1000), before)
    out, back = space.copy_times_s(1000)
    assert 0.0 < out < 0.1 and 0.0 < back < 0.1


def test_what_is_fetched_is_there_when_it_says_so() -> None:
    pool = make_pool(torch.bfloat16)
    space = SwapSpace(64 * MIB, [pool.storage], block_tokens=16)
    first, second = pool.new_sequence(), pool.new_sequence()
    saved, before = [], []
    for kv in (first, second):
        assert kv.reserve(512)
        kv.advance(500)
        before.append(kv_bits(pool.storage, kv.blocks, 500))
        saved.append(space.swap_out_sequence(kv))
        kv.reset()
    pool.storage.zero_()
    assert saved[0] is not None and saved[1] is not None
    # Fetched in vain, then the other one.
    space.prefetch(saved[0])
    while not space.prefetch(saved[1]):
        pass
    for kv, copy, bits in zip((second, first), reversed(saved), reversed(before), strict=True):
        assert copy is not None and kv.reserve(512)
        space.swap_in_sequence(copy, kv)
        assert torch.equal(kv_bits(pool.storage, kv.blocks, 500), bits)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("own", [False, True], ids=["plain", "own head"])
def test_suspended_sessions_say_what_they_would_have_said(
    own: bool, name: str, ahead: bool, tiny_target: Path, tiny_head: Path
) -> None:
    head, plan = (tiny_head, OWN) if own else (None, PLAIN)
    settings = {"draft_length": 3} if own else {}
    answers = specs(SAMPLINGS[name], plan)
    runner, pool = device_runner(tiny_target, head, device=CUDA, **settings)
    calm = texts(Driver(runner, pool), answers)
    driver = Driver(runner, pool, runner.make_swap_space(64 * MIB, pool), ahead=ahead)
    for seed in range(2):
        assert texts(driver, answers, disturb(seed)) == calm


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_swap_keeps_the_bits_of_target_and_head(
    weights: torch.dtype, tiny_target: Path, tiny_head: Path
) -> None:
    precision = "bfloat16" if weights is torch.bfloat16 else "float32"
    runner, pool = device_runner(
        tiny_target, tiny_head, device=CUDA, weights=weights, draft_length=3, dtype=precision
    )
    assert isinstance(runner, GpuModelRunner) and runner.in_process_drafter is not None
    storages = pool.storage, runner.in_process_drafter.storage
    driver = Driver(runner, pool, runner.make_swap_space(64 * MIB, pool), ahead=True)
    session, other = (driver.open(spec) for spec in specs(SAMPLINGS["coupled"], OWN)[::2])
    driver.resume(session)
    while session.emitted < 12:
        driver.step()
    driver.settle_all()
    before = [kv_bits(storage, session.kv.blocks, session.kv.len) for storage in storages]
    assert driver.suspend(session, swap=True)
    driver.resume(other)
    for _ in range(6):
        driver.step()
    driver.settle_all()
    assert driver.resume(session)
    after = [kv_bits(storage, session.kv.blocks, session.kv.len) for storage in storages]
    assert all(map(torch.equal, before, after))
    driver.close()
