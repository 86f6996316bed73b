"""Ray transport: endpoints as named actors, exchanges as actor calls.

    options.py   RayConfig
    frames.py    frames as call arguments: object refs for bulk, sequence numbers for order
    host.py      EndpointHost: the actor around an endpoint
    serving.py   serve_verifier, serve_drafter: start an actor
    dialer.py    RayDialer: control clients and exchange connections by actor name

The dialing side makes all calls: it pushes frames, and it pulls frames and events by calls that
wait at the actor for a bounded time. So either side may be a driver or an actor, a reply that does
not come within the heartbeat time-out means a hung actor, and nothing waits without a bound.
`ray` is imported when it is first needed.
"""

from __future__ import annotations

from outrider.transport.ray.dialer import RayDialer
from outrider.transport.ray.options import RayConfig
from outrider.transport.ray.serving import RayEndpoint, serve_drafter, serve_verifier

__all__ = ["RayConfig", "RayDialer", "RayEndpoint", "serve_drafter", "serve_verifier"]
