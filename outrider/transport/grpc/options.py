"""gRPC transport settings and the channel options derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.transport.heartbeat import HeartbeatConfig, router_heartbeat
from outrider.wire.limits import MAX_BUNDLE_BYTES, MAX_MESSAGE_BYTES

ChannelOptions = list[tuple[str, int]]

_MIN_PING_INTERVAL_MS = 500
_MAX_PING_STRIKES = 32
_MAX_METADATA_BYTES = 16 << 10
"""Largest total size in bytes of the header fields of a call."""
_HANDSHAKE_MS = 10_000
_RECONNECT_MIN_MS = 100
_RECONNECT_MAX_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """Settings shared by servers and clients."""

    keepalive_time_s: float = 2.0
    """Time in seconds without traffic after which a keepalive ping is sent on a connection; in [1,
    10]."""
    keepalive_timeout_s: float = 2.0
    """Time in seconds without an answer to a keepalive ping after which the connection counts as
    lost."""
    connect_timeout_s: float = 5.0
    """Time limit for opening an exchange, in seconds."""
    control_timeout_s: float = 5.0
    """Deadline of unary control calls, in seconds."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Largest size of one message in bytes, in both directions."""
    max_receive_bytes: int = MAX_MESSAGE_BYTES
    """Largest size in bytes of one message that a server accepts; values above max_message_bytes
    have no effect."""
    max_connections: int = 1024
    """Largest number of open connections of a server. It closes further ones."""
    max_calls: int = 8192
    """Largest number of calls that a server handles concurrently. It refuses further ones with
    RESOURCE_EXHAUSTED."""
    max_streams: int = 4096
    """Largest number of calls of one connection that a server handles concurrently. Further ones
    wait at the client."""
    share_port: bool = False
    """Whether other processes may listen on the same port; the system assigns each connection to
    one of them."""
    shm_channels: bool = False
    """Whether session streams use shared-memory channels. They do if both ends are on one host and
    have this setting."""
    heartbeat: HeartbeatConfig = field(default_factory=HeartbeatConfig)
    """Heartbeats of exchanges, and of a router's end of a session stream."""
    sessions_heartbeat: HeartbeatConfig = field(default_factory=router_heartbeat)
    """Heartbeats of a verifier's end of a session stream."""

    @property
    def bundle_bytes(self) -> int:
        """Size in bytes up to which messages of an exchange are joined into one frame."""
        return min(MAX_BUNDLE_BYTES, self.max_message_bytes)

    def __post_init__(self) -> None:
        if not 1.0 <= self.keepalive_time_s <= 10.0:
            raise ValueError(f"keepalive_time_s must be in [1, 10], got {self.keepalive_time_s}")
        for name in ("keepalive_timeout_s", "connect_timeout_s", "control_timeout_s"):
            if getattr(self, name) <= 0.0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("max_receive_bytes", "max_connections", "max_calls", "max_streams"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.max_message_bytes <= MAX_MESSAGE_BYTES:
            raise ValueError(
                f"max_message_bytes must be in [1, {MAX_MESSAGE_BYTES}], "
                f"got {self.max_message_bytes}"
            )


def _common(config: GrpcConfig) -> ChannelOptions:
    timeout_ms = round(config.keepalive_timeout_s * 1000)
    return [
        ("grpc.keepalive_time_ms", round(config.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # Without this option a stopped peer is noticed after the default of 60 s.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", config.max_message_bytes),
    ]


def channel_options(config: GrpcConfig) -> ChannelOptions:
    """Return the options of a client's channel."""
    return [
        *_common(config),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MIN_MS),
        ("grpc.min_reconnect_backoff_ms", round(config.connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MAX_MS),
    ]


def server_options(config: GrpcConfig) -> ChannelOptions:
    """Return the options of a server, which accepts the keepalive pings that its clients are
    configured to send.
    """
    return [
        *_common(config),
        # gRPC's C macro for this option has `recv` in its name, but the option itself has not, and
        # gRPC ignores unknown options.
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        # A client that was stopped for a while sends its late pings in a row. A client that sends
        # more of them is disconnected.
        ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
        (
            "grpc.max_receive_message_length",
            min(config.max_receive_bytes, config.max_message_bytes),
        ),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", config.max_streams),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # Otherwise the server waits two minutes for a client that connects and sends nothing.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # Off by default, because two servers on one port would share its connections at random.
        ("grpc.so_reuseport", int(config.share_port)),
    ]
