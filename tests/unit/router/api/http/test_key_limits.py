"""The limits of an API key over HTTP: one answer counts one, and so does what only tokenizes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from outrider_router.fleet.compatibility import PeerState
from outrider_router.requests.service import RouterService

from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import http_client
from tests.unit.router.helpers import assert_all_freed
from tests.waiting import until


@asynccontextmanager
async def limited(
    directory: Path, verifier: FakeVerifier, limits: str
) -> AsyncGenerator[tuple[RouterService, httpx.AsyncClient]]:
    """A router with one key of these limits, and a client that shows it."""
    file = directory / "keys.toml"
    file.write_text(f'[keys.a]\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n{limits}\n')
    async with (
        running_router(directory, {"v": verifier}, api_keys=file) as router,
        http_client(router) as client,
    ):
        client.headers["authorization"] = "Bearer secret"
        yield router, client


async def test_a_verifier_that_accepts_by_chance_gets_no_requests_of_key_holders(
    tmp_path: Path,
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[keys.a]\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n')
    verifier = FakeVerifier()
    verifier.change_info(simulated_acceptance="length:2.6")
    async with running_router(tmp_path, {"v": verifier}, wait=False, api_keys=file) as router:
        peer = router.registry.verifiers["v"]
        await until(lambda: peer.state is PeerState.REFUSED)
        assert "benchmarks only" in peer.problem and router.registry.any_verifier_info() is None
    async with running_router(tmp_path, {"v": verifier}) as router:
        assert router.registry.any_verifier_info() is not None


def completion(n: int) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 2, "n": n}


async def test_n_answers_come_in_together_or_are_a_mistake(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    async with limited(tmp_path, verifier, "max_concurrent = 3") as (router, client):
        answer = await client.post("/v1/completions", json=completion(3))
        assert len(answer.json()["choices"]) == 3, answer.text
        before = len(verifier.specs)
        refused = await client.post("/v1/completions", json=completion(4))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "key_too_many")
        assert "may have at most 3 requests in progress" in error["message"]
        assert "this request counts as 4" in error["message"]
        assert "retry-after" not in refused.headers
        assert len(verifier.specs) == before, "not one of them was served"
        await assert_all_freed(router, verifier)
        assert (await client.post("/v1/completions", json=completion(3))).status_code == 200


async def test_answers_that_find_no_room_leave_none_running(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.gate = asyncio.Event()
    async with limited(tmp_path, verifier, "max_concurrent = 3") as (_, client):
        running = asyncio.create_task(client.post("/v1/completions", json=completion(2)))
        await until(lambda: len(verifier.live) == 2, 30.0)
        refused = await client.post("/v1/completions", json=completion(2))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_busy")
        assert len(verifier.specs) == 2
        verifier.gate.set()
        assert (await running).status_code == 200


async def test_tokenizing_counts_like_a_request(tmp_path: Path) -> None:
    limits = "requests_per_s = 0.001\nrequests_burst = 2.0"
    async with limited(tmp_path, FakeVerifier(), limits) as (_, client):
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert (await client.post("/detokenize", json={"tokens": [97]})).status_code == 200
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            refused = await client.post(path, json=body)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
