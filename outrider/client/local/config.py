"""Configuration of a local fleet: router, verifiers and drafters on this machine.

Each is a process that is started with command-line flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import InvalidRequestError
from outrider.spec.exchange_mode import AUTO, EXCHANGE_MODES
from outrider.spec.plan import DraftMethod, default_method

CPU, CUDA = DEVICES = ("cpu", "cuda")
SEPARATE, COLOCATED, FUSED = PLACEMENTS = ("separate", "colocated", "fused")
SHARED_MEMORY_FRACTION = 0.7
"""Share of a GPU's memory for a verifier that a drafter computes beside."""
MAX_ROUTERS = 8
"""At one address: a client whose connection broke finds its router again by trying."""
DRAIN_S = 30.0
HEALTH_TIMEOUT_S = 10.0
"""Time without an answer to health checks after which a process is killed and restarted."""
HEAD_METHODS = frozenset({DraftMethod.EAGLE3, DraftMethod.EAGLE})


def default_dtype(device: str) -> str:
    """Element type of models on a device, where none is said."""
    return "float32" if device == CPU else "bfloat16"


def split_address(address: str) -> tuple[str, str]:
    """Host, without the brackets of an IPv6 address, and port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFleetConfig:
    """Configuration of the processes of a local fleet."""

    model: Path
    """Directory of the target."""
    model_name: str = ""
    """Name that clients ask for; "" takes the directory's."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the model's own limit."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that each verifier may use; None takes its default, or less where a
    drafter is on its GPU."""
    log_level: str | None = None
    """Level of the logs of all processes; None takes their default."""
    methods: tuple[DraftMethod, ...] = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
    """Draft sources; none at all starts no drafter."""
    head: Path | None = None
    """Directory of the EAGLE head; needed by eagle3 and eagle."""
    draft_model: Path | None = None
    """Directory of the small model; needed by model."""
    verifiers: int = 1
    drafters: int = 1
    """Processes of either kind, each on a GPU of its own where there are as many; every drafter
    drafts for every verifier. Without a method that needs one there is no drafter."""
    routers: int = 1
    """Processes that clients ask, all at the same address; a connection stays with one of them."""
    dtype: str = ""
    """Element type of the models; "" takes float32 on a CPU, bfloat16 on a GPU."""
    device: str = "cpu"
    """cpu or cuda: where target and draft models compute."""
    drafter_device: str = ""
    """torch device of the drafters; "" takes GPUs of their own where there are enough."""
    placement: str = SEPARATE
    """Where the head drafts: separate (in the drafter), colocated or fused (in the verifier)."""
    device_exchange: str = AUTO
    """Whether a verifier and a separate drafter with an EAGLE-3 head exchange drafts and features
    between their devices: on, off, or auto, which is on where each has a GPU of its own. Where they
    cannot, they use messages."""
    draft_length: int | None = None
    """Draft tokens a round of a head in the verifier, or of a drafter by device_exchange; None
    takes the verifier's default."""
    draft_top_k: int | None = None
    """Children that a head in the verifier tries of a node; None takes its default."""
    planner: str | None = None
    """automatic, where the verifier decides whether and how far sessions speculate, or fixed, where
    it does what they ask for; None takes its default, automatic."""
    look_ahead: int | None = None
    """Of requests that leave it open: 0 drafts in lock-step, 1 is the planner's choice; None takes
    the router's default."""
    fan_out: int | None = None
    """Outcomes drafted ahead a round, of requests that leave them open; None as above."""
    cuda_graphs: bool = True
    simulated_acceptance: str = ""
    """Benchmarks with random weights only: see the verifier's option of this name."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the routers; port 0 takes a free one."""
    http: str | None = None
    """HOST:PORT of the router's HTTP API; port 0 takes a free one, None serves none."""
    prefix_cache: bool = True
    """Whether verifiers keep what others may begin with."""
    kv_tokens: int | None = None
    """KV budget of each verifier; None takes its default, which on a GPU is what there is."""
    max_sessions: int | None = None
    queue_limit: int | None = None
    drain_timeout_s: float = DRAIN_S
    """Time that running requests get to end when all is to stop."""
    health_timeout_s: float = HEALTH_TIMEOUT_S
    """Time without an answer to its health checks after which a supervised process is killed and
    restarted, in seconds; 0 never does."""
    journal: Path | None = None
    """Log by which resumable requests survive a restart of the router; None keeps none."""
    slow_reader_timeout_s: float | None = None
    """Time after which the router gives up a client that does not read; None takes its default."""
    threads: int | None = None
    """Threads of verifier and drafter each; None takes torch's choice."""
    busy_polling_cores: int | None = None
    """Cores that verifier and drafter each keep from going idle while they serve; GPUs only."""
    verifier_hooks: tuple[str, ...] = ()
    drafter_hooks: tuple[str, ...] = ()
    """Code of the operator's own that runs in each process of the kind: see its option `hooks`."""
    trace_dir: Path | None = None
    """Where verifier and drafter leave their timelines when they end; None: they keep none."""
    metrics_port: int | None = None
    """Prometheus port of the router, the next ones of further routers; None serves none."""
    metrics_compat: str | None = None
    """See the router's option of this name."""
    tls_dir: Path | None = None
    """Certificates that `outrider certs` made; None: all connections are plain text."""
    api_keys: Path | None = None
    """File of the API keys that clients must have; None asks for none."""
    log_dir: Path | None = None
    """Where the processes' logs go; None takes a folder that is removed at the end."""
    inherit_logs: bool = False
    """Let the processes log to our stderr instead."""

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
        """Element type of the models."""
        return self.dtype or default_dtype(self.device)

    @property
    def uses_gpus(self) -> bool:
        """Whether a process computes on a GPU of this machine."""
        return CUDA in (self.device, self.drafter_device.partition(":")[0])

    @property
    def default_method(self) -> DraftMethod | None:
        """Draft source of requests that name none; None leaves it to the router."""
        return default_method(self.methods)

    @property
    def drafter_methods(self) -> tuple[DraftMethod, ...]:
        """What drafter processes offer; none at all: there is no such process."""
        if self.placement == SEPARATE:
            return self.methods
        return tuple(method for method in self.methods if method not in HEAD_METHODS)
