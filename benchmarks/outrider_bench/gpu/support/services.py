"""Verifier services for the benchmarks. Only this module knows how the engine is constructed."""

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
"""Placements with a separate drafter. "separate-inproc" is a drafter service in this process that
receives messages as objects. "separate" is a drafter process over gRPC, on a device of its own if
there is one."""
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
    """A target model and its draft head, and the paths of the files that a drafter process
    needs."""

    name: str
    """Name of the model in the results. It states whether the weights are random."""
    target: TargetModel
    head: Eagle3Head | None = None
    projection: FeatureProjection | None = None
    drafter_model: Path | None = None
    drafter_head: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetup:
    """Settings with which a benchmark serves a model."""

    placement: str = PLAIN
    draft_length: int = 3
    """Number of draft nodes per round."""
    top_k: int = 1
    """Maximum number of children of a node. More than one makes a tree, which needs a separate
    drafter."""
    max_sessions: int = 64
    max_tokens: int = 1024
    """Maximum number of tokens of a prompt and its output together."""
    cuda_graphs: bool = True
    simulated: str = ""
    """Settings of simulated acceptance, see `VerifierConfig.simulated_acceptance`; "" for real
    acceptance."""
    prefill_tokens: int = 2048
    drafter_device: str = ""
    """Device of a separate drafter. "" selects another device than the target's if there is one."""
    record: bool = False
    """Whether the start and end times of the device's work are recorded."""
    warm_buckets: bool = False
    """Whether the CUDA graphs for every number of sessions are captured at the start. Otherwise a
    graph is captured when it is first needed."""
    busy_polling_cores: int = 0
    """Number of busy-polling cores of the verifier process and of the drafter process."""
    sampled: bool = False
    """Whether sessions with randomised acceptance rules will be served."""

    @property
    def plan(self) -> SpeculationPlan:
        """Speculation plan of every session."""
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
        """Id of the drafter of every session; None if drafts are made in the verifier or not at
        all."""
        return DRAFTER if self.placement in (INPROC, SEPARATE) else None


@dataclass(slots=True, kw_only=True)
class RunningService:
    """Verifier service that runs in this process, with the models that it serves."""

    service: VerifierService
    setup: ServingSetup
    models: LoadedModels
    runner: Any = None
    """`GpuModelRunner` of the service; None if the weights are packed and rounds run in
    `CpuModelRunner`."""
    recorder: Any = None
    drafter_device: str = ""
    cores: set[int] = field(default_factory=set)
    """CPU cores that the service does not keep busy-polling, for use by other processes."""
    reports: list[Any] = field(default_factory=list)
    """`RoundReport` of every round."""


@asynccontextmanager
async def serve_models(models: LoadedModels, setup: ServingSetup) -> AsyncIterator[RunningService]:
    """Yield a running service of these models and stop everything at the end. Raises
    FailedPreconditionError if the models do not support the placement."""
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
    """Tune this process like a verifier process, and undo that at the end. Yield the cores on which
    this process could run before."""
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
    """Return whether rounds run in `GpuModelRunner`. It needs unpacked weights."""
    return isinstance(models.target.weights.lm_head, PlainLinear)


def verifier_config(models: LoadedModels, setup: ServingSetup) -> VerifierConfig:
    """Return the verifier configuration of a setup."""
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
    """Return the `GpuModelRunner` of a setup, and its recorder of device spans."""
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
    """Free the blocks and the CUDA graphs of a `GpuModelRunner`, if there is one."""
    if runner is not None:
        runner.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def drafter_device(setup: ServingSetup, target: TargetModel) -> str:
    """Return the name of the device on which a separate drafter runs."""
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
    """Serve and attach a drafter in this process, with the head that is loaded here."""
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
    """Start a drafter process and attach it over gRPC; stop it at the end."""
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
    """Wait until the verifier has a drafter."""
    async with asyncio.timeout(_ATTACH_S):
        while not (await running.service.info()).drafters:
            await asyncio.sleep(0.01)
