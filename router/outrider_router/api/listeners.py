"""The router's gRPC and metrics ports, and the credentials that each of them requires.

| port | with a certificate | with API keys |
|---|---|---|
| clients | TLS; client certificates if `client_auth` | any key |
| pool | mutual TLS, operator role | an operator's key |
| metrics | mutual TLS, operator role | an operator's key |
| health | plain text | none: it reports only whether the process serves |
"""

from __future__ import annotations

import logging
import resource

from outrider.metrics_port import serve_metrics
from outrider.transport.grpc import AccessRules, GrpcConfig, GrpcDialer, GrpcServer
from outrider.transport.grpc.access import Metadata
from outrider.wire.inference import MAX_PROMPT_BYTES
from outrider_router.admission.access_control import authorization_of
from outrider_router.api.inference_grpc import inference_service
from outrider_router.api.pool_grpc import pool_service
from outrider_router.api.stream_forwarding import StreamForwarder
from outrider_router.requests.service import RouterService

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = MAX_PROMPT_BYTES + (4 << 20)
"""Largest size in bytes of a client's message: the longest prompt plus 4 MiB for all other
fields.
"""
MAX_POOL_BYTES = 64 << 10


def make_client_server(service: RouterService) -> GrpcServer:
    """Create the gRPC server of the client API. Its health service follows the readiness of the
    router.
    """
    access_control, metrics, tls = (
        service.access_control,
        service.metrics,
        service.config.client_tls,
    )
    if access_control.requires_keys and tls.cert is None:
        logger.warning("API keys accepted without TLS: use TLS here or in a proxy in front")
    access = AccessRules(
        tls=tls,
        require_client=tls.client_auth,
        check=access_control.authorize_call,
        on_refused=access_control.count_refusal,
        on_handshake=metrics.tls_handshakes.inc,
    )
    server = GrpcServer(
        service.config.listen,
        [inference_service(service, _make_forwarder(service))],
        config=GrpcConfig(
            max_receive_bytes=MAX_REQUEST_BYTES,
            share_port=service.config.reuse_ports,
            max_connections=_max_connections(),
        ),
        access=access,
        health_address=service.config.health_listen,
    )
    service.readiness.subscribe(server.set_serving)
    return server


def _make_forwarder(service: RouterService) -> StreamForwarder | None:
    """Create the forwarder of resumed streams, or return None if no other routers are configured.
    Other routers are called as a client would, on their client APIs.
    """
    if not service.config.routers:
        return None
    return StreamForwarder(
        service.discovery.router_addresses,
        GrpcDialer(tls=service.config.client_tls),
        service.metrics,
    )


def _max_connections() -> int:
    """Return the largest number of connections of the client API: the default of a gRPC port, or a
    quarter of the files that the process may open if that is less. HTTP connections may use half of
    the files.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    usual = GrpcConfig().max_connections
    return usual if files < 0 else min(usual, max(1, files // 4))


def make_pool_server(service: RouterService) -> GrpcServer | None:
    """Create the gRPC server of the pool API, or return None if it is not configured."""
    if not service.config.pool_listen:
        return None
    access_control = service.access_control

    def check(metadata: Metadata) -> None:
        access_control.authorize_operator(authorization_of(metadata))

    access = AccessRules(
        tls=service.config.tls,
        check=check,
        on_refused=access_control.count_refusal,
        on_handshake=service.metrics.tls_handshakes.inc,
    )
    return GrpcServer(
        service.config.pool_listen,
        [pool_service(service)],
        config=GrpcConfig(max_receive_bytes=MAX_POOL_BYTES, max_connections=64, max_calls=64),
        access=access,
    )


def serve_router_metrics(service: RouterService) -> str:
    """Serve the Prometheus endpoint and return its address HOST:PORT."""
    config = service.config
    return serve_metrics(
        service.metrics.registry,
        config.metrics_host,
        config.metrics_port,
        tls=config.tls,
        check=service.access_control.authorize_operator,
    )
