"""gRPC transport: servers and clients on grpc.aio.

access.py                  Who may call a server.
credentials.py             Certificates as gRPC takes them, and the names in those that callers have
                           shown.
dialer.py                  Control clients and exchange connections by address (host:port).
draining_channel.py        gRPC channel that closes after its last call.
eager_coroutine.py         Coroutine that runs to its first await at once.
error_status.py            Typed errors as gRPC statuses with google.rpc details, and back.
health.py                  grpc.health.v1 on grpc.aio; every watcher hears every change of its
                           service.
interceptor.py             The server interceptor.
options.py                 Settings of the gRPC transport and the channel options that they mean.
server.py                  A gRPC server with health, reflection, error mapping and a graceful stop.
servicers.py               VerifierService, ExchangeService and DrafterService around an endpoint.
shm_frames.py              gRPC stream whose frames go through shared memory.
shm_negotiation.py         Negotiates shared memory in call metadata.
streams.py                 An exchange stream as bounded frames whose reads and writes may be
                           cancelled safely.
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
