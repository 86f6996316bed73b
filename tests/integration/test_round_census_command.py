"""`outrider bench round-census` with real processes over the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.bench_command import run_bench


@pytest.mark.timeout(240)
def test_it_counts_files_and_kinds_of_all_processes(tiny_target: Path, tiny_head: Path) -> None:
    flags: dict[str, object] = {"model": tiny_target, "head": tiny_head, "threads": 1}
    done = run_bench("round-census", {**flags, "max-tokens": 1500})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    drafted, plain = result["drafted"], result["plain"]
    assert set(drafted) == {"verifier", "drafter"} and set(plain) == {"verifier"}
    assert "outrider_verifier.engine.round_executor" in plain["verifier"]["files"]
    assert "outrider_verifier.model_runner.batch.VerifyRow" in drafted["verifier"]["kinds"]
    assert "outrider_drafter.server.draft_engine" in drafted["drafter"]["files"]
    request, http_request = result["grpc_request"]["router"], result["http_request"]["router"]
    assert "outrider_router.api.inference_grpc" in request["files"]
    assert "outrider_router.api.http.generation_routes" in http_request["files"]
    assert {"outrider_router.requests.request_run"} <= {*request["files"]} & {
        *http_request["files"]
    }
    assert len(plain["verifier"]["files"]) < len(drafted["verifier"]["files"])
