"""Configuration keys that the launcher sets itself or that have no meaning under Ray.

All other keys of router, verifier and drafter can be given in the launcher's tables `[router]`,
`[verifier]` and `[drafter]`.
"""

from __future__ import annotations

ROUTER = frozenset(
    {
        *("listen", "http", "model", "model_name", "verifiers", "drafters", "pool_listen"),
        *("queue_limit", "journal", "metrics_port", "drain_timeout_s", "log_level"),
        *("health_listen", "api_keys"),
    }
)
_ACTOR = frozenset(
    {"listen", "health_listen", "metrics_port", "metrics_host", "trace_file", "drain_timeout_s"}
)
"""Keys that the launcher decides for all actors, or that have no effect because Ray ends them."""
VERIFIER = _ACTOR | {
    *(
        "model",
        "verifier_id",
        "feature_head",
        "dtype",
        "device",
        "memory_fraction",
        "shared_memory",
        "device_exchange",
    ),
    *("placement", "draft_length", "draft_top_k", "planner", "cuda_graphs", "batch_invariant"),
    "simulated_acceptance",
    *("threads", "busy_polling_cores", "kv_tokens", "prefix_cache", "max_sessions", "log_level"),
    # Heartbeats are settings of the Ray transport.
    *("heartbeat_ms", "peer_timeout_ms", "router_silence_ms"),
}
DRAFTER = _ACTOR | {
    *("model", "drafter_id", "head", "draft_model", "methods", "dtype", "device", "shared_memory"),
    *("device_exchange", "cuda_graphs", "threads", "busy_polling_cores", "log_level"),
}
