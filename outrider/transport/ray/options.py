"""Ray transport settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.transport.heartbeat import HeartbeatConfig, router_heartbeat

EXCHANGES = GRPC, REFS = ("grpc", "refs")
"""How streams travel: from process to process, or as actor calls with object refs for bulk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Settings shared by hosts and dialers."""

    namespace: str = "outrider"
    """Ray namespace of the actors' names; names are addresses within it."""
    exchange: str = GRPC
    """How rounds and sessions travel: grpc (streams between the processes) or refs (actor calls).
    Control calls are actor calls in both."""
    listen_host: str = ""
    """Interface of the actors' gRPC servers; "" takes their node's address in the cluster."""
    control_timeout_s: float = 5.0
    """Deadline of control calls and of opening an exchange."""
    start_timeout_s: float = 120.0
    """How long an actor may take to start, its model's loading included."""
    bulk_bytes: int = 64 << 10
    """Frames of actor calls larger than this travel through the object store."""
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    """Application heartbeats of exchanges, and of a router's end of a stream of sessions."""
    sessions_heartbeat: HeartbeatConfig = field(default_factory=router_heartbeat)
    """Application heartbeats of a verifier's end of a stream of sessions."""

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}: {self.exchange!r}")
        for name in ("control_timeout_s", "start_timeout_s", "bulk_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
