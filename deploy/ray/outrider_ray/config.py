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
from outrider.spec.exchange_mode import AUTO, EXCHANGE_MODES, OFF
from outrider.spec.plan import DraftMethod, default_method
from outrider.transport.ray import EXCHANGES, GRPC, RayConfig
from outrider_ray import fixed_keys
from outrider_ray.autoscale import AutoscaleConfig
from outrider_ray.members import FleetMember, MemberGroup, MemberRole, cells_of, members_of

HEAD_METHODS = frozenset({DraftMethod.EAGLE3, DraftMethod.EAGLE})
LOCAL_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFleetConfig:
    """Complete configuration of the launcher. Raises ValueError for values out of range."""

    model: str
    """Target model: a directory, or a model name that every node resolves for itself."""
    model_name: str = ""
    """Model name that clients send; "" takes the name that the verifier reports."""
    head: str = ""
    """Directory of the EAGLE draft head, which the methods eagle3 and eagle need."""
    verifiers: int = 1
    """Number of verifiers."""
    drafters: int = 1
    """Number of drafters; none are started if no draft method runs in drafters."""
    draft_model: str = ""
    """Draft model (directory or name), which the method model needs."""
    methods: tuple[DraftMethod, ...] | None = None
    """Draft methods; `none` starts no drafter, unset takes all that `head` allows."""
    dtype: str = "float32"
    """Data type of the target and draft models."""
    device: Annotated[str, OneOf(("", *DEVICES))] = ""
    """Device on which the models compute, cpu or cuda; "" takes cuda if `gpus_per_actor` is set."""
    drafter_device: Annotated[str, OneOf(("", *DEVICES))] = ""
    """Device on which the drafters compute, cpu or cuda; "" takes `device`, or cpu if n-gram is the
    only method."""
    memory_fraction: float | None = None
    """Fraction of a GPU's memory that a verifier may use; unset takes 0.7 if a drafter may share
    its GPU, else the verifier's default."""
    placement: str = SEPARATE
    """Process in which the draft head runs: separate (the drafter), colocated or fused (the
    verifier)."""
    device_exchange: Annotated[str, OneOf(EXCHANGE_MODES)] = AUTO
    """Whether verifiers and drafters of one node exchange drafts and features directly between
    their GPUs: on, off, or auto, which is on if both compute on GPUs and `exchange` is grpc. Pairs
    that cannot do so exchange messages."""
    draft_length: int | None = None
    """Draft tokens per round of a head in the verifier, or of a drafter with device exchange; unset
    takes the verifier's default."""
    draft_top_k: int | None = None
    """Branching factor of the draft tree of a head in the verifier; unset takes the verifier's
    default."""
    planner: str | None = None
    """Whether speculation adapts to measurements: automatic or fixed; unset takes the verifier's
    default."""
    look_ahead: int | None = None
    """Look-ahead of requests that do not set it: 0 never drafts before the verdict, 1 does so if
    the planner expects a gain; unset takes the router's default."""
    fan_out: int | None = None
    """Outcomes drafted ahead for requests that do not set it; unset takes the router's default."""
    prefix_cache: bool = True
    """Whether verifiers keep the KV cache of prompts for other requests with the same prefix."""
    cuda_graphs: bool = True
    """Whether GPUs replay rounds from CUDA graphs."""
    simulated_acceptance: str = ""
    """Benchmark only: accept drafts at random, as the verifier's key of this name describes."""
    listen: str = "127.0.0.1:50050"
    """HOST:PORT of the gRPC client API; port 0 takes a free one."""
    http: str = ""
    """HOST:PORT of the OpenAI-compatible HTTP API; port 0 takes a free one, "" disables it."""
    kv_tokens: int | None = None
    """KV cache size of each verifier in tokens; unset takes the verifier's default."""
    max_sessions: int | None = None
    """Largest number of sessions that each verifier runs at once; unset takes the verifier's
    default."""
    queue_limit: int | None = None
    """Largest number of queued requests; unset takes the router's default."""
    journal: Path | None = None
    """Log file from which resumable requests are restored after a restart; unset disables it."""
    threads: int = 0
    """Compute threads of each actor; 0 takes `cpus_per_actor`, or torch's choice if that is 0."""
    busy_polling_cores: int = 0
    """CPU cores that each actor keeps busy-polling to reduce wake-up latency; for GPUs only."""
    metrics_port: int = -1
    """Port of the router's Prometheus endpoint; 0 takes a free one, -1 disables it."""
    exchange: Annotated[str, OneOf(EXCHANGES)] = GRPC
    """Transport of rounds and sessions: grpc, with shared-memory channels within a node, or refs,
    which uses actor calls with object refs for large messages and no shared-memory channels."""
    ray_address: str = ""
    """Ray cluster to join: HOST:PORT of its head, or auto; "" starts a local one."""
    namespace: str = "outrider"
    """Ray namespace of the actors' names; only one launcher may use a namespace."""
    detached: bool = False
    """Whether the fleet outlives the launcher: a supervisor actor then runs the router and restarts
    actors."""
    cpus_per_actor: float = 0.0
    """CPUs that Ray reserves for each actor."""
    gpus_per_actor: float | None = None
    """GPUs that Ray reserves for each actor on cuda, which computes on the first of them; unset
    takes one, or an equal share if there are fewer GPUs than actors."""
    strategy: Annotated[str, OneOf(STRATEGIES)] = PACK
    """Placement strategy of a verifier and its drafters: pack, spread, strict-pack or
    strict-spread."""
    verifier_resource: str = ""
    """Ray custom resource of which each verifier takes one, so that it runs on nodes that offer
    it."""
    drafter_resource: str = ""
    """Ray custom resource of which each drafter takes one, so that it runs on nodes that offer
    it."""
    start_timeout_s: float = 600.0
    """Longest time that an actor may take to be placed and to load its model."""
    drain_timeout_s: float = 5.0
    """Time that running requests get to finish after SIGTERM."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Lowest severity that is logged."""
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    """Autoscaling: when verifiers and drafters are added and removed, and their largest numbers."""
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
        if self.gpus_per_actor == 0 and CUDA in self.devices:
            raise ValueError("gpus_per_actor must be positive for actors on cuda")
        check_level(self.log_level)
        if self.start_timeout_s <= 0:
            raise ValueError("start_timeout_s must be positive")
        if self.ray_address.startswith("ray://"):
            # A client session has no raylet of its own: actor calls would take a detour.
            raise ValueError(
                "ray_address must not be a ray:// address: start the launcher on a node of the "
                "cluster"
            )

    @property
    def drafting(self) -> tuple[DraftMethod, ...]:
        """Draft methods; empty without speculation."""
        if self.methods is None:
            own = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
            return own if self.head else (DraftMethod.NGRAM,)
        return tuple(method for method in self.methods if method is not DraftMethod.NONE)

    @property
    def drafter_methods(self) -> tuple[DraftMethod, ...]:
        """Draft methods that drafters offer; empty if there is no drafter."""
        if self.placement == SEPARATE:
            return self.drafting
        return tuple(method for method in self.drafting if method not in HEAD_METHODS)

    @property
    def roles(self) -> tuple[MemberRole, ...]:
        """Roles of the actors that exist."""
        return (
            (MemberRole.VERIFIER, MemberRole.DRAFTER)
            if self.drafter_methods
            else (MemberRole.VERIFIER,)
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of verifiers and drafters at the start, which are also the smallest numbers."""
        return self.verifiers, self.drafters if self.drafter_methods else 0

    @property
    def max_of(self) -> tuple[int, int]:
        """Largest numbers of verifiers and drafters."""
        return (
            self.autoscale.max_members(MemberRole.VERIFIER, self.counts[MemberRole.VERIFIER]),
            self.autoscale.max_members(MemberRole.DRAFTER, self.counts[MemberRole.DRAFTER])
            if self.counts[1]
            else 0,
        )

    @property
    def members(self) -> tuple[FleetMember, ...]:
        """Actors at the start."""
        return members_of(*self.counts)

    @property
    def cells(self) -> tuple[MemberGroup, ...]:
        """Groups of actors that are placed together."""
        return cells_of(*self.counts)

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each of `roles`, cpu or cuda."""
        verifier = self.device or (CUDA if self.gpus_per_actor else CPU)
        looks_up = self.drafter_methods == (DraftMethod.NGRAM,)
        drafter = self.drafter_device or (CPU if looks_up else verifier)
        return (verifier, drafter)[: len(self.roles)]

    @property
    def actor_threads(self) -> int:
        """Compute threads of each actor; 0 leaves torch's own choice."""
        return self.threads or int(self.cpus_per_actor)

    @property
    def ray(self) -> RayConfig:
        """Settings of the transport."""
        return RayConfig(
            namespace=self.namespace,
            exchange=self.exchange,
            # A local Ray is for this machine alone.
            listen_host="" if self.ray_address else LOCAL_HOST,
            start_timeout_s=self.start_timeout_s,
        )

    @property
    def ray_strategy(self) -> str:
        """Name of the placement strategy in Ray's API."""
        return self.strategy.replace("-", "_").upper()

    def torch_device(self, role: MemberRole) -> str:
        """torch device of an actor; Ray shows each actor only the GPUs that it reserved."""
        return CPU if self.devices[role] == CPU else "cuda:0"

    def gpus_of(self, role: MemberRole) -> float:
        """Number of GPUs that Ray reserves for an actor, one by default."""
        if self.devices[role] == CPU:
            return 0.0
        return 1.0 if self.gpus_per_actor is None else self.gpus_per_actor

    def resource_of(self, role: MemberRole) -> str:
        """Ray custom resource that places an actor; "" if there is none."""
        return (self.verifier_resource, self.drafter_resource)[role]

    @property
    def exchange_mode(self) -> str:
        """`device_exchange` of verifiers and drafters; off without shared-memory channels, which it
        needs."""
        return self.device_exchange if self.exchange == GRPC else OFF

    @property
    def verifier_memory_fraction(self) -> float | None:
        """Fraction of a GPU's memory that a verifier may use; None takes the verifier's default."""
        shares = self.devices.count(CUDA) > 1 and self.gpus_of(MemberRole.VERIFIER) < 1.0
        if self.memory_fraction is None and shares:
            return SHARED_MEMORY_FRACTION
        return self.memory_fraction


def verifier_config(config: RayFleetConfig, index: int = 0) -> VerifierConfig:
    """Configuration of the verifier with this index. Raises InvalidRequestError."""
    uses_head = bool(HEAD_METHODS & set(config.drafting))
    return load_config(
        VerifierConfig,
        overrides={
            **config.verifier,
            "model": _portable(config.model),
            "verifier_id": FleetMember(MemberRole.VERIFIER, index).name,
            "feature_head": _portable(config.head) if uses_head else None,
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
    """Configuration of the drafter with this index; None without drafters. Raises
    InvalidRequestError."""
    methods = config.drafter_methods
    if not methods:
        return None
    uses_head = bool(HEAD_METHODS & set(methods))
    uses_model = DraftMethod.MODEL in methods
    device = config.torch_device(MemberRole.DRAFTER)
    return load_config(
        DrafterConfig,
        overrides={
            **config.drafter,
            "model": _portable(config.model),
            "head": _portable(config.head) if uses_head else None,
            "draft_model": _portable(config.draft_model) if uses_model else None,
            "methods": methods,
            "dtype": config.dtype,
            "device": device,
            "shared_memory": config.exchange == GRPC,
            "device_exchange": config.exchange_mode,
            "cuda_graphs": config.cuda_graphs,
            "threads": config.actor_threads,
            # One that computes on cores needs them for itself.
            "busy_polling_cores": config.busy_polling_cores if device != CPU else 0,
            "drafter_id": FleetMember(MemberRole.DRAFTER, index).name,
            "log_level": config.log_level,
        },
    )


def router_config(config: RayFleetConfig, model: Path) -> RouterConfig:
    """Configuration of the router, which reads the tokenizer of `model`. Raises
    InvalidRequestError."""
    return load_config(
        RouterConfig,
        overrides={
            **config.router,
            "listen": config.listen,
            "http": config.http,
            "model": model,
            "model_name": config.model_name,
            "verifiers": tuple(m.name for m in config.members if m.role is MemberRole.VERIFIER),
            "drafters": tuple(m.name for m in config.members if m.role is MemberRole.DRAFTER),
            "queue_limit": config.queue_limit,
            "journal": config.journal,
            "speculation.method": default_method(config.drafting),
            "speculation.look_ahead": config.look_ahead,
            "speculation.fan_out": config.fan_out,
            "metrics_port": config.metrics_port,
            "drain_timeout_s": config.drain_timeout_s,
            "log_level": config.log_level,
        },
    )


def _portable(name_or_path: str) -> str:
    """A path that does not depend on this process's directory; names stay names."""
    path = Path(name_or_path).expanduser()
    return str(path.resolve()) if name_or_path and path.exists() else name_or_path
