"""A drafter on another device drafts what one in the verifier's process would, and whatever becomes
of it changes no text."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
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
from outrider.engine.device.exchange.draft_replica import (
    DraftReplica,
    ReplicaRound,
    ReplicaSlots,
)
from outrider.engine.device.exchange.look_ahead_drafter import LookAheadDrafter
from outrider.engine.device.exchange.memory import (
    SharedMemory,
    allocate_on_device,
    allocate_on_host,
    map_device_memory,
    map_host_memory,
)
from outrider.engine.device.exchange.remote_drafter import RemoteDrafter
from outrider.engine.device.graphs import shape_family
from outrider.engine.draft_sampling import DistributionLimits
from outrider.engine.heads import load_feature_projection, load_head
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import load_target
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
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
    join: Callable[[], DraftReplica]
    """Has a new drafter join."""


def exchanging(
    target_dir: Path,
    head_dir: Path,
    *,
    timeout_ms: float = 1000.0,
    fan_out: int = 0,
    distribution_ids: int = 2048,
    acceptance: str = "",
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
        draft_length=3,
        device_exchange="on",
        exchange_fan_out=fan_out,
        exchange_ahead_sessions=4,
        exchange_distribution_ids=distribution_ids,
        simulated_acceptance=acceptance,
    )
    runner = GpuModelRunner.build(config, target, projection, exchange_timeout_ms=timeout_ms)
    remote = runner.remote_drafter
    assert remote is not None
    head = load_head(
        head_dir, embedding=target.embedding, num_target_layers=6, make_linear=PlainLinear, **place
    )
    weights, shape = HeadWeights.from_head(head), remote.exchange_shape

    def join() -> DraftReplica:
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
        return replica

    swap = runner.make_swap_space(1 << 22, target.pool)
    return Exchange(Driver(runner, target.pool, swap, draft_length=3), join(), join)


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
REJECTION = SamplingParams(temperature=0.8, top_p=0.95, rule=Rule.REJECTION, seed=8)


@pytest.mark.parametrize("name", SAMPLINGS)
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


def test_the_planner_knows_the_shape_of_drafts_from_elsewhere(
    tiny_target: Path, tiny_head: Path
) -> None:
    runner = exchanging(tiny_target, tiny_head).driver.runner
    (shape,) = runner.draft_shapes(2)
    assert shape.num_nodes == 1 + PLAN.draft_tokens and not shape.is_tree


@pytest.mark.parametrize("name", [*SAMPLINGS, "rejection"])
def test_rounds_that_verify_a_part_of_each_chain_change_no_text(
    tiny_target: Path, tiny_head: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_family, "MIN_SHORT_CHAIN_ROWS", 1)
    sampling = SAMPLINGS.get(name, REJECTION)
    exchange = exchanging(tiny_target, tiny_head)
    runner = exchange.driver.runner
    assert [each.num_nodes for each in runner.draft_shapes(2)] == [4, 3]

    def change(driver: Driver, step: int) -> None:
        driver.runner.set_draft_shape(4 - step // 3 % 2)

    found = texts(exchange.driver, specs(sampling), change)
    verified = {nodes for rows in exchange.driver.drafted.values() for nodes in rows[2:]}
    assert exchange.replica.is_open
    assert verified == {3, 2}
    if name == "rejection":
        # Which tokens are drawn depends on the drafts that are verified.
        return
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    assert found == texts(Driver(runner, pool), specs(sampling))


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


@pytest.mark.parametrize("ahead", [False, True])
def test_sessions_whose_drafts_are_all_accepted_never_lack_one(
    tiny_target: Path, tiny_head: Path, ahead: bool
) -> None:
    # A round of them all writes four rows, of blocks of sixteen: these prompts meet the end of a
    # block in all ways.
    given = [
        make_spec(f"s{count}", prompt=tuple(range(40, 40 + count)), max_new_tokens=60, plan=PLAN)
        for count in (5, 6, 7, 8)
    ]
    driver, replica, _ = exchanging(tiny_target, tiny_head, acceptance="1,1,1")
    driver.ahead = ahead

    def look(_: Driver, step: int) -> None:
        if 4 < step < 12:
            assert replica.state.words[1] and bool((drafter.tokens[:4] >= 0).all())

    assert isinstance(driver.runner, GpuModelRunner)
    drafter = driver.runner.remote_drafter
    assert drafter is not None
    texts(driver, given, look)


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
    # No row has had a draft since, and each says so.
    assert all(0 < sum(map(bool, drafted)) < 10 for drafted in exchange.driver.drafted.values())
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
    rank = LookAheadDrafter.rank_outcomes

    def foretell(self: LookAheadDrafter, rows: NewRows, *args: Any) -> tuple[Any, Tensor, Tensor]:
        # Row i has the token behind it; what it predicts is the next but one.
        found, live, features = rank(self, rows, *args)
        found.places[:, 2], found.are_there[:, 2] = 0, True
        found.tokens[:, 2] = text[(live.long() + 2).clamp(max=len(text) - 1)].int()
        return found, live, features

    monkeypatch.setattr(LookAheadDrafter, "rank_outcomes", foretell)
    verified: list[tuple[int, list[int], list[int]]] = []
    exchange = exchanging(tiny_target, tiny_head, fan_out=4)

    def record(driver: Driver, step: int) -> None:
        runner = driver.runner
        assert isinstance(runner, GpuModelRunner) and runner.remote_drafter is not None
        remote = runner.remote_drafter
        chosen = remote.chosen
        # The drafter goes on from the draft that was chosen, and so offers it again.
        offered = remote.drafts.bank(0)[2][0].tolist()
        verified.append((int(chosen.outcomes[0]), chosen.tokens[0].tolist(), offered))

    assert texts(exchange.driver, [spec], record) == expected
    hits = [each for each in verified[5:-2] if each[0] == 2]
    assert len(hits) == len(verified[5:-2])
    assert all(chosen == offered for _, chosen, offered in hits)


def rejection_beside(sampling: SamplingParams) -> list[SessionSpec]:
    """Sessions of another rule, and one of the rejection rule in their midst."""
    found = specs(sampling)
    found[1] = replace(found[1], sampling=REJECTION)
    return found


def remote_of(exchange: Exchange) -> RemoteDrafter:
    """What the verifier has of the drafter."""
    runner = exchange.driver.runner
    assert isinstance(runner, GpuModelRunner) and runner.remote_drafter is not None
    return runner.remote_drafter


def drafted_rounds(driver: Driver) -> list[bool]:
    """Of the rejection session's rounds, the first and last ones left out, whether each was judged
    target-only for want of a distribution."""
    return driver.target_only[1][4:-2]


@pytest.mark.parametrize("fan_out", [0, 8])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_drafts_of_the_rejection_rule_come_with_their_distributions(
    tiny_target: Path, tiny_head: Path, name: str, ahead: bool, fan_out: int
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), rejection_beside(SAMPLINGS[name]))
    exchange = exchanging(tiny_target, tiny_head, fan_out=fan_out)
    exchange.driver.ahead = ahead
    found = texts(exchange.driver, rejection_beside(SAMPLINGS[name]))
    # The others' texts do not depend on who is beside them.
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert exchange.replica.is_open
    assert len(drafted_rounds(exchange.driver)) > 5
    assert not any(drafted_rounds(exchange.driver))


def test_the_rejection_rule_judges_as_with_a_drafter_in_process(
    tiny_target: Path, tiny_head: Path
) -> None:
    # A flat target accepts drafts of a head that knows nothing of it. What is rounded away of the
    # distributions, of which nothing is cut off, decides none of these draws.
    flat = SamplingParams(temperature=3.0, rule=Rule.REJECTION, seed=8)
    runner, pool = device_runner(tiny_target, tiny_head, blocks=BLOCKS, draft_length=3)
    here = Driver(runner, pool)
    expected = texts(here, specs(flat))
    exchange = exchanging(tiny_target, tiny_head)
    exchange.replica.distribution_limits = DistributionLimits(mass=1.0, max_ids=2048)
    assert texts(exchange.driver, specs(flat)) == expected
    assert max(here.counts) > 1 and max(exchange.driver.counts) > 1


@pytest.mark.parametrize("fault", ["nothing", "counts", "tokens", "sizes"])
def test_without_sound_distributions_the_rejection_rule_judges_target_only(
    tiny_target: Path, tiny_head: Path, fault: str
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), rejection_beside(SAMPLINGS["coupled"]))
    ids = 0 if fault == "nothing" else 2048
    exchange = exchanging(tiny_target, tiny_head, distribution_ids=ids)
    _, _, tokens, sizes, _, counts, *_ = remote_of(exchange).drafts.bank(0)
    slot = 1

    def corrupt(driver: Driver, step: int) -> None:
        if fault == "counts":
            counts[slot, 1, 0] = 0
        elif fault == "tokens":
            # An id that the draft vocabulary does not have.
            tokens[slot, 0] = int(remote_of(exchange).vocab_size - 1)
        elif fault == "sizes":
            sizes[slot, 2] = -1

    found = texts(exchange.driver, rejection_beside(SAMPLINGS["coupled"]), corrupt)
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert all(drafted_rounds(exchange.driver))
    assert exchange.replica.is_open


def test_only_rounds_of_the_rejection_rule_take_distributions(
    tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = set[tuple[bool, bool]]()
    launch = DraftReplica.launch_round

    def record(self: DraftReplica, each: ReplicaRound) -> None:
        announced.add((each.is_sampled, each.has_rejection))
        launch(self, each)

    monkeypatch.setattr(DraftReplica, "launch_round", record)
    for sampling, kind in (
        (SAMPLINGS["greedy"], (False, False)),
        (SAMPLINGS["coupled"], (True, False)),
        (REJECTION, (True, True)),
    ):
        announced.clear()
        exchange = exchanging(tiny_target, tiny_head)
        texts(exchange.driver, specs(sampling))
        assert announced == {kind}
        # Nothing was drawn from distributions for anybody else.
        assert bool(remote_of(exchange).drafts.bank(0)[3].any()) is kind[1]


@pytest.mark.parametrize("name", ["greedy", "coupled"])
@pytest.mark.parametrize("swapped", [False, True])
def test_sessions_that_are_recomputed_draft_with_the_next_drafter(
    tiny_target: Path, tiny_head: Path, name: str, swapped: bool
) -> None:
    """`swapped`: their KV was swapped meanwhile, and came back without the draft's."""
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), specs(SAMPLINGS[name]))
    exchange = exchanging(tiny_target, tiny_head)
    calm, found = Drafts(), Drafts()

    def disturb(driver: Driver, step: int) -> None:
        runner = driver.runner
        assert isinstance(runner, GpuModelRunner)
        found.record(driver, step)
        if step == 6 and swapped:
            for session in list(driver.sessions):
                assert driver.suspend(session, swap=True)
                driver.resume(session)
        elif step == 6:
            runner.detach_remote_drafter()
            exchange.join()
        elif step == 9:
            for session in list(driver.sessions):
                driver.suspend(session, swap=False)
                driver.resume(session)
        has_draft_kv = [*map(runner.has_draft_kv, driver.sessions)]
        assert has_draft_kv == [step not in (6, 7, 8)] * len(has_draft_kv)

    assert texts(exchange.driver, specs(SAMPLINGS[name]), disturb) == expected
    assert texts(exchanging(tiny_target, tiny_head).driver, specs(SAMPLINGS[name]), calm.record)
    # All decode by then, and draft what they would have drafted.
    again = {key: found.by_prefix[key] for key, step in found.steps.items() if step >= 16}
    assert len(again) > len(PROMPTS)
    assert again == {key: calm.by_prefix[key] for key in again}


class Drafts:
    """What was drafted for each session behind each of its prefixes that a round verified."""

    def __init__(self) -> None:
        self.by_prefix: dict[tuple[int, int], list[int]] = {}
        """By ticket and length."""
        self.steps: dict[tuple[int, int], int] = {}
        self._lengths: dict[int, int] = {}

    def record(self, driver: Driver, step: int) -> None:
        """Of the round before this step, once it is settled."""
        runner = driver.runner
        assert isinstance(runner, GpuModelRunner) and runner.remote_drafter is not None
        driver.settle_all()
        for session in driver.sessions:
            slot = runner.device_slots.get_slot(session).slot
            key = session.ticket, self._lengths.get(session.ticket, 0)
            if session.length > key[1] > 0:
                self.by_prefix[key] = runner.remote_drafter.tokens[slot].tolist()
                self.steps[key] = step
            self._lengths[session.ticket] = session.length
