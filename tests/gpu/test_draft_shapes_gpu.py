"""Rounds of captured graphs change between chains and trees, and no text changes with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.verifier.model_runner.test_draft_shapes import (
    CHAIN,
    SAMPLINGS,
    SETTINGS,
    TREE,
    specs,
)
from tests.unit.verifier.round_driver import Driver, device_runner, texts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_of_either_shape_change_no_text(
    name: str, device: torch.device, tiny_target: Path, tiny_head: Path
) -> None:
    wanted = specs(SAMPLINGS[name])
    runner, pool = device_runner(tiny_target, tiny_head, device=str(device), **SETTINGS)
    expected = texts(Driver(runner, pool, ahead=True), wanted)
    driver = Driver(runner, pool, ahead=True)

    def change(_: Driver, step: int) -> None:
        runner.set_draft_shape(TREE if step // 4 % 2 else CHAIN)

    assert texts(driver, wanted, change) == expected
    verified = {nodes for rows in driver.drafted.values() for nodes in rows[1:]}
    assert verified == {0, CHAIN - 1, TREE - 1}
