"""A router that is served over HTTP, and clients of it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from openai import AsyncOpenAI
from outrider_router.api.http import HttpServer
from outrider_router.requests.service import RouterService

KEY = "token-abc123"


def set_http_options(service: RouterService, **options: Any) -> None:
    """Change bounds of the HTTP port of a router that is not served yet."""
    changed = replace(service.config.http_options, **options)
    service.config = replace(service.config, http_options=changed)


@asynccontextmanager
async def http_router(service: RouterService) -> AsyncGenerator[str]:
    """Serve a router over HTTP on a free port; its base URL."""
    server = HttpServer("127.0.0.1:0", service)
    try:
        yield f"http://{await server.start()}"
    finally:
        await server.stop()


@asynccontextmanager
async def http_client(service: RouterService) -> AsyncGenerator[httpx.AsyncClient]:
    """A plain HTTP client of a served router."""
    async with (
        http_router(service) as url,
        httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client,
    ):
        yield client


@asynccontextmanager
async def openai_client(service: RouterService, **options: Any) -> AsyncGenerator[AsyncOpenAI]:
    """OpenAI's asynchronous client of a served router."""
    settings = {"max_retries": 0, "timeout": 30.0} | options
    async with (
        http_router(service) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, **settings) as client,
    ):
        yield client


def events(body: str) -> Iterator[str]:
    """The data of server-sent events; fails on anything else."""
    assert body.endswith("\n\n")
    for event in body.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: ") and "\n" not in event, event
        yield event.removeprefix("data: ")


def chunks(body: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as OpenAI's do."""
    *data, last = events(body)
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in data]


def texts(parts: Sequence[dict[str, Any]], choices: int = 1) -> list[str]:
    """The texts of the choices of a streamed completion."""
    found = [""] * choices
    for part in parts:
        for choice in part["choices"]:
            found[choice["index"]] += choice["text"]
    return found
