"""Services of one placement: they are started, or those behind a running router are used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.client import Client, OutriderError, RetryPolicy, ServerInfo
from outrider.client.local.cluster import LocalCluster
from outrider.client.local.config import CPU, CUDA, HEAD_METHODS, SEPARATE, LocalFleetConfig
from outrider.client.local.model_files import ModelFiles
from outrider.client.local.process_flags import count_gpus
from outrider.spec.exchange_mode import AUTO, ON
from outrider.spec.plan import DraftMethod
from outrider.transport.grpc import GrpcDialer
from outrider.wire.messages import VerifierInfo
from outrider_bench.faults.repair import wait_serving
from outrider_bench.report import print_progress
from outrider_bench.serve.cells import (
    IN_PROCESS_PLACEMENTS,
    NO_HANDICAP,
    PLAIN,
    DrafterHandicap,
    DraftSetting,
)

SPARE_SESSIONS = 2
"""Number of additional sessions that the KV cache has space for, because a session that has just
ended may still hold its blocks."""
PROMPT_TOKENS = 512
"""Number of prompt tokens of a session that the KV cache size on a CPU is computed for."""
SLACK_TOKENS = 96
QUEUE = 4096
"""Queue limit of the router. It is so large that requests of an open loop above capacity wait
instead of failing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceMachine:
    """Settings of the services that are the same for all placements."""

    files: ModelFiles
    device: str
    dtype: str = ""
    draft_model: Path | None = None
    sessions: int = 64
    max_tokens: int = 256
    threads: int | None = None
    planner: str | None = None
    """"automatic" or "fixed". With None it is the default, "automatic"."""
    verifiers: int = 1
    drafters: int = 1
    """Number of drafters. Each verifier and drafter has a GPU of its own if there are enough
    GPUs."""
    routers: int = 1
    prefix_cache: bool = True
    device_exchange: str = AUTO
    """Whether verifiers and drafters use the device exchange; see `LocalFleetConfig`."""
    batch_invariant: bool = False
    log_dir: Path | None = None
    trace_dir: Path | None = None
    round_ms: float = 0.0
    row_us: float = 0.0
    """Microseconds that each further token row adds to a round, if `round_ms` is not 0. A round of
    one token row lasts `round_ms` milliseconds; see `outrider_bench.hooks.round_delay`."""

    @property
    def exchanges_on_device(self) -> bool:
        """Whether verifiers and drafters use the device exchange."""
        if self.device_exchange == AUTO:
            return self.device == CUDA and count_gpus() >= self.verifiers + self.drafters
        return self.device_exchange == ON

    @property
    def name(self) -> str:
        """Name of the model in the results. It states whether rounds are artificially prolonged."""
        if not self.round_ms:
            return self.files.name
        return f"{self.files.name}, rounds EMULATED: {self.round_ms:g} ms + {self.row_us:g} us/row"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchService:
    """Services that are started together for one placement, and the drafts that are measured with
    them."""

    placement: str
    drafts: tuple[DraftSetting, ...]
    busy_polling_cores: int = 0
    handicap: DrafterHandicap = NO_HANDICAP

    @property
    def has_drafters(self) -> bool:
        """Whether drafter processes are started."""
        methods = {draft.method for draft in self.drafts} - {DraftMethod.NONE}
        own = HEAD_METHODS if self.placement in IN_PROCESS_PLACEMENTS else frozenset()
        return bool(methods - own)


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """Address of the router of running services, and the state of their processes."""

    address: str
    info: ServerInfo

    def verifiers(self) -> list[VerifierInfo]:
        """Return the state that each verifier reports; an empty list if one of them does not
        answer."""
        try:
            return [asyncio.run(_info(v.address)) for v in self.info.verifiers]
        except (OutriderError, OSError):
            return []


def mean_of(values: Iterable[float]) -> float | None:
    """Return the mean of the positive values; None if no value is positive."""
    known = [value for value in values if value > 0.0]
    return sum(known) / len(known) if known else None


def plan_services(
    placements: Sequence[str],
    drafts: Sequence[DraftSetting],
    busy_cores: dict[str, int],
    handicaps: Sequence[DrafterHandicap] = (NO_HANDICAP,),
) -> list[BenchService]:
    """Return the services to start, plain decoding first.

    A head in the verifier drafts only in the shape with which it was started, so services are
    started for each shape. Drafts by other methods are measured with the services for the first
    shape. Services with separate drafters are started for each handicap.
    """
    services = []
    for placement in placements:
        cores = busy_cores.get(placement, 0)
        if placement == PLAIN:
            services.append(
                BenchService(placement=PLAIN, drafts=(DraftSetting(),), busy_polling_cores=cores)
            )
            continue
        groups: dict[tuple[int, int] | None, list[DraftSetting]] = {}
        others = []
        for draft in drafts_at(placement, drafts):
            shape = in_process_shape(draft)
            if placement in IN_PROCESS_PLACEMENTS and shape is not None:
                groups.setdefault(shape, []).append(draft)
            else:
                others.append(draft)
        if others:
            groups.setdefault(next(iter(groups), None), []).extend(others)
        services += [
            BenchService(
                placement=placement,
                drafts=tuple(group),
                busy_polling_cores=cores,
                handicap=handicap,
            )
            for group in groups.values()
            for handicap in (handicaps if placement == SEPARATE else (NO_HANDICAP,))
        ]
    return services


def drafts_at(placement: str, drafts: Sequence[DraftSetting]) -> tuple[DraftSetting, ...]:
    """Return the distinct draft settings that are measured in this placement."""
    if placement not in IN_PROCESS_PLACEMENTS:
        return tuple(drafts)
    within = (draft.within() if in_process_shape(draft) is not None else draft for draft in drafts)
    return tuple(dict.fromkeys(within))


def is_chain(draft: DraftSetting) -> bool:
    """Return whether an EAGLE head makes the drafts, and they are chains with a stated number of
    tokens."""
    shape = in_process_shape(draft)
    return shape is not None and shape[1] == 1


def in_process_shape(draft: DraftSetting) -> tuple[int, int] | None:
    """Return (draft tokens, children per node) if an EAGLE head makes the drafts and their number
    of tokens is stated; None for other drafts."""
    if draft.method is not DraftMethod.EAGLE3 or draft.tokens is None:
        return None
    return draft.tokens, draft.top_k or 1


def local_config(machine: ServiceMachine, service: BenchService) -> LocalFleetConfig:
    """Return the configuration of a service's processes."""
    files, own = machine.files, service.placement in IN_PROCESS_PLACEMENTS
    methods = {draft.method for draft in service.drafts} - {DraftMethod.NONE}
    if own:
        methods.add(DraftMethod.EAGLE3)
    each = PROMPT_TOKENS + machine.max_tokens + SLACK_TOKENS
    budget = (machine.sessions + SPARE_SESSIONS) * each
    shapes = [shape for shape in map(in_process_shape, service.drafts) if shape is not None]
    return LocalFleetConfig(
        model=files.path,
        model_name=files.name,
        methods=tuple(sorted(methods)),
        head=files.head if DraftMethod.EAGLE3 in methods else None,
        draft_model=machine.draft_model if DraftMethod.MODEL in methods else None,
        verifiers=machine.verifiers,
        drafters=machine.drafters,
        routers=machine.routers,
        prefix_cache=machine.prefix_cache,
        dtype=machine.dtype,
        device=machine.device,
        placement=service.placement if own else SEPARATE,
        device_exchange=machine.device_exchange,
        batch_invariant=machine.batch_invariant,
        draft_length=shapes[0][0] if (own or machine.exchanges_on_device) and shapes else None,
        draft_top_k=shapes[0][1] if own and shapes else None,
        kv_tokens=budget if machine.device == CPU else None,
        max_sessions=machine.sessions,
        queue_limit=QUEUE,
        threads=machine.threads,
        planner=machine.planner,
        busy_polling_cores=service.busy_polling_cores or None,
        verifier_hooks=verifier_hooks(machine),
        drafter_hooks=drafter_hooks(service.handicap),
        trace_dir=None if machine.trace_dir is None else machine.trace_dir / service_name(service),
        log_dir=None if machine.log_dir is None else machine.log_dir / service.placement,
    )


def verifier_hooks(machine: ServiceMachine) -> tuple[str, ...]:
    """Return the verifier hooks that prolong rounds; an empty tuple if rounds are not prolonged."""
    if not machine.round_ms:
        return ()
    options = f"round_ms={machine.round_ms},row_us={machine.row_us}"
    return (f"outrider_bench.hooks.round_delay:{options}",)


def drafter_hooks(handicap: DrafterHandicap) -> tuple[str, ...]:
    """Return the drafter hooks that slow down the drafter or its link."""
    hooks = []
    if handicap.exchange_delay_ms:
        hooks.append(f"outrider_bench.hooks.slow_link:delay_ms={handicap.exchange_delay_ms}")
    if handicap.drafter_slowdown != 1.0:
        hooks.append(f"outrider_bench.hooks.slow_proposer:factor={handicap.drafter_slowdown}")
    return tuple(hooks)


def service_name(service: BenchService) -> str:
    """Return the name of a service that its files have, such as fused-chain-3 or
    separate-chain-4+ahead-1ms-2x."""
    handicap = service.handicap
    parts = [service.placement, service.drafts[0].name]
    if handicap.exchange_delay_ms:
        parts.append(f"{handicap.exchange_delay_ms:g}ms")
    if handicap.drafter_slowdown != 1.0:
        parts.append(f"{handicap.drafter_slowdown:g}x")
    return "-".join(parts)


@contextmanager
def start_service(machine: ServiceMachine, service: BenchService) -> Iterator[RunningFleet]:
    """Start the processes of a service, yield them as a fleet, and stop them at the end. Raises
    UnavailableError."""
    with LocalCluster(local_config(machine, service), progress=print_progress) as cluster:
        wait_serving(cluster)
        yield connect_router(cluster.address)


def connect_router(address: str) -> RunningFleet:
    """Return the fleet behind a router. Raises UnavailableError if no router answers."""
    with Client(address, retry=RetryPolicy(max_attempts=1)) as client:
        return RunningFleet(address, client.server_info())


def placement_of(info: ServerInfo) -> str:
    """Return the placement that a router reports. For fused drafts it is colocated, because the
    router's report does not distinguish the two."""
    if any(verifier.in_process_methods for verifier in info.verifiers):
        return IN_PROCESS_PLACEMENTS[0]
    return SEPARATE if info.drafters else PLAIN


async def _info(address: str) -> VerifierInfo:
    dialer = GrpcDialer()
    try:
        return await (await dialer.verifier(address)).info()
    finally:
        await dialer.close()
