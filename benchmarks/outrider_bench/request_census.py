"""Modules and classes that take part in a request in a router, up to its first text.

A second router runs in a thread of this process and uses the verifiers and drafters of a fleet. All
calls of that thread are recorded from the moment a client sends a request until it receives the
first text. The router does not poll the fleet in the meantime, because polls belong to no request.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from outrider_router.api.http import HttpServer
from outrider_router.api.listeners import make_client_server
from outrider_router.base.metrics import RouterMetrics
from outrider_router.config import RouterConfig
from outrider_router.requests.service import RouterService

from outrider.client import Client, user
from outrider.client.local.cluster import LocalCluster
from outrider.client.local.config import LocalFleetConfig
from outrider.errors import UnavailableError
from outrider.text.tokenizer import Tokenizer
from outrider.transport.grpc import GrpcConfig, GrpcDialer
from outrider.transport.tls import CertificateRole
from outrider_bench.hooks.call_census import CallCensus

READY_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_MAX_TOKENS: Final = 64
"""Maximum number of tokens of an answer. It is so large that the answer is incomplete when its
first text arrives."""


def count_requests(
    fleet: LocalCluster, config: LocalFleetConfig, *, text: str, drafter: str
) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the `files` and `kinds` of a request, as `CallCensus` defines them: {API: {process:
    {"files": [...], "kinds": [...]}}}.

    The APIs are "grpc_request" and "http_request", and the process is always "router". The second
    request of each API is recorded, because the first one also does work that later ones do not
    need. `text` is the user's message, `drafter` is the draft method. Raises UnavailableError if
    the router does not become ready.
    """
    census = CallCensus()
    loop = asyncio.new_event_loop()
    ready: asyncio.Future[_RouterAddresses] = asyncio.Future(loop=loop)
    started, stopped = threading.Event(), asyncio.Event()

    def serve() -> None:
        sys.setprofile(census.profile)
        ready.add_done_callback(lambda _: started.set())
        loop.run_until_complete(_serve(_router_config(fleet, config), ready, stopped))

    thread = threading.Thread(target=serve, name="router", daemon=True)
    thread.start()
    try:
        if not started.wait(READY_TIMEOUT_S):
            raise UnavailableError("the router is not ready", reason="CENSUS")
        router = ready.result()
        ask: dict[str, Callable[[str, str, Callable[[], None]], None]] = {
            "grpc_request": router.ask_grpc,
            "http_request": router.ask_http,
        }
        found: dict[str, dict[str, dict[str, list[str]]]] = {}
        for api, send in ask.items():
            # What only the first request of a router does is not counted.
            send(text, drafter, lambda: None)
            census.begin()
            send(text, drafter, partial(_end, census, found, api))
        return found
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(READY_TIMEOUT_S)


def _end(census: CallCensus, found: dict[str, dict[str, dict[str, list[str]]]], api: str) -> None:
    found[api] = {"router": census.end()}


def _router_config(fleet: LocalCluster, config: LocalFleetConfig) -> RouterConfig:
    addresses = {
        role: tuple(process.address for process in processes)
        for role, processes in fleet.members.items()
    }
    return RouterConfig(
        model=config.model,
        listen="127.0.0.1:0",
        verifiers=addresses[CertificateRole.VERIFIER],
        drafters=addresses.get(CertificateRole.DRAFTER, ()),
        poll_interval_s=_POLL_S,
    )


async def _serve(
    config: RouterConfig, ready: asyncio.Future[_RouterAddresses], stopped: asyncio.Event
) -> None:
    """Run a router until `stopped` is set. Set the result of `ready` once the router's fleet is
    ready."""
    dialer = GrpcDialer(GrpcConfig(shm_channels=config.shared_memory))
    service = RouterService(
        config=config,
        tokenizer=Tokenizer.load(config.model),
        dialer=dialer,
        metrics=RouterMetrics(),
        clock=time.monotonic,
    )
    server, web = make_client_server(service), HttpServer("127.0.0.1:0", service)
    try:
        await service.start()
        addresses = await server.start(), await web.start()
        drafters = service.registry.drafters
        while not (
            service.readiness.is_ready and all(peer.is_serving for peer in drafters.values())
        ):
            await asyncio.sleep(_POLL_S)
        await service.mover.stop()
        await service.registry.stop()
        ready.set_result(_RouterAddresses(*addresses))
        await stopped.wait()
    finally:
        await service.close()
        await web.stop()
        await server.stop(0.0)
        await dialer.close()


@dataclass(frozen=True, slots=True)
class _RouterAddresses:
    """Addresses at which a router serves, each HOST:PORT."""

    grpc: str
    http: str

    def ask_grpc(self, text: str, drafter: str, on_text: Callable[[], None]) -> None:
        """Read an answer over gRPC; call `on_text` at its first text."""
        with (
            Client(self.grpc) as client,
            client.stream(
                [user(text)],
                drafter=drafter,
                temperature=0.0,
                max_tokens=_MAX_TOKENS,
                ignore_eos=True,
            ) as answer,
        ):
            begun = False
            for delta in answer:
                if (delta.text or delta.reasoning) and not begun:
                    begun = True
                    on_text()

    def ask_http(self, text: str, drafter: str, on_text: Callable[[], None]) -> None:
        """Read an answer over HTTP; call `on_text` at its first text."""
        body = {
            "messages": [{"role": "user", "content": text}],
            "drafter": drafter,
            "temperature": 0.0,
            "max_tokens": _MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection(self.http)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise UnavailableError(response.read().decode(), reason="CENSUS")
        begun = False
        for line in response:
            if not begun and line.startswith(b"data: {") and _has_text(line[6:]):
                begun = True
                on_text()
        connection.close()


def _has_text(event: bytes) -> bool:
    """Return whether an event of a stream has text of the answer or of its reasoning."""
    return any(
        choice["delta"].get("content") or choice["delta"].get("reasoning_content")
        for choice in json.loads(event)["choices"]
    )
