"""The answers of one request pass a tenant's rates and the queue together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from outrider_router.base.tenants import TenantLimits

from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import http_client
from tests.unit.router.helpers import assert_all_freed
from tests.waiting import until


async def completed(client: httpx.AsyncClient, n: int, **body: Any) -> httpx.Response:
    asked = {"prompt": "abc", "max_tokens": 2, "n": n, **body}
    return await client.post("/v1/completions", json=asked)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_beyond_a_tenants_rate_are_not_begun(stream: bool, tmp_path: Path) -> None:
    verifier = FakeVerifier()
    limits = {"default": TenantLimits(requests_per_s=0.001, requests_burst=5.0)}
    async with (
        running_router(tmp_path, {"v": verifier}, tenants=limits) as router,
        http_client(router) as client,
    ):
        assert (await completed(client, 3, stream=stream)).status_code == 200
        refused = await completed(client, 3, stream=stream)
        assert refused.status_code == 429 and float(refused.headers["retry-after-ms"]) > 0
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert len(verifier.specs) == 3, "not one of them was served"
        assert (await completed(client, 2, stream=stream)).status_code == 200
        await assert_all_freed(router, verifier)


async def test_answers_that_a_full_queue_cannot_hold_are_not_begun(tmp_path: Path) -> None:
    verifier = FakeVerifier(max_sessions=1)
    verifier.gate = asyncio.Event()
    async with (
        running_router(tmp_path, {"v": verifier}, queue_limit=3) as router,
        http_client(router) as client,
    ):
        running = asyncio.create_task(completed(client, 2))
        await until(lambda: len(verifier.live) == 1 and router.admission.num_waiting == 1, 30.0)
        refused = await completed(client, 3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert router.admission.num_waiting == 1
        verifier.gate.set()
        assert len((await running).json()["choices"]) == 2
        await assert_all_freed(router, verifier)


async def test_a_client_that_leaves_takes_all_of_them_along(tmp_path: Path) -> None:
    verifier = FakeVerifier(max_sessions=1)
    verifier.gate = asyncio.Event()
    async with (
        running_router(tmp_path, {"v": verifier}) as router,
        http_client(router) as client,
    ):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                "/v1/completions",
                json={"prompt": "abc", "max_tokens": 2, "n": 4},
                timeout=httpx.Timeout(30.0, read=0.2),
            )
        await until(lambda: router.admission.num_entries == 0, 30.0)
        verifier.gate.set()
        await assert_all_freed(router, verifier)
