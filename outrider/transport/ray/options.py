"""Ray transport settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.transport.heartbeat import HeartbeatConfig, router_heartbeat

EXCHANGES = GRPC, REFS = ("grpc", "refs")
"""Transports of streams: `grpc` uses gRPC directly between the processes, and `refs` uses Ray actor
calls, with object refs for large frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Settings of the Ray transport, for actor hosts and dialers."""

    namespace: str = "outrider"
    """Ray namespace of the actors. The name of an actor in this namespace is its address."""
    exchange: str = GRPC
    """Transport of exchanges and session streams: `grpc` (gRPC between the processes) or `refs`
    (Ray actor calls). Control calls are always actor calls."""
    listen_host: str = ""
    """Host on which the actors' gRPC servers listen; "" takes the address of their node in the
    cluster."""
    control_timeout_s: float = 5.0
    """Timeout of control calls and of opening an exchange, in seconds."""
    start_timeout_s: float = 120.0
    """Maximum time that an actor may take to start, including loading its model, in seconds."""
    bulk_bytes: int = 64 << 10
    """Largest size in bytes of a frame that is passed directly in an actor call. Larger frames go
    through Ray's object store."""
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    """Application heartbeats of exchanges, and of a router's end of a session stream."""
    sessions_heartbeat: HeartbeatConfig = field(default_factory=router_heartbeat)
    """Application heartbeats of a verifier's end of a session stream."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}: {self.exchange!r}")
        for name in ("control_timeout_s", "start_timeout_s", "bulk_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
