"""Configuration of a local fleet: router, verifiers and drafters on this machine.

Each of them is a process that is started with command-line flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import InvalidRequestError
from outrider.spec.exchange_mode import AUTO, EXCHANGE_MODES
from outrider.spec.plan import DraftMethod

CPU, CUDA = DEVICES = ("cpu", "cuda")
SEPARATE, COLOCATED, FUSED = PLACEMENTS = ("separate", "colocated", "fused")
SHARED_MEMORY_FRACTION = 0.7
"""Fraction of a GPU's memory for a verifier that shares the GPU with a drafter."""
MAX_ROUTERS = 8
"""Maximum number of routers at one address. A client that lost its connection finds its router by
trying a bounded number of times, which fails more often the more routers there are."""
DRAIN_S = 30.0
HEALTH_TIMEOUT_S = 10.0
"""Time without an answer to health checks after which a process is killed and restarted."""
HEAD_METHODS = frozenset({DraftMethod.EAGLE3, DraftMethod.EAGLE})


def default_dtype(device: str) -> str:
    """Return the data type of models on a device (cpu or cuda) if none is given."""
    return "float32" if device == CPU else "bfloat16"


def split_address(address: str) -> tuple[str, str]:
    """Split HOST:PORT into the host, without the brackets of an IPv6 address, and the port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFleetConfig:
    """Configuration of the processes of a local fleet."""

    model: Path
    """Directory of the target model."""
    model_name: str = ""
    """Model name that clients send; "" takes the directory's name."""
    max_model_len: int | None = None
    """Largest number of prompt and output tokens together; None takes the model's limit."""
    gpu_memory_utilization: float | None = None
    """Fraction of a GPU's memory that each verifier may use; None takes its default, or less if a
    drafter shares its GPU."""
    log_level: str | None = None
    """Log level of all processes; None takes their default."""
    methods: tuple[DraftMethod, ...] = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
    """Draft methods; an empty tuple starts no drafter."""
    head: Path | None = None
    """Directory of the EAGLE draft head, which the methods eagle3 and eagle need."""
    draft_model: Path | None = None
    """Directory of the draft model, which the method model needs."""
    verifiers: int = 1
    """Number of verifier processes, each on its own GPU if there are enough."""
    drafters: int = 1
    """Number of drafter processes, each on its own GPU if there are enough. Every drafter drafts
    for every verifier; none is started if no draft method needs one."""
    routers: int = 1
    """Number of router processes, all at the same address; a connection stays with one of them."""
    dtype: str = ""
    """Data type of the models; "" takes float32 on a CPU and bfloat16 on a GPU."""
    device: str = "cpu"
    """Device on which the target and draft models compute: cpu or cuda."""
    drafter_device: str = ""
    """torch device of the drafters; "" takes separate GPUs if there are enough."""
    placement: str = SEPARATE
    """Process in which the draft head runs: separate (the drafter), colocated or fused (the
    verifier)."""
    device_exchange: str = AUTO
    """Whether a verifier and a separate drafter with an EAGLE-3 head exchange drafts and features
    directly between their GPUs: on, off, or auto, which is on if each has its own GPU. Pairs that
    cannot do so exchange messages."""
    draft_length: int | None = None
    """Draft tokens per round of a head in the verifier, or of a drafter with device exchange; None
    takes the verifier's default."""
    draft_top_k: int | None = None
    """Branching factor of the draft tree of a head in the verifier; None takes the verifier's
    default."""
    planner: str | None = None
    """Whether the verifier adapts speculation to measurements (automatic) or carries out what
    requests ask for (fixed); None takes its default, automatic."""
    look_ahead: int | None = None
    """Look-ahead of requests that do not set it: 0 never drafts before the verdict, 1 does so if
    the planner expects a gain; None takes the router's default."""
    fan_out: int | None = None
    """Outcomes drafted ahead for requests that do not set it; None takes the router's default."""
    cuda_graphs: bool = True
    """Whether GPUs replay rounds from CUDA graphs."""
    batch_invariant: bool = False
    """Whether verifiers compute the same bits for a token whatever runs beside it."""
    simulated_acceptance: str = ""
    """Benchmark only: accept drafts at random, as the verifier's key of this name describes."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the routers; port 0 takes a free one."""
    http: str | None = None
    """HOST:PORT of the router's HTTP API; port 0 takes a free one, None disables it."""
    prefix_cache: bool = True
    """Whether verifiers keep the KV cache of prompts for other requests with the same prefix."""
    kv_tokens: int | None = None
    """KV cache size of each verifier in tokens; None takes its default, which is the free memory on
    a GPU."""
    max_sessions: int | None = None
    """Largest number of sessions that each verifier runs at once; None takes the verifier's
    default."""
    queue_limit: int | None = None
    """Largest number of queued requests; None takes the router's default."""
    drain_timeout_s: float = DRAIN_S
    """Time that running requests get to finish when the fleet stops, in seconds."""
    health_timeout_s: float = HEALTH_TIMEOUT_S
    """Time without an answer to health checks after which a process is killed and restarted, in
    seconds; 0 disables the check."""
    journal: Path | None = None
    """Log file from which a restarted router restores resumable requests; None disables it."""
    slow_reader_timeout_s: float | None = None
    """Time after which the router disconnects a client that does not read, in seconds; None takes
    the router's default."""
    threads: int | None = None
    """Compute threads of each verifier and drafter; None takes their default."""
    busy_polling_cores: int | None = None
    """CPU cores that each verifier and drafter keeps busy-polling to reduce wake-up latency; for
    GPUs only."""
    verifier_hooks: tuple[str, ...] = ()
    """Python modules to load into each verifier, as the verifier's key `hooks` describes."""
    drafter_hooks: tuple[str, ...] = ()
    """Python modules to load into each drafter, as the drafter's key `hooks` describes."""
    trace_dir: Path | None = None
    """Directory into which verifiers and drafters write their timelines when they end; None writes
    none."""
    metrics_port: int | None = None
    """Prometheus port of the router; further routers use the next ports. None disables it."""
    metrics_compat: str | None = None
    """Server under whose metric names the router's metrics are exported too; None for none."""
    tls_dir: Path | None = None
    """Directory of certificates that `outrider certs` created; None uses plain text."""
    api_keys: Path | None = None
    """API key file; clients must send one of its keys. None requires no keys."""
    log_dir: Path | None = None
    """Directory of the processes' logs; None takes a temporary one that is removed at the end."""
    inherit_logs: bool = False
    """Whether the processes log to this process's stderr instead of files."""

    def __post_init__(self) -> None:
        if self.device_exchange not in EXCHANGE_MODES:
            raise InvalidRequestError(
                f"device_exchange must be one of {', '.join(EXCHANGE_MODES)}, got "
                f"{self.device_exchange!r}",
                reason="INVALID_DEVICE_EXCHANGE",
            )
        if min(self.verifiers, self.drafters) < 1:
            raise InvalidRequestError(
                f"verifiers and drafters must be at least 1, got {self.verifiers} and "
                f"{self.drafters}",
                reason="INVALID_COUNT",
            )
        self._check_routers()
        self._check_front()
        if self.device not in DEVICES:
            raise InvalidRequestError(
                f"device must be cpu or cuda, got {self.device!r}", reason="INVALID_DEVICE"
            )
        if self.gpu_memory_utilization is not None and self.device == CPU:
            raise InvalidRequestError(
                "--gpu-memory-utilization needs --device cuda; on a CPU, --kv-tokens sets the KV "
                "cache size",
                reason="INVALID_DEVICE",
            )
        if self.placement not in PLACEMENTS:
            raise InvalidRequestError(
                f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}",
                reason="INVALID_PLACEMENT",
            )
        if self.placement != SEPARATE and DraftMethod.EAGLE3 not in self.methods:
            raise InvalidRequestError(
                f"placement {self.placement} needs the draft method eagle3",
                reason="INVALID_PLACEMENT",
            )
        if HEAD_METHODS & set(self.methods) and self.head is None:
            raise InvalidRequestError(
                "the draft methods eagle3 and eagle need a draft head: no head ships for this "
                "model, so give --head DIR",
                reason="NO_HEAD",
            )
        if DraftMethod.MODEL in self.methods and self.draft_model is None:
            raise InvalidRequestError(
                "the draft method model needs --draft-model", reason="NO_DRAFT_MODEL"
            )

    def _check_front(self) -> None:
        for name, address in (("listen", self.listen), ("http", self.http)):
            host, port = split_address(address or "localhost:0")
            if not (host and port.isdecimal() and int(port) < 1 << 16):
                raise InvalidRequestError(
                    f"{name} must be HOST:PORT, got {address!r}", reason="INVALID_ADDRESS"
                )
        host, port = split_address(self.listen)
        if self.http is not None and port != "0" and split_address(self.http) == (host, port):
            raise InvalidRequestError(
                f"http and listen must be different addresses, both are {self.listen}",
                reason="INVALID_ADDRESS",
            )
        if self.api_keys is not None and not self.api_keys.is_file():
            raise InvalidRequestError(
                f"API key file {self.api_keys} does not exist", reason="NO_KEYS_FILE"
            )

    def _check_routers(self) -> None:
        if not 1 <= self.routers <= MAX_ROUTERS:
            raise InvalidRequestError(
                f"routers must be at least 1 and at most {MAX_ROUTERS}, got {self.routers}",
                reason="INVALID_COUNT",
            )
        if self.routers == 1:
            return
        if self.journal is not None:
            raise InvalidRequestError(
                "a journal needs a single router: with several, a client that resumes a stream may "
                "reach another router",
                reason="INVALID_COUNT",
            )
        if self.http is not None and self.http.endswith(":0"):
            raise InvalidRequestError(
                "several routers need a fixed HTTP port; port 0 is allowed for one router only",
                reason="INVALID_COUNT",
            )

    @property
    def element_type(self) -> str:
        """Data type of the models."""
        return self.dtype or default_dtype(self.device)

    @property
    def uses_gpus(self) -> bool:
        """Whether a process computes on a GPU of this machine."""
        return CUDA in (self.device, self.drafter_device.partition(":")[0])

    @property
    def drafter_methods(self) -> tuple[DraftMethod, ...]:
        """Draft methods that drafter processes offer; empty if no drafter is started."""
        if self.placement == SEPARATE:
            return self.methods
        return tuple(method for method in self.methods if method not in HEAD_METHODS)
