"""The status page's files and the state behind it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from outrider_router.api.http.app import make_app
from outrider_router.api.status_page import make_snapshot, status_router
from outrider_router.requests.service import RouterService

from outrider.wire.messages import SpecStats
from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import collect, text_request
from tests.waiting import until


def served(service: RouterService) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(status_router(service))
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://router")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/status.css", "text/css"), ("/status.js", "text/javascript")],
)
async def test_its_files_bring_nothing_from_elsewhere(
    router: RouterService, path: str, kind: str
) -> None:
    async with served(router) as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    addresses = set(re.findall(r"https?://[^\"' ]+", answer.text))
    assert addresses <= {"http://www.w3.org/2000/svg"}


async def test_names_of_peers_are_never_made_html(router: RouterService) -> None:
    async with served(router) as client:
        script = (await client.get("/status.js")).text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


async def test_the_state_is_what_the_router_knows(tmp_path: Path) -> None:
    fleet = {"v": (verifier := FakeVerifier())}
    async with running_router(tmp_path, fleet, {"d": FakeDrafter(fleet)}) as router:
        await collect(router, text_request(max_tokens=10))
        verifier.change_info(
            kv_free_blocks=100,
            round_ms_p50=4.5,
            forward_ms_p50=3.5,
            overhead_ms_p50=0.5,
            stats=SpecStats(rounds=8, emitted=20, proposed=16, accepted=12),
        )
        state = json.loads(json.dumps(make_snapshot(router)))
        await until(lambda: make_snapshot(router)["verifiers"][0]["round_ms"] == 4.5)
        async with served(router) as client:
            state = (await client.get("/status.json")).json()
    assert state["models"] == ["fake"]
    assert (state["running"], state["queued"], state["queue_bound"]) == (0, 0, 256)
    assert state["totals"]["requests_total"] == 1
    assert state["totals"]["generation_tokens_total"] == 10
    assert state["totals"]["first_tokens_total"] == 1
    assert state["totals"]["errors_total"] == 0
    (one,) = state["verifiers"]
    assert (one["id"], one["healthy"], one["kv_free_blocks"]) == ("v0", True, 100)
    assert (one["forward_ms"], one["overhead_ms"]) == (3.5, 0.5)
    assert one["stats"]["accepted_total"] == 12
    (drafter,) = state["drafters"]
    assert drafter["methods"] == ["eagle3", "ngram"]
    assert [link["verifier"] for link in drafter["links"]] == ["v0"]


async def test_errors_are_requests_that_failed_not_those_that_were_cancelled(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    stream = router.stream(text_request())
    await anext(stream)
    await stream.aclose()
    verifier.gate.set()
    assert make_snapshot(router)["totals"]["errors_total"] == 0
    with pytest.raises(Exception, match="no tokens"):
        await router.generate(text_request(""))
    totals = make_snapshot(router)["totals"]
    assert (totals["requests_total"], totals["errors_total"]) == (2, 1)


async def test_a_fleet_that_was_never_seen_is_listed_by_its_addresses(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.lost.set()
    async with running_router(tmp_path, {"v": verifier}, wait=False) as router:
        state = make_snapshot(router)
    assert state["models"] == []
    (one,) = state["verifiers"]
    assert (one["id"], one["healthy"], one["round_ms"]) == ("v", False, 0.0)


async def test_where_keys_are_asked_for_there_is_no_page_without_one(tmp_path: Path) -> None:
    secrets = {"boss": "operator = true\n", "client": ""}
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[keys.{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{more}'
            for name, more in secrets.items()
        )
    )
    async with running_router(tmp_path, {"v": FakeVerifier()}, api_keys=keys) as router:
        transport = httpx.ASGITransport(make_app(router))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            for path in ("/", "/status.css", "/status.js"):
                refused = await client.get(path)
                # What a browser asks its user for; a key may come as a password.
                assert "Basic" in refused.headers["www-authenticate"]
                assert refused.status_code == 401
            codes = [
                (await client.get("/status.json", headers=headers)).status_code
                for headers in (
                    {},
                    {"authorization": "Bearer client"},
                    {"authorization": "Bearer boss"},
                )
            ]
    assert codes == [401, 403, 200]
