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
"""Fraction of a GPU's memory that a verifier may use if it shares the GPU with a drafter."""
MAX_ROUTERS = 8
"""Maximum number of routers at one address. A client that has lost its connection makes a limited
number of attempts to reach the same router, and with more routers these fail more often."""
DRAIN_S = 30.0
HEALTH_TIMEOUT_S = 10.0
"""Time, in seconds, without an answer to health probes after which a process is killed and
restarted."""
HEAD_METHODS = frozenset({DraftMethod.EAGLE3, DraftMethod.EAGLE})


def default_dtype(device: str) -> str:
    """Return the data type of models on `device` (cpu or cuda) for a fleet that sets none."""
    return "float32" if device == CPU else "bfloat16"


def split_address(address: str) -> tuple[str, str]:
    """Split HOST:PORT into host and port. The brackets of an IPv6 address are removed."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFleetConfig:
    """Configuration of the processes of a local fleet."""

    model: Path
    """Directory of the target model."""
    model_name: str = ""
    """Model name that clients send; "" stands for the name of the directory."""
    max_model_len: int | None = None
    """Maximum number of prompt and output tokens together; None stands for the model's limit."""
    gpu_memory_utilization: float | None = None
    """Fraction of a GPU's memory that each verifier may use. None stands for the verifier's
    default, or for less if the verifier shares its GPU with a drafter."""
    log_level: str | None = None
    """Log level of all processes; None stands for their default."""
    methods: tuple[DraftMethod, ...] = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
    """Draft methods that requests may use. If the tuple is empty, no drafter is started."""
    head: Path | None = None
    """Directory of the EAGLE draft head; required for the methods eagle3 and eagle."""
    draft_model: Path | None = None
    """Directory of the draft model; required for the method "model"."""
    verifiers: int = 1
    """Number of verifier processes. Each has its own GPU if there are enough."""
    drafters: int = 1
    """Number of drafter processes. Each has its own GPU if there are enough, and drafts for all
    verifiers. None is started if no draft method needs a drafter."""
    routers: int = 1
    """Number of router processes. All have the same address, and a client's connection stays with
    one of them."""
    dtype: str = ""
    """Data type of the models; "" stands for float32 on a CPU and bfloat16 on a GPU."""
    device: str = "cpu"
    """Type of the device on which target and draft models compute: cpu or cuda."""
    drafter_device: str = ""
    """torch device of the drafters; "" stands for GPUs of their own if there are enough."""
    placement: str = SEPARATE
    """Process in which the draft head runs: a drafter (separate) or the verifier (colocated or
    fused)."""
    device_exchange: str = AUTO
    """Whether verifiers and separate drafters with an EAGLE-3 head exchange drafts and features
    directly between their GPUs: on, off, or auto. The value auto means on if each has its own GPU.
    Pairs that cannot do so exchange messages."""
    draft_length: int | None = None
    """Maximum number of draft tokens in a round, for a head in the verifier or a drafter with
    device exchange; None stands for the verifier's default."""
    draft_top_k: int | None = None
    """Branching factor of the draft tree, for a head in the verifier; None stands for the
    verifier's default."""
    planner: str | None = None
    """Who decides about speculation: the verifier, from measurements (automatic), or the requests
    (fixed). None stands for the verifier's default, which is automatic."""
    look_ahead: int | None = None
    """Look-ahead of requests that do not set it. 0 never drafts before the verdict; 1 does so if
    the planner expects a gain; None stands for the router's default."""
    fan_out: int | None = None
    """Number of outcomes for which look-ahead makes drafts, for requests that do not set it; None
    stands for the router's default."""
    cuda_graphs: bool = True
    """Whether rounds on a GPU run as CUDA graphs."""
    batch_invariant: bool = False
    """Whether verifiers compute bitwise the same result for a token regardless of the other tokens
    in its batch."""
    simulated_acceptance: str = ""
    """Benchmark only: rates at which drafts are accepted at random, in the format of the verifier's
    setting of this name; "" for normal acceptance."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the routers; with port 0 a free port is chosen."""
    http: str | None = None
    """HOST:PORT of the router's HTTP API; with port 0 a free port is chosen. None disables the
    API."""
    prefix_cache: bool = True
    """Whether verifiers keep the KV of prompts for later requests with the same prefix."""
    kv_tokens: int | None = None
    """Size of each verifier's KV cache in tokens. None stands for the verifier's default, which on
    a GPU uses the free memory."""
    max_sessions: int | None = None
    """Maximum number of sessions that each verifier runs at the same time; None stands for the
    verifier's default."""
    queue_limit: int | None = None
    """Maximum number of queued requests; None stands for the router's default."""
    drain_timeout_s: float = DRAIN_S
    """Maximum time, in seconds, that running requests have to finish when the fleet stops."""
    health_timeout_s: float = HEALTH_TIMEOUT_S
    """Time, in seconds, without an answer to health probes after which a process is killed and
    restarted; 0 disables the probes."""
    journal: Path | None = None
    """Journal file from which a router that restarts continues resumable requests; None disables
    the journal."""
    slow_reader_timeout_s: float | None = None
    """Time, in seconds, after which the router disconnects a client that does not read; None stands
    for the router's default."""
    threads: int | None = None
    """Number of compute threads of each verifier and drafter; None stands for their default."""
    busy_polling_cores: int | None = None
    """Number of CPU cores that each verifier and drafter keeps busy-polling to reduce wake-up
    latency. Used only with GPUs; None stands for their default."""
    verifier_hooks: tuple[str, ...] = ()
    """Python modules that each verifier loads, as described at the verifier's setting `hooks`."""
    drafter_hooks: tuple[str, ...] = ()
    """Python modules that each drafter loads, as described at the drafter's setting `hooks`."""
    trace_dir: Path | None = None
    """Directory in which verifiers and drafters write their timelines when they end; None disables
    timelines."""
    metrics_port: int | None = None
    """Prometheus port of the first router; further routers use the next ports. None disables the
    metrics."""
    metrics_compat: str | None = None
    """Name of a server, such as vLLM, under whose metric names the router's metrics are exported in
    addition; None for none."""
    tool_call_parser: str | None = None
    """Format in which the model writes tool calls; None leaves the choice to the router's setting
    of this name."""
    reasoning_parser: str | None = None
    """Format in which the model writes its reasoning; None leaves the choice to the router's
    setting of this name."""
    tls_dir: Path | None = None
    """Directory of certificates that `outrider certs` created; None uses plain text."""
    api_keys: Path | None = None
    """API key file; clients must send one of its keys. None accepts clients without a key."""
    log_dir: Path | None = None
    """Directory of the processes' log files. None stands for a temporary directory, which is
    removed when the fleet stops."""
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
        if self.api_keys is not None and self.simulated_acceptance:
            raise InvalidRequestError(
                "simulated_acceptance is for benchmarks only and cannot be used with api_keys: the "
                "text would not be the model's",
                reason="SIMULATED_ACCEPTANCE",
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
        """Whether any process of the fleet computes on a GPU."""
        return CUDA in (self.device, self.drafter_device.partition(":")[0])

    @property
    def drafter_methods(self) -> tuple[DraftMethod, ...]:
        """Draft methods for which drafter processes draft; empty if no drafter is started."""
        if self.placement == SEPARATE:
            return self.methods
        return tuple(method for method in self.methods if method not in HEAD_METHODS)
