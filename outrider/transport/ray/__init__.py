"""Ray transport: endpoints are named Ray actors, which peers find by name.

actor_streams.py           Client side of an exchange stream that is carried by Ray actor calls.
calls.py                   Ray actor calls with deadlines and typed errors.
dialer.py                  Ray dialer: control clients and exchange connections by actor name.
frames.py                  Frames as arguments and results of Ray actor calls: packing, ordering,
                           receiving.
grpc_streams.py            gRPC streams between Ray actors, which are addressed by name.
host.py                    Actor that hosts an endpoint; every method returns after a bounded wait.
options.py                 Ray transport settings.
serving.py                 Start, take-over and stop of actor hosts.
supervision.py             Supervision of an actor host: who supervises it, and when it counts as
                           orphaned.
"""

from __future__ import annotations

from outrider.transport.ray.dialer import RayDialer
from outrider.transport.ray.host import ActorLocation, EndpointFactory
from outrider.transport.ray.options import EXCHANGES, GRPC, REFS, RayConfig
from outrider.transport.ray.serving import (
    RayEndpoint,
    claim_endpoint,
    serve_drafter,
    serve_verifier,
)
from outrider.transport.ray.supervision import SUPERVISOR_REPLACED, Supervision

__all__ = [
    "EXCHANGES",
    "GRPC",
    "REFS",
    "EndpointFactory",
    "RayConfig",
    "RayDialer",
    "RayEndpoint",
    "ActorLocation",
    "SUPERVISOR_REPLACED",
    "Supervision",
    "claim_endpoint",
    "serve_drafter",
    "serve_verifier",
]
