"""Sessions that grow, are suspended and resumed change no text: on the host's engine and on the
device's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outrider_verifier.model_runner.batch import VerifyDraft
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import PREFILLING

from outrider.engine.kv_cache import KVPool
from outrider.errors import InvalidRequestError, ResourceExhaustedError
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import SessionSpec
from tests.fakes.scripted_drafter import make_tree
from tests.unit.verifier.device_serving import OWN, PROMPTS, SAMPLINGS
from tests.unit.verifier.harness import make_spec
from tests.unit.verifier.round_driver import MAX_NODES, Driver, device_runner, host_runner, texts

MIB = 1 << 20
NAMES = ["greedy", "coupled", "counted"]


PLAIN = SpeculationPlan()


def specs(
    sampling: SamplingParams, plan: SpeculationPlan = PLAIN, max_new_tokens: int = 24
) -> list[SessionSpec]:
    return [
        make_spec(
            f"s{number}",
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            plan=plan,
            drafter=None,
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def disturb(seed: int, every: int = 4) -> Callable[[Driver, int], None]:
    """Suspend any session, by swap or not, and resume any that waits, from step to step; others
    take the blocks meanwhile."""
    chooser = random.Random(seed)

    def before(driver: Driver, step: int) -> None:
        if driver.waiting and (chooser.random() < 0.6 or not driver.sessions):
            session = chooser.choice(driver.waiting)
            driver.runner.prefetch_session(session)
            driver.resume(session)
        if chooser.randrange(every) == 0:
            driver.settle_all()
            going = [session for session in driver.sessions if session.remaining]
            if going:
                driver.suspend(chooser.choice(going), swap=chooser.random() < 0.5)

    return before


def make(engine: str, target: Path, head: Path) -> tuple[ModelRunner, KVPool]:
    match engine:
        case "host":
            return host_runner(target)
        case "device":
            return device_runner(target)
        case "own chains":
            return device_runner(target, head, draft_length=3)
        case "own trees":
            return device_runner(target, head, draft_length=8, draft_top_k=3, placement="colocated")
    raise AssertionError(engine)


@pytest.fixture(scope="module")
def calm(tiny_target: Path) -> dict[str, list[list[int]]]:
    """Texts of the host's engine, by sampling, when nothing disturbs it."""
    return {
        name: texts(Driver(*host_runner(tiny_target)), specs(SAMPLINGS[name])) for name in NAMES
    }


@pytest.mark.parametrize(
    ("engine", "name", "ahead"),
    [
        ("host", "greedy", False),
        ("host", "counted", False),
        ("device", "coupled", True),
        ("device", "counted", False),
        ("own chains", "counted", True),
        ("own chains", "coupled", False),
        ("own trees", "greedy", True),
    ],
)
def test_suspended_sessions_say_what_they_would_have_said(
    engine: str,
    name: str,
    ahead: bool,
    tiny_target: Path,
    tiny_head: Path,
    calm: dict[str, list[list[int]]],
) -> None:
    runner, pool = make(engine, tiny_target, tiny_head)
    driver = Driver(runner, pool, runner.make_swap_space(64 * MIB, pool), ahead=ahead)
    plan = OWN if engine.startswith("own") else PLAIN
    assert texts(driver, specs(SAMPLINGS[name], plan), disturb(1, every=3)) == calm[name]
    assert driver.gone == {True, False}


def test_long_rounds_behind_each_other_find_all_their_blocks(
    tiny_target: Path, tiny_head: Path
) -> None:
    """Drafts that stand by chance are the text: a step of one that found no block would show."""
    rates = "0.9,0.95,0.95,0.95,0.95,0.95"
    plan = replace(OWN, draft_tokens=6)
    runner, pool = device_runner(tiny_target, tiny_head, draft_length=6, simulated_acceptance=rates)
    found = []
    for whole in (True, False):
        driver = Driver(runner, pool, ahead=True, whole=whole)
        answers = specs(SAMPLINGS["greedy"], plan, max_new_tokens=60)
        found.append((texts(driver, answers), driver.counts))
    assert found[0] == found[1]
    counts = found[0][1]
    assert sum(counts) > 3 * len(counts)


@pytest.mark.parametrize("engine", ["host", "device"])
def test_rows_that_are_padded_to_others_drafts_write_to_nobodys_blocks(
    engine: str, tiny_target: Path, tiny_head: Path, calm: dict[str, list[list[int]]]
) -> None:
    chooser = np.random.default_rng(5)

    def draft(session: Session) -> VerifyDraft | None:
        nodes = int(chooser.integers(0, MAX_NODES)) if chooser.random() < 0.5 else 0
        if not nodes or session.remaining < 2:
            return None
        tree = make_tree(chooser.integers(0, 384, nodes).tolist())
        return VerifyDraft(tree=tree, distribution=None)

    runner, pool = make(engine, tiny_target, tiny_head)
    driver = Driver(runner, pool, draft=draft)
    assert texts(driver, specs(SAMPLINGS["coupled"])) == calm["coupled"]


def test_a_head_drafts_again_after_one_round(tiny_target: Path, tiny_head: Path) -> None:
    for swap in (True, False):
        runner, pool = make("own chains", tiny_target, tiny_head)
        assert isinstance(runner, GpuModelRunner) and runner.in_process_drafter is not None
        driver = Driver(runner, pool, runner.make_swap_space(64 * MIB, pool))
        session = driver.open(specs(SAMPLINGS["greedy"], OWN)[0])
        driver.resume(session)
        while session.emitted < 8:
            driver.step()
        rows = session.kv.len
        before = _head_kv(runner, session.kv.blocks, rows)
        assert driver.suspend(session, swap=swap) is swap
        # Somebody else writes to the blocks meanwhile.
        other = driver.open(specs(SAMPLINGS["greedy"], OWN)[2])
        driver.resume(other)
        for _ in range(5):
            driver.step()
        assert driver.resume(session) is swap
        while driver.runner.in_process_draft_length and session.phase is PREFILLING:
            driver.step()
        after = _head_kv(runner, session.kv.blocks, rows)
        assert torch.equal(before, after) if swap else torch.allclose(before, after, atol=1e-5)
        slot = runner.device_slots.get_slot(session).slot
        assert runner.in_process_drafter.tokens[slot].tolist() == [-1, -1, -1]
        driver.step()
        assert driver.drafted[session.ticket][-1] == 0
        driver.step()
        assert driver.drafted[session.ticket][-1] == 3
        assert min(runner.in_process_drafter.tokens[slot].tolist()) >= 0
        driver.close()


def _head_kv(runner: GpuModelRunner, blocks: Any, rows: int) -> torch.Tensor:
    assert runner.in_process_drafter is not None
    slots = torch.tensor([b * 16 + n for b in blocks for n in range(16)])[:rows]
    return runner.in_process_drafter.storage[:, :, :, slots].clone()


def test_a_suspended_session_holds_nothing_but_its_copy(tiny_target: Path, tiny_head: Path) -> None:
    for engine in ("host", "own chains"):
        runner, pool = make(engine, tiny_target, tiny_head)
        swap = runner.make_swap_space(8 * 16 * pool.storage.nbytes // 1024, pool)
        driver, free = Driver(runner, pool, swap), pool.free_blocks
        session = driver.open(specs(SAMPLINGS["greedy"])[2])
        driver.resume(session)
        for _ in range(6):
            driver.step()
        assert driver.suspend(session, swap=True)
        assert pool.free_blocks == free
        assert swap.used_bytes == -(-(session.length - 1) // 16) * swap.block_bytes
        driver.close()
        assert swap.used_bytes == 0


def test_without_room_in_the_budget_the_prefix_runs_again(tiny_target: Path) -> None:
    runner, pool = host_runner(tiny_target)
    swap = runner.make_swap_space(2 * pool.storage.nbytes // 64, pool)
    driver = Driver(runner, pool, swap)
    session = driver.open(specs(SAMPLINGS["greedy"])[2])
    driver.resume(session)
    for _ in range(6):
        driver.step()
    assert not driver.suspend(session, swap=True)
    assert swap.used_bytes == 0
    assert not driver.resume(session)
    assert session.kv.len == 0
    driver.close()


def test_more_sessions_may_wait_than_have_a_place(tiny_target: Path) -> None:
    runner, pool = device_runner(tiny_target)
    driver = Driver(runner, pool)
    sessions = [driver.open(make_spec(f"s{n}", drafter=None)) for n in range(6)]
    for session in sessions[:4]:
        driver.resume(session)
    with pytest.raises(ResourceExhaustedError) as caught:
        driver.resume(sessions[4])
    assert caught.value.reason == "SESSIONS_EXHAUSTED"
    driver.suspend(sessions[0], swap=False)
    driver.resume(sessions[4])
    driver.close()


def test_what_can_never_be_served_is_refused_at_once(tiny_target: Path) -> None:
    runner, pool = device_runner(tiny_target)
    spec = make_spec(stop_token_ids=tuple(range(300)), min_new_tokens=2, drafter=None)
    with pytest.raises(InvalidRequestError, match="stop ids"):
        Driver(runner, pool).open(spec)
