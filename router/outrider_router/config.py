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
from outrider.text.output_parsers.formats import (
    AUTO,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    check_parser_names,
)
from outrider.transport.tls import TlsConfig
from outrider_router.base.dns_names import split_addresses
from outrider_router.base.tenants import MAX_TENANT_CHARS, TenantLimits, TenantSource

ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")
MAX_ROUTERS = 64
"""Largest number of routers of a fleet that a router calls for a resumed stream."""
MAX_SLOW_READER_S = 86400.0
"""Largest `slow_reader_timeout_s`, a day: the kernel takes the timeout in milliseconds and keeps
unsent data for as long."""


class Fsync(StrEnum):
    """When the journal is flushed to disk (fsync). A router that is killed loses nothing under any
    policy."""

    OFF = "off"
    """The kernel decides when data reaches the disk."""
    INTERVAL = "interval"
    """Every second, in the background. A machine that fails may lose the last second."""
    ALWAYS = "always"
    """Before clients receive the tokens of a round, so that every round waits for the disk."""


class MetricsCompat(StrEnum):
    """Server under whose metric names the router's metrics are exported too."""

    NONE = "none"
    """No other names."""
    VLLM = "vllm"
    """vLLM's names (`vllm:...`), for tools that read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationDefaults:
    """Speculation settings of requests that do not set their own; keys of the table
    `[speculation]`."""

    method: DraftMethod = DraftMethod.EAGLE3
    """Draft method."""
    draft_tokens: int = 4
    """Draft tokens (tree nodes) per round."""
    top_k: int = 1
    """Branching factor of the draft tree; 1 drafts a chain."""
    look_ahead: int = 1
    """1 lets the verifier's planner use look-ahead (drafts made before the verdict that they
    continue); 0 never uses it."""
    fan_out: int = 0
    """Outcomes per round for which look-ahead makes drafts; 0 lets the drafter choose."""
    proposal_timeout_ms: int = 1000
    """Longest time that a session waits for its proposal in a round. The verifier's planner waits
    less if its measurements say so."""
    ngram_proposal_timeout_ms: int = 20
    """Longest time that a session waits for an n-gram proposal in a round. Drafters make n-gram
    proposals at once or not at all.
    """
    max_draft_tokens: int = 64
    """Largest number of draft tokens that a request may set; larger values are reduced to it. At
    most `max_tree_nodes` of the verifiers."""

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
    """Admission under overload; keys of the table `[overload]`."""

    prior_answer_tokens: int = 256
    """Expected length of an answer, in tokens, until enough answers have been measured."""
    length_quantile: float = 0.8
    """Quantile of recent answer lengths that is the expected length of a new answer."""
    kv_overcommit: float = 1.0
    """Largest ratio of the KV tokens that the sessions placed on a verifier are expected to need to
    the verifier's KV capacity.
    """
    priority_aging_s: float = 10.0
    """Waiting time that raises a request by one priority level; 0 disables aging."""
    tenant_from: TenantSource = TenantSource.NONE
    """Source of a request's tenant: none, metadata (the key x-outrider-tenant) or authorization (a
    hash of that header)."""
    max_tenants: int = 1024
    """Maximum number of tenants that are tracked. Idle tenants are forgotten first; beyond the
    maximum, further tenants share one entry."""
    slow_reader_timeout_s: float = 30.0
    """Time after which a stream is ended if its client reads nothing although data is waiting."""

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
    """Limits and options of the HTTP port; keys of the table `[http_options]`."""

    max_connections: int = 4096
    """Maximum number of connections, counted from the moment they are accepted; never more than
    half of the files that the process may open."""
    handshake_s: float = 10.0
    """Maximum time of a TLS handshake."""
    head_s: float = 10.0
    """Maximum time from the start of a connection, or from the first byte of a further request,
    until the head of the request is complete."""
    body_s: float = 60.0
    """Maximum time from the head of a request until its body is complete."""
    keep_alive_s: int = 75
    """Time that an idle connection is kept open. It should be longer than that of a load balancer
    in front, so that the load balancer never sends a request on a connection that is being
    closed."""
    max_body_bytes: int = 8 << 20
    """Maximum size of a request body in bytes."""
    max_json_values: int = 1 << 19
    """Maximum number of values in a request's JSON (an empty list or object counts twice). Parsing
    blocks the whole process for a time that grows with this number."""
    max_small_chunks: int = 1024
    """Maximum number of chunks of less than a kilobyte in the body of one request with
    Transfer-Encoding: chunked."""
    max_stored_responses: int = 4096
    """Maximum number of responses of /v1/responses that the router stores in memory; the least
    recently used one of the tenant with the most is dropped. 0 stores none, so that conversations
    cannot be continued by `previous_response_id` and responses cannot run in the background."""
    max_stored_response_bytes: int = 256 << 20
    """Maximum memory in bytes of all stored responses, with the items of their conversations."""
    stored_response_ttl_s: float = 86400.0
    """Time after which a stored response is dropped."""
    max_background_responses: int = 64
    """Maximum number of responses that run in the background at the same time; further ones are
    refused with 429."""
    root_path: str = ""
    """Path prefix of all routes, such as /llm, for a proxy that does not strip it; "" means
    none."""
    cors_origins: tuple[str, ...] = ()
    """Origins, such as https://app.example, whose pages may call the API from browsers; "*" allows
    every origin. If empty, browsers let no other page call the API."""

    def __post_init__(self) -> None:
        for name in (
            "handshake_s",
            "head_s",
            "body_s",
            "keep_alive_s",
            "stored_response_ttl_s",
        ):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        for name in (
            "max_connections",
            "max_body_bytes",
            "max_json_values",
            "max_stored_response_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_small_chunks", "max_stored_responses", "max_background_responses"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        path = self.root_path
        if path and (not ROOT_PATH.fullmatch(path)):
            raise ValueError(f"root_path must begin with / and not end with it, got {path!r}")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins must be * or SCHEME://HOST[:PORT], got {origin!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Configuration of a router; the fields are the keys of its TOML file."""

    listen: str = "127.0.0.1:50050"
    """HOST:PORT of the gRPC API for clients; port 0 picks a free port."""
    http: str = ""
    """HOST:PORT of OpenAI's HTTP API; port 0 picks a free port, "" disables it."""
    http_options: HttpConfig = field(default_factory=HttpConfig)
    """Limits and options of the HTTP port."""
    reuse_ports: bool = False
    """Whether other routers may serve clients at the same two addresses; the kernel assigns each
    connection to one of them. The router then opens its ports once it has found a verifier. It
    cannot be combined with a journal, because a client that resumes a request may reach another
    router."""
    shared_memory: bool = True
    """Whether session streams with verifiers on this host use shared memory (Linux). With verifiers
    on other hosts and on Ray, and if this is off, they use gRPC."""
    model: Path
    """Model directory, GGUF file, known name or hub id. Only the tokenizer is read, and downloaded
    if it is missing."""
    model_name: str = ""
    """Model name in requests; "" uses the verifier's name."""
    verifiers: tuple[str, ...] = ()
    """Addresses of the verifiers; drafters must reach them by the same addresses. dns:///HOST:PORT
    stands for all addresses of HOST."""
    drafters: tuple[str, ...] = ()
    """Addresses of the drafters, in the same format."""
    routers: tuple[str, ...] = ()
    """Addresses of the gRPC APIs of the fleet's routers, in the same format; this router may be
    among them. A client that resumes a stream at another router than the one that has it gets it
    through that other router."""
    discovery_interval_s: float = 5.0
    """Interval at which dns:/// names are resolved again."""
    pool_listen: str = ""
    """HOST:PORT of the pool API, by which operators add and remove drafters; port 0 picks a free
    port, "" disables it."""
    queue_limit: int = 256
    """Maximum number of waiting requests; further ones are refused with RESOURCE_EXHAUSTED."""
    default_max_tokens: int = 256
    """Default `max_tokens` of requests, reduced to what the context leaves."""
    special_tokens_in_messages: bool = False
    """Whether the string of a special token (such as <|im_end|>) in a chat message becomes that
    token, as in many servers. By default it is ordinary text, so no message can end a turn or start
    another one. Prompts of completions are parsed in either case."""
    tool_call_parser: Annotated[str, OneOf((AUTO, NONE, *TOOL_FORMATS))] = AUTO
    """Format in which the model writes tool calls. auto: the chat template decides; none: tool
    calls are not read from answers, and requests with tools are refused."""
    reasoning_parser: Annotated[str, OneOf((AUTO, NONE, *REASONING_FORMATS))] = AUTO
    """Format in which the model writes its reasoning. auto: the chat template decides; none:
    reasoning is part of the answer's text."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 picks a free port, -1 disables the endpoint."""
    metrics_host: str = "127.0.0.1"
    """Address on which the Prometheus endpoint listens."""
    health_listen: str = ""
    """HOST:PORT of an additional port that serves only grpc.health.v1.Health, in plain text, for a
    supervisor on this machine. Port 0 picks a free port, "" disables it."""
    metrics_compat: MetricsCompat = MetricsCompat.NONE
    """Other naming scheme under which metrics are exported as well: none or vllm."""
    poll_interval_s: float = 0.5
    """Interval at which verifiers and drafters are polled."""
    peer_timeout_s: float = 3.0
    """Time without an answer after which a verifier or drafter counts as lost."""
    verifier_stall_s: float = 12.0
    """Time without progress after which a verifier with sessions of this router counts as lost. Its
    sessions continue elsewhere, and it receives none until it makes progress or restarts. It should
    be longer than `stall_s` of the verifiers, because it is for those that do not notice that they
    hang; 0 disables the check."""
    failover_timeout_s: float = 25.0
    """Maximum time that a request waits for another verifier after it has lost its own. The time
    that a hung verifier kept it waiting counts."""
    max_failovers: int = 5
    """Number of sessions that one request may lose; the next loss ends it with an error."""
    session_slack_tokens: int = 64
    """KV tokens that a session needs in addition to prompt and output: the largest proposal that
    its verifier verifies. Overestimates only reduce concurrency."""
    drain_timeout_s: float = 30.0
    """Time that running requests get to finish after SIGTERM."""
    resume_grace_s: float = 30.0
    """Time that a resumable request continues, and that its result is kept, without its client."""
    journal: Path | None = None
    """File of the durable log by which resumable requests survive a restart of the router; each
    router needs its own file. Unset disables it."""
    journal_read_s: float = 5.0
    """Maximum time for reading the journal at the start, before clients are served; the rest of the
    file is dropped."""
    journal_fsync: Fsync = Fsync.INTERVAL
    """When the journal is flushed to disk (fsync): off, interval (every second) or always."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """OpenTelemetry tracing of requests."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Lowest log level that is written to stderr."""
    speculation: SpeculationDefaults = field(default_factory=SpeculationDefaults)
    """Speculation settings of requests that do not set their own."""
    api_keys: Path | None = None
    """File of the API keys that clients need; None requires no keys."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """Certificate of this process, for its own ports and for connections to verifiers and
    drafters."""
    client_api_tls: TlsConfig = field(default_factory=TlsConfig)
    """Separate certificate for the client API, for clients that trust another authority; by default
    that of `tls`."""
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    """Settings of admission, tenants and slow readers."""
    grammar_compile: CompileLimits = field(default_factory=CompileLimits)
    """Limits on compiling the grammar of a structured output."""
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    """Limits of tenants by name; `default` applies to each tenant without a table of its own."""

    def __post_init__(self) -> None:
        if not self.verifiers:
            raise ValueError("at least one verifier address is needed (--verifier)")
        split_addresses((*self.verifiers, *self.drafters, *self.routers))
        if len(self.routers) > MAX_ROUTERS:
            raise ValueError(f"at most {MAX_ROUTERS} routers are allowed, got {len(self.routers)}")
        if self.routers and self.reuse_ports:
            raise ValueError(
                "routers and reuse_ports exclude each other: routers that share an address cannot "
                "be called one by one"
            )
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
        check_parser_names(self.tool_call_parser, self.reasoning_parser)

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
        """TLS configuration of the gRPC and HTTP client APIs."""
        if self.client_api_tls.cert is None:
            return self.tls
        if self.client_api_tls.client_auth or not self.tls.client_auth:
            return self.client_api_tls
        return replace(
            self.client_api_tls, client_auth=True, ca=self.client_api_tls.ca or self.tls.ca
        )
