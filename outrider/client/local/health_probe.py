"""Health probes of a child process: its health service is asked repeatedly whether it serves."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import grpc

from outrider.client.rpcs import client_options

PROBE_INTERVAL_S: Final = 0.5
"""Interval between two probes of a process, in seconds."""
PROBE_TIMEOUT_S: Final = 2.0
"""Timeout of one probe, in seconds."""
MAX_NOT_SERVING_S: Final = 60.0
"""Maximum time, in seconds, for which a process may answer NOT_SERVING. It is long, because a
process that drains answers so."""
MAX_LOOK_GAP_S: Final = 2.0
"""Maximum normal time between two checks, in seconds. If more time has passed, the supervisor
itself was delayed."""
_NO_ANSWER: Final = frozenset(
    {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
)


class ProbeResult(Enum):
    """Result of one probe."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    SILENT = "silent"


class HealthRecord:
    """Records how long a process has been silent or has not served. Pure: the caller passes the
    times."""

    def __init__(self, health_timeout_s: float, now: float) -> None:
        """Create a record. `health_timeout_s` is the time, in seconds, without an answer after
        which the process must be restarted. `now` is the time of the monotonic clock in seconds."""
        self._health_timeout_s = health_timeout_s
        self._answered = self._served = self._looked = now

    def record_probe(self, health: ProbeResult | None, now: float) -> None:
        """Record the newest probe result; None if there is no new one. `now` is the time of the
        monotonic clock in seconds.

        If the supervisor itself was delayed between two calls, that time does not count as silence
        of the process.
        """
        gap, self._looked = now - self._looked, now
        if gap > MAX_LOOK_GAP_S:
            self._answered += gap
            self._served += gap
        if health in (ProbeResult.SERVING, ProbeResult.NOT_SERVING):
            self._answered = now
        if health is ProbeResult.SERVING:
            self._served = now

    def restart_reason(self, now: float) -> str:
        """Return why the process must be restarted; "" if it need not be restarted."""
        if now - self._answered > self._health_timeout_s:
            return f"has not answered for {self._health_timeout_s:g} s"
        if now - self._served > max(MAX_NOT_SERVING_S, self._health_timeout_s):
            return f"has not served for {MAX_NOT_SERVING_S:g} s"
        return ""


class HealthProbe:
    """Sends health probes to the process at one address, without blocking."""

    def __init__(self, address: str, service: str) -> None:
        """Create a probe for the process at `address`. `service` is the name in the health service
        that is asked for; "" stands for the whole process."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        self._channel = grpc.insecure_channel(address, options=client_options())
        self._stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self._request = health_pb2.HealthCheckRequest(service=service)
        self._serving = health_pb2.HealthCheckResponse.SERVING
        self._call: Any = None
        self._next = 0.0
        """Time at which the next probe is due, in seconds of the monotonic clock."""

    def poll(self, now: float) -> ProbeResult | None:
        """Send a probe if one is due. `now` is the time of the monotonic clock in seconds.

        Returns the result of the last probe when it has arrived or timed out, else None.
        """
        if self._call is None:
            if now >= self._next:
                self._call = self._stub.Check.future(self._request, timeout=PROBE_TIMEOUT_S)
            return None
        if not self._call.done():
            return None
        call, self._call = self._call, None
        self._next = now + PROBE_INTERVAL_S
        if call.code() in _NO_ANSWER:
            return ProbeResult.SILENT
        if call.code() is not grpc.StatusCode.OK:
            # A process that refuses a probe is alive.
            return ProbeResult.SERVING
        serves = call.result().status == self._serving
        return ProbeResult.SERVING if serves else ProbeResult.NOT_SERVING

    def close(self) -> None:
        """Cancel the running probe and close the connection."""
        self._channel.close()
