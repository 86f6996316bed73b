"""Router inside the launcher's process: serves clients over gRPC and HTTP, and talks to the fleet
over Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from outrider_router.api.http import HttpServer
from outrider_router.api.listeners import make_client_server, serve_router_metrics
from outrider_router.api.metrics_export import register_fleet_metrics
from outrider_router.base.api_keys import read_keys
from outrider_router.base.metrics import RouterMetrics
from outrider_router.config import RouterConfig
from outrider_router.fleet.compatibility import PeerState
from outrider_router.requests.service import RouterService
from ray.util import get_node_ip_address

from outrider.errors import OutriderError
from outrider.models import resolve_model
from outrider.process_metrics import ProcessMetrics, ProcessState
from outrider.text.tokenizer import Tokenizer
from outrider.transport.ray import RayDialer
from outrider.transport.tls import TlsFiles
from outrider_ray.config import RayFleetConfig, router_config

logger = logging.getLogger(__name__)

READY_WAIT_S = 15.0
"""Maximum time in seconds for which the ready line is delayed until all verifiers are healthy and
all drafters serve."""
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedRouter:
    """A router that serves inside the launcher's process."""

    service: RouterService
    address: str
    """HOST:PORT of the client API. Addresses have the node's address in place of a wildcard."""
    http: str
    """HOST:PORT of the OpenAI-compatible HTTP API; "" if there is none."""
    metrics: str
    """HOST:PORT of the Prometheus endpoint; "" if there is none."""


async def load_router_config(config: RayFleetConfig) -> RouterConfig:
    """Return the configuration of the router on this node, after checking the files that it names.

    Raises InvalidRequestError, NotFoundError or FailedPreconditionError that names the node if the
    file of API keys or a certificate is missing or invalid.
    """
    model = await asyncio.to_thread(resolve_model, config.model)
    node = get_node_ip_address()
    router = router_config(config, model, node)
    try:
        if router.api_keys is not None:
            read_keys(router.api_keys)
        if router.client_tls.enabled:
            TlsFiles(router.client_tls)
    except OutriderError as error:
        raise type(error)(
            f"on the router's node {node}: {error.message}", reason=error.reason
        ) from error
    return router


@asynccontextmanager
async def serve_front(
    config: RayFleetConfig, router: RouterConfig
) -> AsyncGenerator[EmbeddedRouter]:
    """Run a router that serves clients, for the duration of an `async with` block. The fleet's
    actors must have been started."""
    model, node = router.model, get_node_ip_address()
    tokenizer = await asyncio.to_thread(Tokenizer.load, model)
    dialer, process = RayDialer(config.ray), ProcessMetrics()
    metrics = RouterMetrics(process.registry)
    service = RouterService(
        config=router, tokenizer=tokenizer, dialer=dialer, metrics=metrics, clock=time.monotonic
    )
    register_fleet_metrics(service)
    server = make_client_server(service)
    http = HttpServer(router.http, service) if router.http else None
    try:
        service.restore_journal()
        address = await server.start(serving=False)
        metrics_address = serve_router_metrics(service) if router.metrics_port >= 0 else ""
        await service.start()
        await _gathered(service)
        process.set_state(ProcessState.SERVING)
        yield EmbeddedRouter(
            service=service,
            address=dialable_address(address, node),
            http=dialable_address(await http.start(), node) if http is not None else "",
            metrics=dialable_address(metrics_address, node),
        )
    finally:
        await service.close()
        if http is not None:
            await http.stop()
        await server.stop(1.0)
        await dialer.close()


def dialable_address(address: str, node: str) -> str:
    """Return an address that other machines can dial. A wildcard host is replaced by `node`, the
    node's address."""
    host, _, port = address.rpartition(":")
    return f"{node}:{port}" if host in ("0.0.0.0", "[::]") else address


async def _gathered(service: RouterService) -> None:
    """Wait, for at most READY_WAIT_S, until all verifiers are healthy and all drafters serve."""
    registry = service.registry
    verifiers, drafters = registry.verifiers.values(), registry.drafters.values()
    try:
        async with asyncio.timeout(READY_WAIT_S):
            while not all(peer.state is PeerState.HEALTHY for peer in verifiers) or not all(
                peer.is_serving for peer in drafters
            ):
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        logger.warning("actors not connected in time", extra={"seconds": READY_WAIT_S})
