"""Verifier services for the benchmarks; all knowledge of the engine's construction is here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from outrider_drafter.config import DrafterConfig
from outrider_drafter.gpu.eagle import GpuEagleProposer
from outrider_drafter.proposers.eagle import EagleProposer
from outrider_drafter.server.service import DrafterService, TargetIdentity
from outrider_verifier.config import VerifierConfig
from outrider_verifier.server.service import VerifierService

from outrider.busy_polling import BusyCores
from outrider.engine.heads import FeatureProjection
from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.linear import PlainLinear
from outrider.engine.target import TargetModel
from outrider.errors import FailedPreconditionError, UnavailableError
from outrider.ids import DrafterId
from outrider.process_tuning import tune_process
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.in_process import InprocNetwork

PLAIN, FUSED, COLOCATED = "plain", "fused", "colocated"
INPROC, SEPARATE = "separate-inproc", "separate"
"""separate-inproc: a drafter service in this process, messages handed over as objects.
separate: a drafter process over gRPC, on a device of its own where there is one."""
PLACEMENTS: Final = (PLAIN, FUSED, COLOCATED, INPROC, SEPARATE)
IN_PROCESS_PLACEMENTS: Final = (FUSED, COLOCATED)

DRAFTER = DrafterId("bench-drafter")
_ADDRESS = "verifier:1"
_START_S = 120.0
_ATTACH_S = 60.0
_PROPOSAL_TIMEOUT_MS = 10_000
_MAX_TREE_NODES = 64


@dataclass(slots=True, kw_only=True)
class LoadedModels:
    """A target and its in-process drafter, and the location of the files for a drafter process."""

    name: str
    """Name in the results; it says whether the weights are random."""
    target: TargetModel
    head: Eagle3Head | None = None
    projection: FeatureProjection | None = None
    drafter_model: Path | None = None
    drafter_head: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetup:
    """Serving parameters of a benchmark."""

    placement: str = PLAIN
    draft_length: int = 3
    """Draft nodes of a round."""
    top_k: int = 1
    """Children of a node; more than one grows a tree, which needs a separate drafter."""
    max_sessions: int = 64
    max_tokens: int = 1024
    """Longest prompt + output."""
    cuda_graphs: bool = True
    simulated: str = ""
    """SIMULATED acceptance: see `VerifierConfig.simulated_acceptance`."""
    prefill_tokens: int = 2048
    drafter_device: str = ""
    """Device of a separate drafter; "" takes the next one, or the target's where it is alone."""
    record: bool = False
    """Whether device spans are recorded."""
    warm_buckets: bool = False
    """Whether the graphs of every number of sessions are captured at the start; otherwise those
    that a run does not meet in its first wave are captured within it."""
    busy_polling_cores: int = 0
    """Cores that verifier and drafter process each keep from going idle."""
    sampled: bool = False
    """Whether sessions of the rules with randomized acceptance will be served."""

    @property
    def plan(self) -> SpeculationPlan:
        """The plan of every session."""
        if self.placement == PLAIN:
            return SpeculationPlan()
        return SpeculationPlan(
            method=DraftMethod.EAGLE3,
            draft_tokens=self.draft_length,
            top_k=self.top_k,
            proposal_timeout_ms=_PROPOSAL_TIMEOUT_MS,
        )

    @property
    def drafter_id(self) -> DrafterId | None:
        """The drafter of every session; a head in the verifier's process needs none."""
        return DRAFTER if self.placement in (INPROC, SEPARATE) else None


@dataclass(slots=True, kw_only=True)
class RunningService:
    """A service that runs in this process."""

    service: VerifierService
    setup: ServingSetup
    models: LoadedModels
    runner: Any = None
    """The device engine; None where rounds run on the host's path."""
    recorder: Any = None
    drafter_device: str = ""
    cores: set[int] = field(default_factory=set)
    """CPU cores for other processes."""
    reports: list[Any] = field(default_factory=list)
    """Every round's `RoundReport`."""


@asynccontextmanager
async def serve_models(models: LoadedModels, setup: ServingSetup) -> AsyncIterator[RunningService]:
    """Serve with this placement; everything is torn down at the end."""
    config = verifier_config(models, setup)
    runner = recorder = None
    if uses_device_engine(models):
        runner, recorder = make_runner(models, setup, config)
    elif setup.placement in IN_PROCESS_PLACEMENTS:
        raise FailedPreconditionError(f"{setup.placement} needs plain weights", reason="PACKED")
    drafts = setup.placement != PLAIN
    busy_cores = BusyCores.claim(setup.busy_polling_cores if setup.placement == SEPARATE else 0)
    service = VerifierService(
        config,
        models.target,
        models.projection if drafts else None,
        runner=runner,
        pool=models.target.pool,
        max_context_len=models.target.config.max_position_embeddings,
        model_name=models.name,
        busy_cores=busy_cores,
    )
    running = RunningService(
        service=service, setup=setup, models=models, runner=runner, recorder=recorder
    )
    _collect_reports(service, running.reports)
    try:
        async with contextlib.AsyncExitStack() as stack:
            running.cores = stack.enter_context(_serving_process(busy_cores))
            service.start()
            if setup.placement == INPROC:
                await stack.enter_async_context(_inproc_drafter(running))
            elif setup.placement == SEPARATE:
                await stack.enter_async_context(_drafter_process(running))
            yield running
    finally:
        await service.stop()
        release_runner(runner)


@contextlib.contextmanager
def _serving_process(busy_cores: BusyCores) -> Iterator[set[int]]:
    """What a verifier process does to itself before it serves, undone at the end; the cores that
    its thread ran on before."""
    switch_interval = sys.getswitchinterval()
    cores = os.sched_getaffinity(0)
    tune_process()
    try:
        with busy_cores:
            busy_cores.adopt_thread()
            yield cores
    finally:
        os.sched_setaffinity(0, cores)
        gc.unfreeze()
        sys.setswitchinterval(switch_interval)


def uses_device_engine(models: LoadedModels) -> bool:
    """Return whether rounds run on the device path: it needs plain weights."""
    return isinstance(models.target.weights.lm_head, PlainLinear)


def verifier_config(models: LoadedModels, setup: ServingSetup) -> VerifierConfig:
    """Return the verifier's settings for a setup."""
    own = setup.placement in IN_PROCESS_PLACEMENTS
    return VerifierConfig(
        model=models.name,
        feature_head="loaded" if own else "",
        placement=setup.placement if own else "separate",
        draft_length=setup.draft_length if own else 3,
        simulated_acceptance=setup.simulated if own else "",
        cuda_graphs=setup.cuda_graphs,
        planner="fixed",
        dtype=str(models.target.dtype).removeprefix("torch."),
        device=str(models.target.device),
        kv_tokens=models.target.pool.total_blocks * models.target.pool.block_tokens,
        max_sessions=setup.max_sessions,
        max_context_len=setup.max_tokens,
        max_tree_nodes=_MAX_TREE_NODES,
        prefill_tokens_per_round=setup.prefill_tokens,
    )


def make_runner(
    models: LoadedModels, setup: ServingSetup, config: VerifierConfig
) -> tuple[Any, Any]:
    """Return the device engine for a setup, and its recorder."""
    from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner

    from outrider.engine.device.device_timeline import DeviceRecorder

    target = models.target
    recorder = DeviceRecorder(target.device, enabled=setup.record)
    projection = models.projection if setup.placement != PLAIN else None
    head = models.head if setup.placement in IN_PROCESS_PLACEMENTS else None
    runner = GpuModelRunner.build(config, target, projection, head, recorder=recorder)
    if setup.warm_buckets and setup.cuda_graphs and target.device.type == "cuda":
        runner.warm_up()
    return runner, recorder


def release_runner(runner: Any) -> None:
    """Give back what the device engine took from the target's pool, and its graphs' memory."""
    if runner is not None:
        runner.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def drafter_device(setup: ServingSetup, target: TargetModel) -> str:
    """Return the device of a separate drafter's head."""
    if setup.drafter_device:
        return setup.drafter_device
    if target.device.type != "cuda":
        return str(target.device)
    own = target.device.index or 0
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    return f"cuda:{others[0] if others else own}"


def _collect_reports(service: VerifierService, reports: list[Any]) -> None:
    observe = service.metrics.observe_report

    def both(report: Any) -> None:
        reports.append(report)
        observe(report)

    service.metrics.observe_report = both  # type: ignore[method-assign]


@asynccontextmanager
async def _inproc_drafter(running: RunningService) -> AsyncIterator[None]:
    """A drafter service over the head that is loaded here."""
    models, target = running.models, running.models.target
    assert models.head is not None
    running.drafter_device = str(target.device)
    network = InprocNetwork()
    network.serve_verifier(_ADDRESS, running.service)
    tokens = running.setup.max_sessions * (running.setup.max_tokens + 64)
    kind = GpuEagleProposer if target.device.type == "cuda" else EagleProposer
    source = kind(models.head, max_rows=tokens, dtype=target.dtype, device=target.device)
    config = DrafterConfig(
        model=models.name, head="loaded", methods=(DraftMethod.EAGLE3,), drafter_id=str(DRAFTER)
    )
    identity = TargetIdentity(vocab_size=target.vocab_size)
    drafter = DrafterService(config, [source], network.dialer(), identity=identity)
    await drafter.attach(_ADDRESS)
    await _attached(running)
    try:
        yield
    finally:
        await drafter.close()
        await network.remove(_ADDRESS)


@asynccontextmanager
async def _drafter_process(running: RunningService) -> AsyncIterator[None]:
    """A drafter in a process of its own, attached over gRPC."""
    from outrider.transport.grpc import GrpcDialer, GrpcServer, verifier_services

    models = running.models
    if models.drafter_model is None or models.drafter_head is None:
        raise FailedPreconditionError("a drafter process needs files", reason="NO_DRAFTER_FILES")
    running.drafter_device = drafter_device(running.setup, models.target)
    server = GrpcServer("127.0.0.1:0", verifier_services(running.service))
    address = await server.start()
    flags = {
        "listen": "127.0.0.1:0",
        "model": str(models.drafter_model),
        "head": str(models.drafter_head),
        "methods": "eagle3",
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "device": running.drafter_device,
        "drafter-id": str(DRAFTER),
        "busy-polling-cores": str(running.setup.busy_polling_cores),
        "log-level": "WARNING",
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "outrider_drafter",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        preexec_fn=lambda: os.sched_setaffinity(0, running.cores),
    )
    dialer = GrpcDialer()
    try:
        control = await dialer.drafter(await _ready_address(process))
        await control.attach(address)
        await _attached(running)
        yield
    finally:
        await dialer.close()
        if process.returncode is None:
            process.terminate()
            await process.wait()
        await server.stop(0.5)


async def _ready_address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            line = await process.stdout.readline()
    except TimeoutError:
        line = b""
    if not line:
        raise UnavailableError("the drafter process did not start", reason="NO_DRAFTER")
    return str(json.loads(line)["address"])


async def _attached(running: RunningService) -> None:
    """Wait until the verifier knows its drafter."""
    async with asyncio.timeout(_ATTACH_S):
        while not (await running.service.info()).drafters:
            await asyncio.sleep(0.01)
