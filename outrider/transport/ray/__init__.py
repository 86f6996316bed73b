"""Ray transport: endpoints as named actors, found by their names.

    options.py   RayConfig
    host.py      EndpointHost: the actor around an endpoint
    serving.py   serve_verifier, serve_drafter: start an actor; find_endpoint: one that runs
    calls.py     HostCalls: calls to an actor with deadlines and typed errors
    dialer.py    RayDialer: control clients and exchange connections by actor name
    direct.py    streams as gRPC between the processes of two actors
    pulled.py    streams as actor calls
    frames.py    frames as call arguments: object refs for bulk, sequence numbers for order

Control is actor calls. Streams are gRPC from process to process, or actor calls where that is asked
for: then the dialing side makes all of them. It pushes frames, and it pulls frames and events by
calls that wait at the actor for a bounded time. So either side may be a driver or an actor, a reply
that does not come within the heartbeat time-out means a hung actor, and nothing waits without a
bound. `ray` is imported when it is first needed.
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
