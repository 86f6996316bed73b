"""Ray transport: endpoints as named actors, found by their names.

actor_streams.py           Streams carried by actor calls.
calls.py                   Calls to an actor host with deadlines and typed errors.
dialer.py                  Control clients and exchange connections by actor name.
frames.py                  Frames as arguments and results of actor calls.
grpc_streams.py            gRPC streams between Ray actors.
host.py                    The actor around an endpoint.
options.py                 Settings of the Ray transport.
serving.py                 Starting and stopping actor hosts.
"""

from __future__ import annotations

from outrider.transport.ray.dialer import RayDialer
from outrider.transport.ray.host import ActorLocation, EndpointFactory
from outrider.transport.ray.options import EXCHANGES, GRPC, REFS, RayConfig
from outrider.transport.ray.serving import RayEndpoint, find_endpoint, serve_drafter, serve_verifier

__all__ = [
    "EXCHANGES",
    "GRPC",
    "REFS",
    "EndpointFactory",
    "RayConfig",
    "RayDialer",
    "RayEndpoint",
    "ActorLocation",
    "find_endpoint",
    "serve_drafter",
    "serve_verifier",
]
