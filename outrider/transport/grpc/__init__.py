"""gRPC transport: servers and clients on grpc.aio.

options.py      GrpcConfig: keepalive, message bounds, heartbeats, time-outs
status.py       typed errors <-> gRPC status with ErrorInfo and RetryInfo
interceptor.py  the one place where a server's errors become statuses
health.py       grpc.health.v1
server.py       GrpcServer: services, health, reflection, graceful stop
servicers.py    Verifier-, Exchange- and DrafterService around an endpoint
streams.py      an exchange stream as bounded, cancel-safe frames
begun.py        coroutines that take their first step at once
dialer.py       GrpcDialer: control clients and exchange connections by address
"""

from __future__ import annotations

from outrider.transport.grpc.access import AccessRules
from outrider.transport.grpc.dialer import GrpcDialer
from outrider.transport.grpc.options import GrpcConfig
from outrider.transport.grpc.server import GrpcServer, GrpcService
from outrider.transport.grpc.servicers import drafter_services, verifier_services

__all__ = [
    "AccessRules",
    "GrpcConfig",
    "GrpcDialer",
    "GrpcServer",
    "GrpcService",
    "drafter_services",
    "verifier_services",
]
