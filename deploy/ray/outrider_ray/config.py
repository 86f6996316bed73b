"""Launcher configuration; each field is a key of its TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from outrider_drafter.config import DrafterConfig
from outrider_router.config import RouterConfig
from outrider_verifier.config import SEPARATE, VerifierConfig

from outrider.client.commands.ray_flags import PACK, STRATEGIES
from outrider.client.local.config import CPU, CUDA, DEVICES, SHARED_MEMORY_FRACTION
from outrider.config import KeysOf, OneOf, load_config
from outrider.logs import LOG_LEVELS, check_level
from outrider.models import builtin_head
from outrider.spec.exchange_mode import AUTO, EXCHANGE_MODES, OFF
from outrider.spec.plan import DraftMethod, default_method
from outrider.transport.ray import EXCHANGES, GRPC, RayConfig
from outrider_ray import fixed_keys
from outrider_ray.autoscale import AutoscaleConfig
from outrider_ray.members import FleetMember, MemberGroup, MemberRole, cells_of, members_of

HEAD_METHODS = frozenset({DraftMethod.EAGLE3, DraftMethod.EAGLE})
LOCAL_HOST = "127.0.0.1"
DEFAULT_PORT = 50050
MAX_PORT = 65535
AUTO_HEAD = "auto"
"""Value of `head` that stands for the head that ships for the model, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFleetConfig:
    """Configuration of the Ray launcher; the fields are the keys of its TOML file. Raises
    ValueError for values out of range."""

    model: str
    """Target model: a directory, or the name of a model that every node resolves itself."""
    model_name: str = ""
    """Model name in requests; "" uses the verifier's name."""
    head: str = AUTO_HEAD
    """Directory of the EAGLE draft head, which the methods eagle3 and eagle need; auto uses the
    head that ships for the model, if there is one, and "" uses none."""
    verifiers: int = 1
    """Number of verifiers at the start."""
    drafters: int = 1
    """Number of drafters at the start; none are started if no draft method needs them."""
    draft_model: str = ""
    """Draft model (directory or name), which the method model needs."""
    methods: tuple[DraftMethod, ...] | None = None
    """Draft methods; `none` starts no drafter; None uses all methods that `head` allows."""
    dtype: str = "float32"
    """Data type of the target and draft models."""
    device: Annotated[str, OneOf(("", *DEVICES))] = ""
    """Device of the models, cpu or cuda; "" uses cuda if `gpus_per_actor` is set, else cpu."""
    drafter_device: Annotated[str, OneOf(("", *DEVICES))] = ""
    """Device of the drafters; "" uses `device`, or cpu if they draft by n-grams only."""
    memory_fraction: float | None = None
    """Share of its GPU's memory that a verifier may use; None uses 0.7 if a drafter may share the
    GPU, else the verifier's default."""
    placement: str = SEPARATE
    """Where the draft head runs: separate (in the drafter), colocated or fused (in the
    verifier)."""
    device_exchange: Annotated[str, OneOf(EXCHANGE_MODES)] = AUTO
    """Whether verifiers and drafters on one node exchange drafts and features directly between
    their GPUs: on, off or auto, which is on if both compute on GPUs and `exchange` is grpc. Pairs
    that cannot do so exchange by messages."""
    draft_length: int | None = None
    """Draft tokens per round of a head in the verifier or of device_exchange; None uses the
    verifier's default."""
    draft_top_k: int | None = None
    """Branching factor of drafts of a head in the verifier; None uses the verifier's default."""
    planner: str | None = None
    """Planner of the verifiers, automatic or fixed; None uses the verifier's default."""
    look_ahead: int | None = None
    """Look-ahead of requests that do not set it: 0 never uses it, 1 lets the planner choose. None
    uses the router's default."""
    fan_out: int | None = None
    """Outcomes per round for which look-ahead makes drafts, in requests that do not set it; None
    uses the router's default."""
    prefix_cache: bool = True
    """Whether verifiers reuse the KV of shared prompt prefixes."""
    batch_invariant: bool = False
    """Whether verifiers compute the same bits for a token whatever runs beside it."""
    cuda_graphs: bool = True
    """Whether rounds are replayed from CUDA graphs on GPUs."""
    simulated_acceptance: str = ""
    """For benchmarks with random weights only: see the verifier's option of this name."""
    listen: str = ""
    """HOST:PORT of the gRPC API for clients; port 0 picks a free port. "" is port 50050 of
    127.0.0.1, or with `detached` of the address of the supervisor's node."""
    http: str = ""
    """HOST:PORT of OpenAI's HTTP API; port 0 picks a free port, "" disables it."""
    kv_tokens: int | None = None
    """KV cache size of each verifier in tokens; None uses the verifier's default."""
    max_sessions: int | None = None
    """Maximum number of running sessions of each verifier; None uses the verifier's default."""
    queue_limit: int | None = None
    """Maximum number of waiting requests; None uses the router's default."""
    journal: Path | None = None
    """File of the durable log by which resumable requests survive a restart of the router; None
    disables it."""
    api_keys: Path | None = None
    """File of the API keys that clients need, on the router's node; None requires no keys."""
    threads: int = 0
    """Compute threads of each actor; 0 uses `cpus_per_actor`, or torch's choice if that is 0."""
    busy_polling_cores: int = 0
    """CPU cores that each actor keeps busy-polling while it serves; with GPUs only."""
    metrics_port: int = -1
    """Port of the router's Prometheus endpoint; 0 picks a free port, -1 disables the endpoint."""
    member_metrics_port: int = -1
    """First Prometheus port of the actors: verifier N has this port plus 2 N, drafter N the next
    one, on the address of its node; -1 disables them."""
    exchange: Annotated[str, OneOf(EXCHANGES)] = GRPC
    """Transport of rounds and sessions: grpc (between processes, with shared-memory channels within
    a node) or refs (actor calls, with object refs for large messages and no shared-memory
    channels)."""
    ray_address: str = ""
    """Ray cluster to join: HOST:PORT of its head node, or auto; "" starts a local Ray."""
    namespace: str = "outrider"
    """Ray namespace of the actors' names; each fleet needs its own namespace."""
    detached: bool = False
    """Whether the fleet outlives the launcher; a supervisor actor then supervises it and serves
    clients."""
    cpus_per_actor: float = 0.0
    """CPUs that Ray reserves for each actor."""
    gpus_per_actor: float | None = None
    """GPUs that Ray reserves for each actor on cuda, which computes on the first one; None reserves
    one, or an equal share if there are fewer GPUs than actors."""
    strategy: Annotated[str, OneOf(STRATEGIES)] = PACK
    """Placement strategy of a verifier and its drafters: pack, spread, strict-pack or
    strict-spread."""
    verifier_resource: str = ""
    """Custom Ray resource of which each verifier reserves one unit, so that it runs on nodes that
    offer it."""
    drafter_resource: str = ""
    """Custom Ray resource of which each drafter reserves one unit."""
    start_timeout_s: float = 600.0
    """Maximum time for placing an actor and loading its model, in seconds."""
    drain_timeout_s: float = 5.0
    """Time in seconds that running requests get to finish after SIGTERM."""
    orphan_timeout_s: float = 300.0
    """Under Ray Serve: time in seconds for which the actors wait for the next replica after the
    loss of a replica, and then end."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Lowest log level that is written to stderr."""
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    """Autoscaling of verifiers and drafters."""
    router: Annotated[Mapping[str, object], KeysOf(RouterConfig, fixed_keys.ROUTER)] = field(
        default_factory=dict
    )
    """Further keys of the router, as in its own file."""
    verifier: Annotated[Mapping[str, object], KeysOf(VerifierConfig, fixed_keys.VERIFIER)] = field(
        default_factory=dict
    )
    """Further keys of every verifier, as in its own file."""
    drafter: Annotated[Mapping[str, object], KeysOf(DrafterConfig, fixed_keys.DRAFTER)] = field(
        default_factory=dict
    )
    """Further keys of every drafter, as in its own file."""

    def __post_init__(self) -> None:
        for name in ("verifiers", "drafters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.detached and not self.ray_address:
            raise ValueError(
                "detached needs ray_address, because a local Ray stops with the launcher"
            )
        for name in ("threads", "cpus_per_actor", "gpus_per_actor", "drain_timeout_s"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        choices = (
            ("device", ("", *DEVICES)),
            ("drafter_device", ("", *DEVICES)),
            ("exchange", EXCHANGES),
            ("device_exchange", EXCHANGE_MODES),
            ("strategy", STRATEGIES),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                words = ", ".join(filter(None, known))
                raise ValueError(f"{name} must be one of {words}, got {getattr(self, name)!r}")
        self._check_router()
        if self.member_metrics_port != -1 and not (
            0 < self.member_metrics_port <= MAX_PORT + 1 - 2 * max(self.max_of)
        ):
            raise ValueError(
                f"member_metrics_port must be -1, or 1 to {MAX_PORT + 1 - 2 * max(self.max_of)} "
                f"for {max(self.max_of)} actors of a role, got {self.member_metrics_port}"
            )
        if self.gpus_per_actor == 0 and CUDA in self.devices:
            raise ValueError("gpus_per_actor must be positive for actors on cuda")
        check_level(self.log_level)
        for name in ("start_timeout_s", "orphan_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.ray_address.startswith("ray://"):
            # A Ray client has no local raylet, so that actor calls would be relayed.
            raise ValueError(
                "ray_address must not be a ray:// address: start the launcher on a node of the "
                "cluster"
            )

    def _check_router(self) -> None:
        for name, table in (
            ("router", self.router),
            ("verifier", self.verifier),
            ("drafter", self.drafter),
        ):
            if table.get("tls"):
                raise ValueError(
                    f"{name}.tls has no effect on Ray: give clients TLS with "
                    "router.client_api_tls, and protect connections between nodes by the network"
                )
        if self.router.get("reuse_ports"):
            raise ValueError("router.reuse_ports: a fleet on Ray has one router")

    @property
    def head_dir(self) -> str:
        """Directory of the draft head; "" if there is none."""
        if self.head != AUTO_HEAD:
            return self.head
        found = builtin_head(self.model)
        return "" if found is None else str(found)

    @property
    def drafting(self) -> tuple[DraftMethod, ...]:
        """Draft methods that requests can use; empty without speculation."""
        if self.methods is None:
            own = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
            return own if self.head_dir else (DraftMethod.NGRAM,)
        return tuple(method for method in self.methods if method is not DraftMethod.NONE)

    @property
    def drafter_methods(self) -> tuple[DraftMethod, ...]:
        """Draft methods that drafters offer; empty if there is no drafter."""
        if self.placement == SEPARATE:
            return self.drafting
        return tuple(method for method in self.drafting if method not in HEAD_METHODS)

    @property
    def roles(self) -> tuple[MemberRole, ...]:
        """Roles that the fleet has actors of: verifier, and also drafter if a draft method needs
        drafters."""
        return (
            (MemberRole.VERIFIER, MemberRole.DRAFTER)
            if self.drafter_methods
            else (MemberRole.VERIFIER,)
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Number of verifiers and number of drafters at the start. Scaling never goes below these
        numbers."""
        return self.verifiers, self.drafters if self.drafter_methods else 0

    @property
    def max_of(self) -> tuple[int, int]:
        """Largest number of verifiers and largest number of drafters that scaling may reach."""
        return (
            self.autoscale.max_members(MemberRole.VERIFIER, self.counts[MemberRole.VERIFIER]),
            self.autoscale.max_members(MemberRole.DRAFTER, self.counts[MemberRole.DRAFTER])
            if self.counts[1]
            else 0,
        )

    @property
    def members(self) -> tuple[FleetMember, ...]:
        """Actors that the deployment starts with, before it is scaled."""
        return members_of(*self.counts)

    @property
    def cells(self) -> tuple[MemberGroup, ...]:
        """Groups of actors that are placed together, one for each verifier."""
        return cells_of(*self.counts)

    @property
    def devices(self) -> tuple[str, ...]:
        """Device (cpu or cuda) of the actors of each role, in the order of `roles`."""
        verifier = self.device or (CUDA if self.gpus_per_actor else CPU)
        looks_up = self.drafter_methods == (DraftMethod.NGRAM,)
        drafter = self.drafter_device or (CPU if looks_up else verifier)
        return (verifier, drafter)[: len(self.roles)]

    @property
    def actor_threads(self) -> int:
        """Number of compute threads of each actor; 0 lets torch choose."""
        return self.threads or int(self.cpus_per_actor)

    @property
    def ray(self) -> RayConfig:
        """Settings of the Ray transport between router, verifiers and drafters."""
        return RayConfig(
            namespace=self.namespace,
            exchange=self.exchange,
            # A local Ray is only used from this machine.
            listen_host="" if self.ray_address else LOCAL_HOST,
            start_timeout_s=self.start_timeout_s,
        )

    @property
    def ray_strategy(self) -> str:
        """Name of the placement strategy in Ray's API."""
        return self.strategy.replace("-", "_").upper()

    def metrics_port_of(self, member: FleetMember) -> int:
        """Return the port of an actor's Prometheus endpoint, or -1 if it has none."""
        first = self.member_metrics_port
        return first if first < 0 else first + 2 * member.index + member.role

    def torch_device(self, role: MemberRole) -> str:
        """Return the torch device of an actor of this role. A GPU is always cuda:0, because Ray
        shows each actor only the GPUs that it reserved."""
        return CPU if self.devices[role] == CPU else "cuda:0"

    def gpus_of(self, role: MemberRole) -> float:
        """Return the number of GPUs that Ray reserves for an actor of this role: 0 on the CPU,
        otherwise `gpus_per_actor`, or one if that is None."""
        if self.devices[role] == CPU:
            return 0.0
        return 1.0 if self.gpus_per_actor is None else self.gpus_per_actor

    def resource_of(self, role: MemberRole) -> str:
        """Return the custom Ray resource that an actor of this role reserves; "" if none."""
        return (self.verifier_resource, self.drafter_resource)[role]

    @property
    def exchange_mode(self) -> str:
        """Value of `device_exchange` for verifiers and drafters. It is off unless `exchange` is
        grpc, because the device exchange needs shared-memory channels."""
        return self.device_exchange if self.exchange == GRPC else OFF

    @property
    def verifier_memory_fraction(self) -> float | None:
        """Fraction of a GPU's memory that a verifier may use; None takes the verifier's default."""
        shares = self.devices.count(CUDA) > 1 and self.gpus_of(MemberRole.VERIFIER) < 1.0
        if self.memory_fraction is None and shares:
            return SHARED_MEMORY_FRACTION
        return self.memory_fraction


def verifier_config(config: RayFleetConfig, index: int = 0) -> VerifierConfig:
    """Return the configuration of the verifier with this index. Raises InvalidRequestError."""
    uses_head = bool(HEAD_METHODS & set(config.drafting))
    member = FleetMember(MemberRole.VERIFIER, index)
    return load_config(
        VerifierConfig,
        overrides={
            **config.verifier,
            "model": _portable(config.model),
            "verifier_id": member.name,
            "metrics_port": config.metrics_port_of(member),
            "feature_head": _portable(config.head_dir) if uses_head else None,
            "dtype": config.dtype,
            "device": config.torch_device(MemberRole.VERIFIER),
            "memory_fraction": config.verifier_memory_fraction,
            "shared_memory": config.exchange == GRPC,
            "device_exchange": config.exchange_mode,
            "placement": config.placement,
            "draft_length": config.draft_length,
            "draft_top_k": config.draft_top_k,
            "planner": config.planner,
            "cuda_graphs": config.cuda_graphs,
            "batch_invariant": config.batch_invariant,
            "prefix_cache": config.prefix_cache,
            "simulated_acceptance": config.simulated_acceptance,
            "threads": config.actor_threads,
            "busy_polling_cores": config.busy_polling_cores,
            "kv_tokens": config.kv_tokens,
            "max_sessions": config.max_sessions,
            "log_level": config.log_level,
        },
    )


def drafter_config(config: RayFleetConfig, index: int = 0) -> DrafterConfig | None:
    """Return the configuration of the drafter with this index, or None if the fleet has no
    drafters. Raises InvalidRequestError."""
    methods = config.drafter_methods
    if not methods:
        return None
    uses_head = bool(HEAD_METHODS & set(methods))
    uses_model = DraftMethod.MODEL in methods
    device = config.torch_device(MemberRole.DRAFTER)
    member = FleetMember(MemberRole.DRAFTER, index)
    return load_config(
        DrafterConfig,
        overrides={
            **config.drafter,
            "model": _portable(config.model),
            "head": _portable(config.head_dir) if uses_head else None,
            "draft_model": _portable(config.draft_model) if uses_model else None,
            "methods": methods,
            "dtype": config.dtype,
            "device": device,
            "shared_memory": config.exchange == GRPC,
            "device_exchange": config.exchange_mode,
            "cuda_graphs": config.cuda_graphs,
            "threads": config.actor_threads,
            # A drafter that computes on the CPU needs the cores itself.
            "busy_polling_cores": config.busy_polling_cores if device != CPU else 0,
            "drafter_id": member.name,
            "metrics_port": config.metrics_port_of(member),
            "log_level": config.log_level,
        },
    )


def router_config(
    config: RayFleetConfig, model: Path, node_address: str = LOCAL_HOST
) -> RouterConfig:
    """Return the configuration of the router. `model` is the directory from which the router reads
    the tokenizer, `node_address` the address of its node. Raises InvalidRequestError."""
    # Clients of a detached fleet are rarely on the node on which Ray happens to run the router.
    host = node_address if config.detached else LOCAL_HOST
    defaults = {} if host == LOCAL_HOST else {"metrics_host": host}
    return load_config(
        RouterConfig,
        overrides={
            **defaults,
            **config.router,
            "listen": config.listen or f"{host}:{DEFAULT_PORT}",
            "http": config.http,
            "model": model,
            "model_name": config.model_name,
            "verifiers": tuple(m.name for m in config.members if m.role is MemberRole.VERIFIER),
            "drafters": tuple(m.name for m in config.members if m.role is MemberRole.DRAFTER),
            "queue_limit": config.queue_limit,
            "journal": config.journal,
            "api_keys": config.api_keys,
            "speculation.method": default_method(config.drafting),
            "speculation.look_ahead": config.look_ahead,
            "speculation.fan_out": config.fan_out,
            "metrics_port": config.metrics_port,
            "drain_timeout_s": config.drain_timeout_s,
            "log_level": config.log_level,
        },
    )


def _portable(name_or_path: str) -> str:
    """Return a path as an absolute path, and a name unchanged."""
    path = Path(name_or_path).expanduser()
    return str(path.resolve()) if name_or_path and path.exists() else name_or_path
