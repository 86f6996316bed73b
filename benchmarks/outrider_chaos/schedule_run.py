"""One run of a schedule: fleet, clients, faults and the final checks."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from outrider.chaos.checker import CheckViolation, ExpectedAnswer, check_history
from outrider.chaos.faults import Fault, FaultKind, FaultRole
from outrider.chaos.history import ClientHistory
from outrider.chaos.requests import PROMPTS, TEXTS, ChaosRequest, TextSpec
from outrider.chaos.schedule import FaultSchedule, FleetShape
from outrider.client import AsyncClient
from outrider.client.options import GenerateOptions
from outrider.errors import OutriderError
from outrider.spec.plan import DraftMethod
from outrider_chaos.allowed_errors import allowed_errors_of
from outrider_chaos.clients import TIMEOUT_S, ChaosClient
from outrider_chaos.fault_injector import FaultInjector
from outrider_chaos.fleet import InprocFleet
from outrider_chaos.killable_parts import ChaosModels
from outrider_chaos.leak_check import ProcessResources, find_leaks

RUN_S = 75.0
"""Longest run; whatever takes longer hangs."""
SETTLE_S = 10.0
"""Within this everything is given back once the last client is gone."""

Baseline = dict[TextSpec, ExpectedAnswer]
"""What is heard in calm."""


@dataclass(slots=True, kw_only=True)
class RunOutcome:
    """Result of one run."""

    schedule: FaultSchedule
    violations: list[CheckViolation] = field(default_factory=list)
    histories: list[ClientHistory] = field(default_factory=list)
    hit: list[Fault] = field(default_factory=list)
    """Faults that found somebody to hit."""
    missed: list[Fault] = field(default_factory=list)
    """Faults whose phase did not come before they hit."""
    preemptions: int = 0
    """At the verifiers that were there at the end."""
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [str(self.schedule), *(f"  {history}" for history in self.histories)]
        lines += [f"  VIOLATION {violation}" for violation in self.violations]
        return "\n".join(lines)


async def record_baseline(models: ChaosModels) -> Baseline:
    """Every text of `TEXTS`, decoded plainly while nothing goes wrong."""
    async with (
        _fleet(FleetShape(kv_tokens=16384), models) as fleet,
        AsyncClient(fleet.router.address) as client,
    ):

        async def one(text: TextSpec) -> ExpectedAnswer:
            options: GenerateOptions = {**text.options, "drafter": DraftMethod.NONE}
            answer = await client.generate(PROMPTS[text.prompt], **options)
            return ExpectedAnswer(
                token_ids=answer.token_ids,
                text=answer.text,
                reason=answer.finish.reason,
                exact=text.is_deterministic,
            )

        return dict(zip(TEXTS, await asyncio.gather(*map(one, TEXTS)), strict=True))


@asynccontextmanager
async def _fleet(shape: FleetShape, models: ChaosModels) -> AsyncGenerator[InprocFleet]:
    with tempfile.TemporaryDirectory(prefix="outrider-chaos-") as folder:
        async with InprocFleet(shape, models, Path(folder)) as fleet:
            yield fleet


async def run_schedule(
    schedule: FaultSchedule, models: ChaosModels, oracle: Baseline
) -> RunOutcome:
    """Run a schedule; never raises, and takes no longer than `RUN_S` and what ends it."""
    outcome = RunOutcome(schedule=schedule)
    before, began = ProcessResources.now(), time.monotonic()
    try:
        async with (
            asyncio.timeout(RUN_S * models.slowness),
            _fleet(schedule.fleet, models) as fleet,
        ):
            await _run(fleet, schedule, oracle, outcome, models.slowness)
    except TimeoutError:
        outcome.violations.append(CheckViolation(promise="hang", detail="the run does not end"))
    except Exception as error:
        detail = f"the run itself: {type(error).__name__}: {error}"
        outcome.violations.append(CheckViolation(promise="crash", detail=detail))
    outcome.violations += [
        CheckViolation(promise="leak", detail=line) for line in await find_leaks(before)
    ]
    outcome.seconds = time.monotonic() - began
    return outcome


async def _run(
    fleet: InprocFleet,
    schedule: FaultSchedule,
    oracle: Baseline,
    outcome: RunOutcome,
    slowness: float,
) -> None:
    began = time.monotonic()
    readers = [
        ChaosClient(number, ask, await fleet.door(number), began, timeout_s=TIMEOUT_S * slowness)
        for number, ask in enumerate(schedule.asks)
    ]
    outcome.histories = [reader.history for reader in readers]
    _set_deadlines(readers, schedule, slowness)
    nemesis = FaultInjector(fleet, readers, schedule.seed)
    outcome.hit, outcome.missed = nemesis.done, nemesis.missed
    await asyncio.gather(*(reader.start() for reader in readers), nemesis.run(schedule.faults))
    outcome.preemptions = sum(part.preemptions for part in fleet.verifiers)
    for reader in readers:
        expected = oracle[reader.ask.text]
        allowed = allowed_errors_of(schedule, reader.ask, reader.history.number)
        outcome.violations += check_history(reader.history, expected, allowed=allowed)
    outcome.violations += await _settle(fleet, SETTLE_S * slowness)
    outcome.violations += await _serves_again(fleet, oracle, TIMEOUT_S * slowness)


def _set_deadlines(readers: list[ChaosClient], schedule: FaultSchedule, slowness: float) -> None:
    for fault in schedule.faults:
        if fault.role is FaultRole.CLIENT and fault.kind is FaultKind.DEADLINE:
            readers[fault.index % len(readers)].deadline_s = 3 * fault.lasts_s * slowness


async def _settle(fleet: InprocFleet, timeout_s: float) -> list[CheckViolation]:
    """What is still held a while after the last client has gone and everybody is well."""
    if not await fleet.healthy():
        return [CheckViolation(promise="recovery", detail="the fleet does not become healthy")]
    end = time.monotonic() + timeout_s
    while held := await fleet.held():
        if time.monotonic() > end:
            return [CheckViolation(promise="leak", detail=line) for line in held]
        await asyncio.sleep(0.01)
    return []


async def _serves_again(
    fleet: InprocFleet, oracle: Baseline, timeout_s: float
) -> list[CheckViolation]:
    """After all that, a request is answered, with drafts, as in calm."""
    text = TEXTS[0]
    ask = ChaosRequest(text=text)
    try:
        async with AsyncClient(fleet.router.address, timeout_s=timeout_s) as client:
            answer = await client.generate(PROMPTS[text.prompt], **ask.options)
    except OutriderError as error:
        return [CheckViolation(promise="recovery", detail=f"{type(error).__name__}: {error}")]
    if answer.token_ids != oracle[text].token_ids:
        return [CheckViolation(promise="text", detail="the answer after all faults is another")]
    return []
