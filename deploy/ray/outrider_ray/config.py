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
    """The target: a directory, or a model's name that every node resolves for itself."""
    model_name: str = ""
    """Name that clients ask for; "" takes the verifier's."""
    head: str = ""
    """Directory of an EAGLE head; needed by the methods eagle3 and eagle."""
    verifiers: int = 1
    """Verifiers of the fleet."""
    drafters: int = 1
    """Drafters of the fleet; none are started where nothing is drafted in drafters."""
    draft_model: str = ""
    """A small model (directory or name); needed by the method model."""
    methods: tuple[DraftMethod, ...] | None = None
    """Ways of drafting; `none` starts no drafter; None takes all that `head` allows."""
    dtype: str = "float32"
    """Element type of target and draft models."""
    device: Annotated[str, OneOf(("", *DEVICES))] = ""
    """cpu or cuda: where the models compute; "" takes cuda where `gpus_per_actor` is given."""
    drafter_device: Annotated[str, OneOf(("", *DEVICES))] = ""
    """The same for the drafter alone; "" takes `device`, or cpu if n-grams are all it drafts."""
    memory_fraction: float | None = None
    """Share of its GPU's memory that the verifier may use; None takes 0.7 where the drafter may
    have the same GPU, else the verifier's default."""
    placement: str = SEPARATE
    """Where the head drafts: separate (in the drafter), colocated or fused (in the verifier)."""
    device_exchange: Annotated[str, OneOf(EXCHANGE_MODES)] = AUTO
    """Whether verifiers and drafters of one node exchange drafts and features between their GPUs:
    on, off, or auto, which is on where both compute on GPUs and `exchange` is grpc. Where two
    cannot, they exchange by messages."""
    draft_length: int | None = None
    """Draft tokens a round of a head in the verifier, or of a drafter by device_exchange; None
    takes the verifier's default."""
    draft_top_k: int | None = None
    """Children that such a head tries of a node; None takes its default."""
    planner: str | None = None
    """Who decides whether drafts pay, automatic or fixed; None takes the verifier's default."""
    look_ahead: int | None = None
    """Of requests that leave it open: 0 drafts in lock-step, 1 is the planner's choice; None takes
    the router's default."""
    fan_out: int | None = None
    """Outcomes drafted ahead a round, of requests that leave them open; None as above."""
    prefix_cache: bool = True
    """Whether verifiers keep what others may begin with."""
    cuda_graphs: bool = True
    """Whether GPUs replay rounds from CUDA graphs."""
    simulated_acceptance: str = ""
    """Benchmarks with random weights only: see the verifier's option of this name."""
    listen: str = "127.0.0.1:50050"
    """HOST:PORT of the client API; port 0 takes a free one."""
    http: str = ""
    """HOST:PORT of OpenAI's API over HTTP; port 0 takes a free one, "" serves none."""
    kv_tokens: int | None = None
    """KV budget of the verifier; None takes its default."""
    max_sessions: int | None = None
    """Sessions served at once; None takes the verifier's default."""
    queue_limit: int | None = None
    """Requests that may wait; None takes the router's default."""
    journal: Path | None = None
    """Log by which resumable requests survive a restart of the router; None keeps none."""
    threads: int = 0
    """Compute threads of each actor; 0 takes `cpus_per_actor`, or torch's choice without one."""
    busy_polling_cores: int = 0
    """Cores that each actor keeps from going idle while it serves; with GPUs only."""
    metrics_port: int = -1
    """Port of the router's Prometheus endpoint; 0 takes a free one, -1 serves none."""
    exchange: Annotated[str, OneOf(EXCHANGES)] = GRPC
    """How rounds and sessions travel: grpc, from process to process and by shared-memory channels
    within a node; or refs, as actor calls with object refs for large messages, and no
    shared-memory channels."""
    ray_address: str = ""
    """Cluster to join: HOST:PORT of its head, or auto; "" starts a local one."""
    namespace: str = "outrider"
    """Ray namespace of the actors' names; one launcher a namespace."""
    detached: bool = False
    """Whether the fleet outlives the launcher: a supervisor actor keeps it and serves clients."""
    cpus_per_actor: float = 0.0
    """CPUs that Ray reserves for each actor."""
    gpus_per_actor: float | None = None
    """GPUs that Ray reserves for each actor on cuda, which computes on its first one; None takes
    one, or an equal share where there are fewer GPUs than actors."""
    strategy: Annotated[str, OneOf(STRATEGIES)] = PACK
    """How Ray places the actors of a cell, a verifier and the drafters next to it: pack, spread,
    strict-pack or strict-spread."""
    verifier_resource: str = ""
    """Custom resource of which a verifier takes one; places it on nodes that offer it."""
    drafter_resource: str = ""
    """The same for a drafter."""
    start_timeout_s: float = 600.0
    """How long an actor may take to be placed and to load its model."""
    drain_timeout_s: float = 5.0
    """Time that running requests get after SIGTERM."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Least severe level that is logged."""
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    """When there are more verifiers and drafters than those, and how many at most."""
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
        """The ways of drafting; empty without a drafter."""
        if self.methods is None:
            own = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
            return own if self.head else (DraftMethod.NGRAM,)
        return tuple(method for method in self.methods if method is not DraftMethod.NONE)

    @property
    def drafter_methods(self) -> tuple[DraftMethod, ...]:
        """What the drafter offers; empty: there is none."""
        if self.placement == SEPARATE:
            return self.drafting
        return tuple(method for method in self.drafting if method not in HEAD_METHODS)

    @property
    def roles(self) -> tuple[MemberRole, ...]:
        """The actors that there are."""
        return (
            (MemberRole.VERIFIER, MemberRole.DRAFTER)
            if self.drafter_methods
            else (MemberRole.VERIFIER,)
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Verifiers and drafters at the start, which are the least there are."""
        return self.verifiers, self.drafters if self.drafter_methods else 0

    @property
    def max_of(self) -> tuple[int, int]:
        """Verifiers and drafters that there may come to be."""
        return (
            self.autoscale.max_members(MemberRole.VERIFIER, self.counts[MemberRole.VERIFIER]),
            self.autoscale.max_members(MemberRole.DRAFTER, self.counts[MemberRole.DRAFTER])
            if self.counts[1]
            else 0,
        )

    @property
    def members(self) -> tuple[FleetMember, ...]:
        """The actors at the start."""
        return members_of(*self.counts)

    @property
    def cells(self) -> tuple[MemberGroup, ...]:
        """Which of them are placed together."""
        return cells_of(*self.counts)

    @property
    def devices(self) -> tuple[str, ...]:
        """cpu or cuda, of each of `roles`."""
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
        """The strategy by Ray's own name."""
        return self.strategy.replace("-", "_").upper()

    def torch_device(self, role: MemberRole) -> str:
        """torch device of an actor: Ray shows each only the GPUs that it reserved."""
        return CPU if self.devices[role] == CPU else "cuda:0"

    def gpus_of(self, role: MemberRole) -> float:
        """GPUs that Ray reserves for an actor; without a number that was given, one."""
        if self.devices[role] == CPU:
            return 0.0
        return 1.0 if self.gpus_per_actor is None else self.gpus_per_actor

    def resource_of(self, role: MemberRole) -> str:
        """Custom resource that places an actor, "" if there is none."""
        return (self.verifier_resource, self.drafter_resource)[role]

    @property
    def exchange_mode(self) -> str:
        """`device_exchange` of verifiers and drafters, whose memory passes by the shared-memory
        channel."""
        return self.device_exchange if self.exchange == GRPC else OFF

    @property
    def verifier_memory_fraction(self) -> float | None:
        """Share of a GPU's memory for the verifier; None leaves it its default."""
        shares = self.devices.count(CUDA) > 1 and self.gpus_of(MemberRole.VERIFIER) < 1.0
        if self.memory_fraction is None and shares:
            return SHARED_MEMORY_FRACTION
        return self.memory_fraction


def verifier_config(config: RayFleetConfig, index: int = 0) -> VerifierConfig:
    """Configuration of the verifier with this number. Raises InvalidRequestError."""
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
    """Configuration of the drafter with this number; None without any. InvalidRequestError."""
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
    """Configuration of the router, which reads the tokenizer of `model`."""
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
