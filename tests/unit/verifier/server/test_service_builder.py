"""From a configuration to a service: which engine runs the rounds, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from outrider_verifier.config import DEFAULT_KV_TOKENS, VerifierConfig
from outrider_verifier.model_runner.cpu_runner import CpuModelRunner
from outrider_verifier.server.service_builder import (
    build_model_runner,
    build_service,
    uses_gpu_runner,
)

from outrider.engine.model_loader import load_target
from outrider.engine.weight_copies import WeightCopies
from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.spec.plan import DraftMethod


def config(model: Path, **settings: Any) -> VerifierConfig:
    """A small verifier."""
    return VerifierConfig(model=str(model), **({"kv_tokens": 1024, "max_sessions": 2} | settings))


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({}, False),
        ({"feature_head": "h"}, False),
        ({"feature_head": "h", "placement": "colocated"}, True),
        ({"feature_head": "h", "placement": "fused"}, True),
        ({"simulated_acceptance": "2.6"}, True),
        ({"device": "cuda:0"}, True),
    ],
)
def test_the_device_engine_runs_what_only_it_can(settings: dict[str, Any], device: bool) -> None:
    assert uses_gpu_runner(config(Path("m"), **settings)) is device


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"device": "no such"}, InvalidRequestError, "device"),
        ({"device": "cuda:99"}, FailedPreconditionError, "cuda:99 is not there"),
        ({"placement": "fused", "feature_head": "h"}, FailedPreconditionError, "triton"),
    ],
)
def test_what_this_installation_cannot_compute_on_is_refused_before_anything_is_loaded(
    settings: dict[str, Any],
    error: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(error, match=said):
        build_service(config(Path("no-such-model"), **settings))


async def test_on_a_cpu_the_hosts_engine_runs_over_the_default_budget(tiny_target: Path) -> None:
    service = build_service(config(tiny_target, kv_tokens=0))
    assert isinstance(service.core.runner, CpuModelRunner)
    info = await service.info()
    assert info.kv_total_blocks * info.kv_block_tokens == DEFAULT_KV_TOKENS
    assert (info.in_process_methods, info.in_process_draft_length, info.simulated_acceptance) == (
        (),
        0,
        "",
    )


@pytest.mark.parametrize("placement", ["colocated", "fused"])
async def test_a_head_in_this_process_is_told_to_the_router(
    placement: str, tiny_target: Path, tiny_head: Path
) -> None:
    service = build_service(
        config(tiny_target, feature_head=str(tiny_head), placement=placement, draft_length=4)
    )
    info = await service.info()
    assert (info.in_process_methods, info.in_process_draft_length) == ((DraftMethod.EAGLE3,), 4)
    # What the engine holds for itself is no capacity.
    assert info.kv_free_blocks == info.kv_total_blocks


async def test_simulated_acceptance_is_said_in_the_log_and_in_the_info(
    tiny_target: Path, tiny_head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        service = build_service(
            config(tiny_target, feature_head=str(tiny_head), simulated_acceptance="2.6")
        )
    assert "SIMULATED ACCEPTANCE" in caplog.text
    assert (await service.info()).simulated_acceptance == "2.6"


def test_a_head_that_cannot_draft_here_is_refused(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match="feature_head"):
        build_service(config(tiny_target, feature_head=str(tmp_path), placement="fused"))
    other = tmp_path / "head"
    shutil.copytree(tiny_head, other)
    shape = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(shape | {"vocab_size": 512}))
    with pytest.raises((InvalidRequestError, FailedPreconditionError)):
        build_service(config(tiny_target, feature_head=str(other), placement="fused"))


def test_a_cpu_is_served_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import outrider_verifier.server.service_builder, outrider_verifier.server.service\n"
        "import outrider_verifier.model_runner.cpu_runner\n"
        "import outrider_drafter.server.build\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_context_that_the_model_cannot_have_is_cut_and_said(
    tiny_target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for asked, warned in ((64, False), (1 << 20, True)):
        caplog.clear()
        build_service(config(tiny_target, max_context_len=asked))
        assert ("max_context_len is cut" in caplog.text) is warned


def test_weights_that_cannot_be_copied_end_the_start_with_their_error(tiny_target: Path) -> None:
    def fail() -> None:
        raise InvalidRequestError("a damaged tensor")

    copies = WeightCopies()
    copies.add(fail)
    target = load_target(tiny_target, kv_tokens=1024, packed=False, copies=copies)
    with pytest.raises(InvalidRequestError, match="a damaged tensor"):
        build_model_runner(
            config(tiny_target, simulated_acceptance="2.6"), target, None, copies=copies
        )


def test_a_start_logs_the_seconds_of_its_stages(
    tiny_target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        build_service(config(tiny_target))
    (record,) = [each for each in caplog.records if each.message == "start-up finished"]
    seconds = record.__dict__["seconds"]
    assert list(seconds) == ["imports", "weights", "total"]
    assert 0.0 <= seconds["weights"] <= seconds["total"]
    assert 0.0 < seconds["imports"] <= seconds["total"]
