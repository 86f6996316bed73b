"""Configuration of the router process: `RouterConfig` and its tables."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from outrider.config import OneOf
from outrider.grammar.limits import CompileLimits
from outrider.logs import LOG_LEVELS, check_level
from outrider.spans import TracingConfig
from outrider.spec.plan import MAX_PROPOSAL_TIMEOUT_MS, DraftMethod, SpeculationPlan
from outrider.transport.tls import TlsConfig
from outrider_router.base.dns_names import split_addresses
from outrider_router.base.tenants import MAX_TENANT_CHARS, TenantLimits, TenantSource

ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
MAX_SLOW_READER_S = 86400.0
"""A day: the kernel is told it in milliseconds, and holds its buffers for as long."""


class Fsync(StrEnum):
    """Flush policy of the durable log (fsync). A killed router loses nothing under any of them."""

    OFF = "off"
    """Whenever the kernel likes."""
    INTERVAL = "interval"
    """Every second, beside the rounds: a machine that fails may lose the last of it."""
    ALWAYS = "always"
    """Before a client is told of a round; every round waits for the disk."""


class MetricsCompat(StrEnum):
    """Tool under whose metric names the router's metrics are exported, too."""

    NONE = "none"
    """Nobody's."""
    VLLM = "vllm"
    """vLLM's names (`vllm:...`), for tools that read those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationDefaults:
    """Speculation of sessions whose request does not say otherwise."""

    method: DraftMethod = DraftMethod.EAGLE3
    """Draft source."""
    draft_tokens: int = 4
    """Draft nodes a round."""
    top_k: int = 1
    """Children per expanded node; 1 drafts a chain."""
    look_ahead: int = 1
    """1 lets the verifier's planner have drafts made ahead of verdicts; 0 drafts in lock-step."""
    fan_out: int = 0
    """Outcomes that are pre-drafted a round; 0 lets the drafter choose."""
    proposal_timeout_ms: int = 1000
    """Longest wait of a row for its proposal; within it the verifier follows what it measures."""
    ngram_proposal_timeout_ms: int = 20
    """The same for n-gram drafts: a lookup either answers at once or has found nothing."""
    max_draft_tokens: int = 64
    """Requests for more are cut to this; at most the verifiers' `max_tree_nodes`."""

    def __post_init__(self) -> None:
        for name in ("proposal_timeout_ms", "ngram_proposal_timeout_ms"):
            if not 0 <= getattr(self, name) <= MAX_PROPOSAL_TIMEOUT_MS:
                raise ValueError(f"{name} must be in [0, {MAX_PROPOSAL_TIMEOUT_MS}]")
        if self.draft_tokens > self.max_draft_tokens:
            raise ValueError(
                f"draft_tokens must be at most max_draft_tokens ({self.max_draft_tokens}), "
                f"got {self.draft_tokens}"
            )
        SpeculationPlan(
            draft_tokens=self.max_draft_tokens,
            top_k=self.top_k,
            look_ahead=self.look_ahead,
            fan_out=self.fan_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadConfig:
    """Behaviour under overload; keys of the table `[overload]`."""

    prior_answer_tokens: int = 256
    """Tokens that an answer is expected to have until enough of them have ended."""
    length_quantile: float = 0.8
    """Share of recent answers that were no longer than what a new one is expected to have."""
    kv_overcommit: float = 1.0
    """So many times a verifier's KV cache is given away, by what sessions are expected to hold."""
    priority_aging_s: float = 10.0
    """Waiting this long counts as much as one level of priority; 0: nobody ages."""
    tenant_from: TenantSource = TenantSource.NONE
    """Where a request says whose it is."""
    max_tenants: int = 1024
    """Most tenants that are known at once; idle ones are forgotten, beyond that they share one."""
    slow_reader_timeout_s: float = 30.0
    """A stream whose client takes nothing for this long, though there is something, is ended."""

    def __post_init__(self) -> None:
        if self.prior_answer_tokens < 1:
            raise ValueError(f"prior_answer_tokens must be >= 1, got {self.prior_answer_tokens}")
        if not 0.0 < self.length_quantile < 1.0:
            raise ValueError(f"length_quantile must be in (0, 1), got {self.length_quantile}")
        if not 0.0 < self.kv_overcommit <= 16.0:
            raise ValueError(f"kv_overcommit must be in (0, 16], got {self.kv_overcommit}")
        if not 0.0 <= self.priority_aging_s < math.inf:
            raise ValueError(
                f"priority_aging_s must be finite and >= 0, got {self.priority_aging_s}"
            )
        if self.max_tenants < 1:
            raise ValueError(f"max_tenants must be >= 1, got {self.max_tenants}")
        if not 0.0 < self.slow_reader_timeout_s <= MAX_SLOW_READER_S:
            raise ValueError(
                f"slow_reader_timeout_s must be positive and at most {MAX_SLOW_READER_S:g}, "
                f"got {self.slow_reader_timeout_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Bounds and options of the HTTP port; keys of the table `[http_options]`."""

    max_connections: int = 4096
    """Most connections at once, counted from the moment they are accepted; never more than half of
    the files that the process may open."""
    handshake_s: float = 10.0
    """Longest time of a TLS handshake."""
    head_s: float = 10.0
    """Longest time from the start of a connection, or from the first byte of a further request,
    until the head of the request is complete."""
    body_s: float = 60.0
    """Longest time from the head of a request until its body is complete."""
    keep_alive_s: int = 75
    """Time that a connection is kept between two requests. It should be longer than load balancers
    keep theirs, so that none sends a request into a connection that is being closed."""
    max_body_bytes: int = 8 << 20
    """Most bytes of a request's body."""
    max_json_values: int = 1 << 19
    """Most values in a request's JSON (an empty list or object counts twice). Parsing holds up the
    whole process, for a time that grows with their number."""
    max_small_chunks: int = 1024
    """Most chunks of less than a kilobyte in the body of one request with Transfer-Encoding:
    chunked."""
    root_path: str = ""
    """Path in front of all routes, such as /llm, for a proxy that does not strip it; "" is none."""
    cors_origins: tuple[str, ...] = ()
    """Origins, such as https://app.example, whose pages may call the API in browsers; "*" is every
    origin. Empty: no browser lets other pages call it."""

    def __post_init__(self) -> None:
        for name in ("handshake_s", "head_s", "body_s", "keep_alive_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("max_connections", "max_body_bytes", "max_json_values"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_small_chunks < 0:
            raise ValueError(f"max_small_chunks must be >= 0, got {self.max_small_chunks}")
        path = self.root_path
        if path and (not ROOT_PATH.fullmatch(path)):
            raise ValueError(f"root_path must begin with / and not end with it, got {path!r}")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins must be * or SCHEME://HOST[:PORT], got {origin!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything the router can be told; keys of its TOML file."""

    listen: str = "127.0.0.1:50050"
    """HOST:PORT of the client API; port 0 takes a free one."""
    http: str = ""
    """HOST:PORT of OpenAI's API over HTTP; port 0 takes a free one, "" serves none."""
    http_options: HttpConfig = field(default_factory=HttpConfig)
    """Bounds and options of the HTTP port."""
    reuse_ports: bool = False
    """Whether other routers may serve clients at the same two addresses: the system gives each
    connection to one of them. Then this one serves once it has found a verifier. Not with a
    journal: who comes back for an answer need not come to the router that has it."""
    shared_memory: bool = True
    """Whether streams of sessions with verifiers of this host go through memory and sockets of the
    host instead of gRPC (Linux); off, with other hosts, and on Ray, over the connection."""
    model: Path
    """Model directory or a pulled model's name; only its tokenizer files are read."""
    model_name: str = ""
    """Name that clients ask for; "" takes the verifier's."""
    verifiers: tuple[str, ...] = ()
    """Addresses of the verifiers, as the drafters reach them too; dns:///HOST:PORT stands for all
    that HOST has."""
    drafters: tuple[str, ...] = ()
    """Addresses of the drafters, likewise."""
    discovery_interval_s: float = 5.0
    """Time between two looks at what a dns:/// name stands for."""
    pool_listen: str = ""
    """HOST:PORT where operators add and remove drafters; port 0 takes a free one, "" serves none.
    """
    queue_limit: int = 256
    """Most requests that may wait; more are refused with RESOURCE_EXHAUSTED."""
    default_max_tokens: int = 256
    """Length limit of requests that set none (cut to what the context leaves)."""
    special_tokens_in_messages: bool = False
    """Whether the string of a special token (such as <|im_end|>) in a chat message becomes that
    token, as in many servers. By default it is ordinary text, so no message can end a turn or begin
    another one. Text prompts of completions are parsed in either case."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 takes a free one, -1 serves none."""
    metrics_host: str = "127.0.0.1"
    """Address that the Prometheus endpoint listens on."""
    health_listen: str = ""
    """HOST:PORT of a port that serves grpc.health.v1.Health alone, in plain text: for a supervisor
    on this machine. Port 0 takes a free one, "" serves none."""
    metrics_compat: MetricsCompat = MetricsCompat.NONE
    """Whose names its metrics have as well: none, vllm."""
    poll_interval_s: float = 0.5
    """Time between two looks at a verifier or drafter."""
    peer_timeout_s: float = 3.0
    """A peer that answers nothing for this long is lost."""
    verifier_stall_s: float = 12.0
    """Time without a sign of progress of a verifier that has sessions of this router, after which
    it is lost: its sessions go on elsewhere, and it gets none until it makes progress or is started
    again. Longer than the verifiers' own `stall_s`, for those that do not notice themselves; 0
    watches nothing."""
    failover_timeout_s: float = 25.0
    """Longest time that a request which has lost its verifier waits for another one; the time that
    a hung verifier kept it waiting counts."""
    max_failovers: int = 5
    """Sessions of one request that may be lost or fail; the next loss ends it with an error."""
    session_slack_tokens: int = 64
    """KV tokens that a session needs beside prompt and output: the largest proposal that its
    verifier verifies. What is counted in vain costs capacity, never a request."""
    drain_timeout_s: float = 30.0
    """Time that running requests get after SIGTERM."""
    resume_grace_s: float = 30.0
    """Time that a resumable request goes on, or that its end is kept, without its client."""
    journal: Path | None = None
    """File of the log that resumable requests survive this process by, one router a file; unset
    keeps none."""
    journal_read_s: float = 5.0
    """Longest time that reading that file may take at the start, before clients are served; what
    it holds behind that is dropped."""
    journal_fsync: Fsync = Fsync.INTERVAL
    """When that file is forced to the disk: off, interval (every second) or always."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """Spans of requests, for OpenTelemetry."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Least severe level that is logged."""
    speculation: SpeculationDefaults = field(default_factory=SpeculationDefaults)
    """Speculation defaults."""
    api_keys: Path | None = None
    """File of the API keys that clients must have; None asks for none."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """This process's certificate, for its own ports and for verifiers and drafters."""
    client_api_tls: TlsConfig = field(default_factory=TlsConfig)
    """Another certificate for clients, of an authority that they know; without one, that of `tls`.
    """
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    """Admission, tenants and slow readers."""
    grammar_compile: CompileLimits = field(default_factory=CompileLimits)
    """Limits of compiling the grammar of a structured output."""
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    """Limits of tenants by name; those of `default` are everybody else's, each by itself."""

    def __post_init__(self) -> None:
        if not self.verifiers:
            raise ValueError("at least one verifier address is needed (--verifier)")
        split_addresses((*self.verifiers, *self.drafters))
        self._check_times()
        if self.reuse_ports and self.journal is not None:
            raise ValueError(
                "reuse_ports and journal exclude each other: routers that share ports cannot have "
                "a journal"
            )
        if self.queue_limit < 0:
            raise ValueError(f"queue_limit must be >= 0, got {self.queue_limit}")
        if self.default_max_tokens < 1:
            raise ValueError(f"default_max_tokens must be >= 1, got {self.default_max_tokens}")
        if self.max_failovers < 0:
            raise ValueError(f"max_failovers must be >= 0, got {self.max_failovers}")
        if self.session_slack_tokens < 0:
            raise ValueError("session_slack_tokens must be >= 0")
        for name in self.tenants:
            if not name or len(name) > MAX_TENANT_CHARS:
                raise ValueError(
                    f"names of tenants must have 1 to {MAX_TENANT_CHARS} characters, got {name!r}"
                )
        self.tls.for_fleet()
        check_level(self.log_level)

    def _check_times(self) -> None:
        for name in ("discovery_interval_s", "poll_interval_s", "peer_timeout_s", "journal_read_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in ("verifier_stall_s", "failover_timeout_s", "resume_grace_s", "drain_timeout_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)}")
        if self.peer_timeout_s <= self.poll_interval_s:
            raise ValueError("poll_interval_s must be less than peer_timeout_s")

    @property
    def client_tls(self) -> TlsConfig:
        """What clients of both fronts are served with."""
        if self.client_api_tls.cert is None:
            return self.tls
        if self.client_api_tls.client_auth or not self.tls.client_auth:
            return self.client_api_tls
        return replace(
            self.client_api_tls, client_auth=True, ca=self.client_api_tls.ca or self.tls.ca
        )
