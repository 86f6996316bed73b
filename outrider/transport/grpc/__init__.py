"""gRPC transport: servers and clients on grpc.aio.

access.py                  Authorisation of gRPC calls by certificate role and by credentials in
                           the metadata.
credentials.py             gRPC credentials from TLS files, and the names in a caller's certificate.
dialer.py                  gRPC dialer: control clients and exchange connections by address
                           (host:port).
draining_channel.py        gRPC channel that can be closed as soon as its last call has ended.
eager_coroutine.py         Coroutines that start immediately, run to their first wait, and continue
                           in a task.
error_status.py            Mapping of typed errors to gRPC statuses with google.rpc details, and
                           back.
health.py                  Health service (grpc.health.v1) on grpc.aio, whose `Watch` streams report
                           status changes.
interceptor.py             Server interceptor: authorises callers and turns errors into gRPC
                           statuses.
options.py                 gRPC transport settings and the channel options derived from them.
server.py                  gRPC server with health, reflection, error mapping and graceful stop.
servicers.py               gRPC servicers (VerifierService, ExchangeService, DrafterService) of an
                           endpoint.
shm_frames.py              Stream whose frames use a shared-memory channel instead of its gRPC call
                           (on one host).
shm_negotiation.py         Shared-memory negotiation in call metadata: both ends of a session stream
                           agree on a channel.
streams.py                 gRPC call as a bounded `FrameStream`, whose sends and receives can be
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
