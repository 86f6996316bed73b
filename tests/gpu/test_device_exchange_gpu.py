"""Rounds over exchange buffers on a GPU, with graphs: texts are those without a drafter, drafts
those of an in-process one, and a drafter that is lost is missed by nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from torch import Tensor

from tests.unit.verifier.kv.test_suspend_resume import disturb
from tests.unit.verifier.model_runner.test_device_exchange import (
    BLOCKS,
    PROMPTS,
    REJECTION,
    SAMPLINGS,
    drafted_rounds,
    exchanging,
    rejection_beside,
    specs,
)
from tests.unit.verifier.round_driver import Driver, device_runner, host_runner, texts

pytestmark = pytest.mark.gpu


def recorded(drafts: list[Tensor], driver: Driver, step: int) -> None:
    """Keep the drafts that lie on the device."""
    runner = driver.runner
    assert isinstance(runner, GpuModelRunner) and runner.rounds.drafter is not None
    drafts.append(runner.rounds.drafter.tokens[: len(PROMPTS)].cpu())


@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_a_drafter_elsewhere_drafts_as_one_in_process(
    device: torch.device, tiny_target: Path, tiny_head: Path, name: str
) -> None:
    runner, pool = device_runner(
        tiny_target, tiny_head, blocks=BLOCKS, draft_length=3, device=str(device)
    )
    here: list[Tensor] = []
    elsewhere: list[Tensor] = []
    expected = texts(
        Driver(runner, pool), specs(SAMPLINGS[name]), lambda *step: recorded(here, *step)
    )
    exchange = exchanging(tiny_target, tiny_head, device=device)
    found = texts(exchange.driver, specs(SAMPLINGS[name]), lambda *step: recorded(elsewhere, *step))
    assert found == expected
    assert torch.equal(torch.stack(here[5:18]), torch.stack(elsewhere[6:19]))


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("ahead", [False, True])
def test_sessions_that_go_and_come_back_keep_their_texts(
    device: torch.device, tiny_target: Path, tiny_head: Path, name: str, ahead: bool
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), specs(SAMPLINGS[name]))
    exchange = exchanging(tiny_target, tiny_head, device=device, fan_out=8 if ahead else 0)
    exchange.driver.ahead = ahead
    assert texts(exchange.driver, specs(SAMPLINGS[name]), disturb(7)) == expected
    assert exchange.replica.state.words[1] == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_of_the_rejection_rule_come_with_their_distributions(
    device: torch.device, tiny_target: Path, tiny_head: Path, ahead: bool
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), rejection_beside(SAMPLINGS["greedy"]))
    exchange = exchanging(tiny_target, tiny_head, device=device, fan_out=8 if ahead else 0)
    exchange.driver.ahead = ahead
    found = texts(exchange.driver, rejection_beside(SAMPLINGS["greedy"]))
    assert (found[0], found[2]) == (expected[0], expected[2])
    assert not any(drafted_rounds(exchange.driver))
    # Rounds of this rule alone, from the graphs that the first ones have captured.
    texts(exchange.driver, specs(REJECTION))
    assert exchange.replica.state.words[1] == 1


def test_a_drafter_that_stops_changes_no_text(
    device: torch.device, tiny_target: Path, tiny_head: Path
) -> None:
    runner, pool = host_runner(tiny_target, blocks=BLOCKS)
    expected = texts(Driver(runner, pool), specs(SAMPLINGS["greedy"]))
    exchange = exchanging(tiny_target, tiny_head, device=device, timeout_ms=5.0)
    replica = exchange.replica

    def stop(driver: Driver, step: int) -> None:
        if step == 6:
            replica.detach()

    assert texts(exchange.driver, specs(SAMPLINGS["greedy"]), stop) == expected
