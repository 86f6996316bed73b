"""Settings of the Ray transport."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.transport.heartbeat import HeartbeatConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Settings shared by hosts and dialers."""

    namespace: str = "outrider"
    """Ray namespace of the actors' names; names are addresses within it."""
    control_timeout_s: float = 5.0
    """Deadline of control calls and of opening an exchange."""
    start_timeout_s: float = 120.0
    """How long an actor may take to start, its model's loading included."""
    bulk_bytes: int = 64 << 10
    """Frames larger than this travel through the object store."""
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    """Application heartbeats of exchanges and session streams."""

    def __post_init__(self) -> None:
        for name in ("control_timeout_s", "start_timeout_s", "bulk_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
