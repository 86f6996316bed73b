"""A drafter on another device drafts what one in the verifier's process would, and whatever becomes
of it changes no text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from outrider_verifier.config import VerifierConfig
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.eagle_forward import HeadForward
from outrider.engine.device.drafting.eagle_weights import HeadWeights
from outrider.engine.device.exchange.draft_replica import DraftReplica, ReplicaSlots
from outrider.engine.device.exchange.memory import (
    SharedMemory,
    allocate_on_device,
    allocate_on_host,
    map_device_memory,
    map_host_memory,
)
from outrider.engine.device.exchange.outcome_drafter import OutcomeDrafter
from outrider.engine.heads import load_feature_projection, load_head
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import load_target
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import SessionSpec
from tests.unit.verifier.harness import make_spec
from tests.unit.verifier.kv.test_suspend_resume import disturb
from tests.unit.verifier.round_driver import (
    MAX_NODES,
    Driver,
    device_runner,
    host_runner,
    texts,
)

CPU = torch.device("cpu")
BLOCKS = 64
PLAN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=3)
PROMPTS = (tuple(range(40, 81)), (7, 8, 9), tuple(range(100, 150)))


class Exchange(NamedTuple):
    """Rounds whose drafter is elsewhere, and that drafter."""

    driver: Driver
    replica: DraftReplica


def exchanging(
    target_dir: Path,
    head_dir: Path,
    *,
    timeout_ms: float = 1000.0,
    fan_out: int = 0,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Exchange:
    """A runner and a replica, which has joined, in this process."""
    place: dict[str, Any] = {"device": str(device), "dtype": dtype}
    target = load_target(target_dir, kv_tokens=16 * BLOCKS, packed=False, **place)
    projection = load_feature_projection(head_dir, num_target_layers=6, **place)
    config = VerifierConfig(
        model="tiny",
        max_sessions=4,
        device=str(device),
        max_tree_nodes=MAX_NODES,
        feature_head=str(head_dir),
        exchange_fan_out=fan_out,
        exchange_ahead_sessions=4,
    )
    runner = GpuModelRunner.build(config, target, projection, exchange_timeout_ms=timeout_ms)
    remote = runner.remote_drafter
    assert remote is not None
    head = load_head(
        head_dir, embedding=target.embedding, num_target_layers=6, make_linear=PlainLinear, **place
    )
    weights, shape = HeadWeights.from_head(head), remote.exchange_shape
    replica = DraftReplica(
        lambda storage, rows: HeadForward(
            weights, storage=storage, block_tokens=target.pool.block_tokens, max_len=rows
        ),
        (1, head.config.num_kv_heads, head.config.head_dim),
        shape,
        ReplicaSlots(BLOCKS, target.pool.block_tokens, BLOCKS),
        vocab_size=target.vocab_size,
        dtype=dtype,
        device=device,
    )
    drafts, peers_drafts = both_sides(shape.draft_layout().num_bytes, device)
    verdicts, peers_verdicts = both_sides(shape.verdict_layout().num_bytes, device)
    replica.attach(verdicts, peers_drafts)
    remote.attach(drafts, peers_verdicts, replica)
    swap = runner.make_swap_space(1 << 22, target.pool)
    return Exchange(Driver(runner, target.pool, swap, draft_length=3), replica)


def both_sides(num_bytes: int, device: torch.device) -> tuple[SharedMemory, SharedMemory]:
    """Memory as the side that allocated it sees it, and as its peer does."""
    is_cuda = device.type == "cuda"
    own = (allocate_on_device if is_cuda else allocate_on_host)(num_bytes, device)
    descriptor = own.make_descriptor()
    peer = (map_device_memory if is_cuda else map_host_memory)(descriptor, num_bytes, device)
    os.close(descriptor)
    return own, peer


def specs(sampling: SamplingParams) -> list[SessionSpec]:
    return [
        make_spec(
            f"s{index}", prompt=prompt, max_new_tokens=20 + index, plan=PLAN, sampling=sampling
        )
        for index, prompt in enumerate(PROMPTS)
    ]


SAMPLINGS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=0.8, seed=11, top_p=0.9),
    "penalties": SamplingParams(temperature=0.9, presence_penalty=1.5, seed=5),
}


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_a_drafter_elsewhere_drafts_as_one_in_process(
    tiny_target: Path, tiny_head: Path, name: str
) -> None:
    runner, pool = device_runner(tiny_target, tiny_head, blocks=BLOCKS, draft_length=3)
    drafts: dict[str, list[Tensor]] = {"here": [], "elsewhere": []}

    def record(driver: Driver, step: int) -> None:
        runner = driver.runner
        assert isinstance(runner, GpuModelRunner)
        drafter = runner.rounds.drafter
        assert drafter is not None
        where = "elsewhere" if runner.remote_drafter is not None else "here"
        drafts[where].append(drafter.tokens[: len(PROMPTS)].clone())

    expected = texts(Driver(runner, pool), specs(SAMPLINGS[name]), record)
    exchange = exchanging(tiny_target, tiny_head)
    assert texts(exchange.driver, specs(SAMPLINGS[name]), record) == expected
    # All decode by then; what a round has drafted the next one takes.
    first, last = 5, 18
    here, elsewhere = drafts["here"][first:last], drafts["elsewhere"][first + 1 : last + 1]
    assert torch.equal(torch.stack(here), torch.stack(elsewhere))
    assert bool((here[0] >= 0).all()) and not torch.equal(here[0], here[1])


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_that_run_ahead_change_no_text(
    tiny_target: Path, tiny_head: Path, name: str
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), specs(SAMPLINGS[name]))
    exchange = exchanging(tiny_target, tiny_head)
    exchange.driver.ahead = True
    assert texts(exchange.driver, specs(SAMPLINGS[name])) == expected
    assert exchange.replica.is_open


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sessions_that_go_and_come_back_keep_their_texts(
    tiny_target: Path, tiny_head: Path, name: str
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), specs(SAMPLINGS[name]))
    for seed in range(2):
        driver = exchanging(tiny_target, tiny_head).driver
        driver.ahead = bool(seed % 2)
        assert texts(driver, specs(SAMPLINGS[name]), disturb(seed)) == expected
        assert True in driver.gone or False in driver.gone


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_drafter_that_is_lost_changes_no_text(
    tiny_target: Path, tiny_head: Path, name: str
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), specs(SAMPLINGS[name]))
    driver = exchanging(tiny_target, tiny_head, timeout_ms=1.0).driver

    def lose(driver: Driver, step: int) -> None:
        if step == 6:
            driver.settle_all()
            runner = driver.runner
            assert isinstance(runner, GpuModelRunner)
            runner.detach_remote_drafter()

    assert texts(driver, specs(SAMPLINGS[name]), lose) == expected


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_drafter_that_stops_changes_no_text_and_costs_one_wait(
    tiny_target: Path, tiny_head: Path, name: str
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), specs(SAMPLINGS[name]))
    exchange = exchanging(tiny_target, tiny_head, timeout_ms=1.0)
    replica = exchange.replica

    def stop(driver: Driver, step: int) -> None:
        if step == 6:
            replica.detach()

    assert texts(exchange.driver, specs(SAMPLINGS[name]), stop) == expected
    runner = exchange.driver.runner
    assert isinstance(runner, GpuModelRunner) and runner.remote_drafter is not None
    # The ring has had no bank for the rounds since.
    assert not runner.remote_drafter.is_open and runner.remote_drafter.is_late


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_of_outcomes_change_no_text(
    tiny_target: Path, tiny_head: Path, name: str, ahead: bool
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), specs(SAMPLINGS[name]))
    exchange = exchanging(tiny_target, tiny_head, fan_out=8)
    exchange.driver.ahead = ahead
    assert texts(exchange.driver, specs(SAMPLINGS[name])) == expected
    assert exchange.replica.is_open


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_a_draft_of_the_outcome_that_came_true_is_verified_next(
    tiny_target: Path, tiny_head: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec,) = specs(SAMPLINGS[name])[:1]
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), [spec])
    text = torch.tensor([*PROMPTS[0], *expected[0], 0])
    rank = OutcomeDrafter._rank

    def foretell(self: OutcomeDrafter, rows: NewRows, *args: Any) -> tuple[Any, Tensor, Tensor]:
        # Row i has the token behind it; what it predicts is the next but one.
        found, live, features = rank(self, rows, *args)
        found.places[:, 2], found.are_there[:, 2] = 0, True
        found.tokens[:, 2] = text[(live.long() + 2).clamp(max=len(text) - 1)].int()
        return found, live, features

    monkeypatch.setattr(OutcomeDrafter, "_rank", foretell)
    verified: list[tuple[int, list[int], list[int]]] = []
    exchange = exchanging(tiny_target, tiny_head, fan_out=4)

    def record(driver: Driver, step: int) -> None:
        runner = driver.runner
        assert isinstance(runner, GpuModelRunner) and runner.remote_drafter is not None
        remote = runner.remote_drafter
        chosen = remote._chosen
        # The drafter goes on from the draft that was chosen, and so offers it again.
        offered = remote._drafts.bank(0)[2][0].tolist()
        verified.append((int(chosen.outcomes[0]), chosen.tokens[0].tolist(), offered))

    assert texts(exchange.driver, [spec], record) == expected
    hits = [each for each in verified[5:-2] if each[0] == 2]
    assert len(hits) == len(verified[5:-2])
    assert all(chosen == offered for _, chosen, offered in hits)
