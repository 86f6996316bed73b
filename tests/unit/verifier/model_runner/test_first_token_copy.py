"""The first token of an answer is on its way to the host before the head drafts behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.engine.device.inputs.round_rows import RoundRows
from outrider.engine.device.round_launcher import LaunchedRound, RoundLauncher
from outrider.engine.device.round_program import RoundProgram
from outrider.engine.device.transfer.buffers import Downloader
from outrider.spec.sampling import SamplingParams
from tests.unit.verifier.device_serving import OWN, serving
from tests.unit.verifier.server.test_structured_output import run_one


@pytest.mark.parametrize("placement", ["fused", "colocated"])
async def test_a_prompt_is_read_back_before_its_drafts(
    placement: str, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[list[str]] = []
    wanted: list[list[str]] = []
    launch = RoundLauncher.launch_round

    def launched(device_rounds: RoundLauncher, rows: RoundRows, **kwargs: Any) -> LaunchedRound:
        rounds.append([])
        at_once = placement == "fused" and len(rows.slots) > 0
        wanted.append(["draft", "read"] if at_once else ["read", "draft"])
        return launch(device_rounds, rows, **kwargs)

    def noted(name: str, owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def spy(*args: Any, **kwargs: Any) -> Any:
            rounds[-1].append(name)
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, method, spy)

    monkeypatch.setattr(RoundLauncher, "launch_round", launched)
    noted("draft", RoundProgram, "run_drafts")
    noted("read", Downloader, "start_downloads")
    async with serving(tiny_target, tiny_head, placement=placement) as service:
        tokens, _ = await run_one(service, "alone", OWN, SamplingParams())
    assert len(tokens) > 4 and rounds == wanted and wanted[0] == ["read", "draft"]
