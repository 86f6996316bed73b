"""A router in this process, on fake verifiers and drafters."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider_router.api.inference_grpc import inference_service
from outrider_router.api.metrics_export import register_fleet_metrics
from outrider_router.api.stream_forwarding import StreamForwarder
from outrider_router.base.metrics import RouterMetrics
from outrider_router.config import RouterConfig
from outrider_router.requests.service import RouterService

from outrider.text.tokenizer import Tokenizer
from outrider.transport.grpc import GrpcConfig, GrpcServer
from outrider.transport.interface import DrafterConnection, DrafterControl, VerifierControl
from tests.fakes.drafter import FakeDrafter
from tests.fakes.tokenizer import make_tokenizer_dir
from tests.fakes.verifier import FakeVerifier
from tests.waiting import until


class FakeDialer:
    """Hands out the fakes themselves."""

    def __init__(
        self, verifiers: dict[str, FakeVerifier], drafters: dict[str, FakeDrafter]
    ) -> None:
        self._verifiers, self._drafters = verifiers, drafters

    async def exchange(self, verifier_address: str) -> DrafterConnection:
        raise AssertionError("a router opens no exchange")

    async def verifier(self, address: str) -> VerifierControl:
        return self._verifiers[address]

    async def drafter(self, address: str) -> DrafterControl:
        return self._drafters[address]

    async def close_channel(self, address: str) -> None:
        pass

    async def close(self) -> None:
        pass


@asynccontextmanager
async def running_router(
    directory: Path,
    verifiers: dict[str, FakeVerifier],
    drafters: dict[str, FakeDrafter] | None = None,
    *,
    wait: bool = True,
    **config: Any,
) -> AsyncGenerator[RouterService]:
    """A router that polls fast; with `wait` it is ready when it is yielded. What is added to
    `verifiers` and `drafters` later can be dialled, too."""
    drafters = {} if drafters is None else drafters
    settings = {"poll_interval_s": 0.02, "peer_timeout_s": 0.3} | config
    service = RouterService(
        config=RouterConfig(
            model=directory, verifiers=tuple(verifiers), drafters=tuple(drafters), **settings
        ),
        tokenizer=Tokenizer.load(make_tokenizer_dir(directory)),
        dialer=FakeDialer(verifiers, drafters),
        metrics=RouterMetrics(),
        clock=time.monotonic,
    )
    register_fleet_metrics(service)
    await service.start()
    try:
        if wait:
            await until(lambda: service.registry.any_verifier_info() is not None)
            await until(lambda: all(d.is_serving for d in service.registry.drafters.values()))
        yield service
    finally:
        await service.close()


@asynccontextmanager
async def grpc_router(
    service: RouterService,
    address: str = "127.0.0.1:0",
    forwarder: StreamForwarder | None = None,
) -> AsyncGenerator[str]:
    """Serve a router, on a free port or at an address that it shares; its address."""
    config = GrpcConfig(share_port=service.config.reuse_ports)
    server = GrpcServer(address, [inference_service(service, forwarder)], config=config)
    try:
        yield await server.start()
    finally:
        await server.stop(0.0)


def sample(service: RouterService, name: str, **labels: str) -> float:
    """The value of a metric, 0 if it was never touched."""
    value = service.metrics.registry.get_sample_value(name, labels)
    return 0.0 if value is None else value
