"""What browsers and proxies need: origins, a path in front, and bodies that are not encoded."""

from __future__ import annotations

import gzip
import json

import pytest
from outrider_router.config import HttpConfig
from outrider_router.requests.service import RouterService

from tests.unit.router.api.http.helpers import http_client, set_http_options

BODY = {"prompt": "abc", "max_tokens": 2}
ORIGIN = "https://app.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def test_encoded_bodies_are_refused_with_what_is_allowed(router: RouterService) -> None:
    body = gzip.compress(json.dumps(BODY).encode())
    async with http_client(router) as client:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
        assert "Content-Encoding 'gzip' is not decoded" in answer.json()["error"]["message"]
        plain = {"content-encoding": "identity"}
        assert (await client.post("/v1/completions", json=BODY, headers=plain)).status_code == 200


async def test_no_other_page_may_call_unless_its_origin_is_named(router: RouterService) -> None:
    async with http_client(router) as client:
        answer = await client.get("/v1/models", headers={"origin": ORIGIN})
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.options("/v1/completions", headers=PREFLIGHT)).status_code == 405
    set_http_options(router, cors_origins=(ORIGIN,))
    async with http_client(router) as client:
        asked = await client.options("/v1/completions", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in asked.headers["access-control-allow-methods"]
        answer = await client.post("/v1/completions", json=BODY, headers={"origin": ORIGIN})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        stranger = PREFLIGHT | {"origin": "https://evil.example"}
        refused = await client.options("/v1/completions", headers=stranger)
        assert refused.headers.get("access-control-allow-origin") is None


async def test_a_path_in_front_is_taken_off_and_published(router: RouterService) -> None:
    set_http_options(router, root_path="/llm")
    async with http_client(router) as client:
        for prefix in ("/llm", ""):
            assert (await client.get(f"{prefix}/health")).status_code == 200
            answer = await client.post(f"{prefix}/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == "ab"
        published = (await client.get("/llm/openapi.json")).json()
        assert published["servers"] == [{"url": "/llm"}]
        assert (await client.get("/llmx/health")).status_code == 404


async def test_the_path_in_front_is_the_page_and_is_in_the_texts(router: RouterService) -> None:
    set_http_options(router, root_path="/llm")
    async with http_client(router) as client:
        moved = await client.get("/llm")
        assert moved.status_code == 307 and moved.headers["location"] == "/llm/"
        assert (await client.get("/llm/")).text == (await client.get("/")).text
        for asked in ("/llm/nothing", "/nothing"):
            message = (await client.get(asked)).json()["error"]["message"]
            assert message.startswith(f"GET {asked} is not served here; these are: POST /llm/v1/")
            assert message.endswith("GET /llm/openapi.json, GET /llm/, GET /llm/status.json")
        refused = (await client.get("/llm/v1/completions")).json()["error"]["message"]
        assert refused == "GET /llm/v1/completions is not served here; the path takes POST"


@pytest.mark.parametrize(
    "options",
    [
        {"root_path": "llm"},
        {"root_path": "/llm/"},
        {"root_path": "/"},
        {"cors_origins": ("app.example",)},
        {"cors_origins": ("https://app.example/path",)},
        {"head_s": 0.0},
        {"max_connections": 0},
        {"max_small_chunks": -1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        HttpConfig(**options)  # type: ignore[arg-type]
