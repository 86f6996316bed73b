"""The published OpenAPI is kept: bodies made by it, right and wrong, find no fault."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from outrider_router.api.http.app import make_api
from outrider_router.requests.service import RouterService
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import http_client, http_router
from tests.unit.router.helpers import assert_all_freed

EXAMPLES = 25
"""Of each operation, right and wrong each."""
SEED = 12
LEFT_OUT = {"positive_data_acceptance"}
"""Vocabulary and context are the model's: the schema cannot tell which ids and lengths it takes."""

load_all_checks()
DEADLINE = CHECKS.get_by_names(["not_a_server_error"])
"""Checks that a deadline of the request's own does not keep."""


def try_out(url: str, mode: GenerationMode) -> int:
    """Call every operation with made-up requests; how many. Raises for the first fault."""
    checks = CHECKS.get_by_names([n for n in CHECKS.get_all_names() if n not in LEFT_OUT])
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    calls = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and len(operation.body) == 0:
            continue

        @seed(SEED)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Case) -> None:
            nonlocal calls
            calls += 1
            answer = case.call(timeout=60.0)
            left_out = []
            if answer.status_code == 504:
                assert isinstance(case.body, dict) and case.body.get("timeout_s") is not None
                left_out = DEADLINE
            case.validate_response(answer, checks=checks, excluded_checks=left_out)

        call()
    return calls


@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_schemathesis_finds_no_fault(tmp_path: Path, mode: GenerationMode) -> None:
    verifier = FakeVerifier(max_context_len=512)
    async with running_router(tmp_path, {"v": verifier}) as router, http_router(router) as url:
        calls = await asyncio.to_thread(try_out, url, mode)
        await assert_all_freed(router, verifier)
    assert calls > EXAMPLES


async def test_the_published_openapi_tells_of_openais_errors_alone(router: RouterService) -> None:
    async with http_client(router) as client:
        published = (await client.get("/openapi.json")).json()
    assert published == make_api(router).openapi()
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = published["paths"][path]["post"]["responses"]
        assert {"200", "400", "404", "409", "413", "429", "499", "500", "503"} <= set(responses)
        assert "422" not in responses
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert "HTTPValidationError" not in published["components"]["schemas"]
