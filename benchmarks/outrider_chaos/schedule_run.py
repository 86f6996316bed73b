"""One run: a fleet, its clients, what happens to them, and what is then to be found."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from outrider.chaos.checker import Expected, Violation, check
from outrider.chaos.faults import Fault, Kind, Role
from outrider.chaos.history import History
from outrider.chaos.requests import PROMPTS, TEXTS, Ask, Text
from outrider.chaos.schedule import FleetShape, Schedule
from outrider.client import AsyncClient
from outrider.client.options import GenerateOptions
from outrider.errors import OutriderError
from outrider.spec.plan import DraftMethod
from outrider_chaos.allowed_errors import allowed_errors
from outrider_chaos.clients import TIMEOUT_S, Reader
from outrider_chaos.fault_injector import Nemesis
from outrider_chaos.fleet import Fleet
from outrider_chaos.killable_parts import Models
from outrider_chaos.leak_check import Holdings, leaked

RUN_S = 75.0
"""Longest run; whatever takes longer hangs."""
SETTLE_S = 10.0
"""Within this everything is given back once the last client is gone."""

Oracle = dict[Text, Expected]
"""What is heard in calm."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run has shown."""

    schedule: Schedule
    violations: list[Violation] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
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


async def listen_in_calm(models: Models) -> Oracle:
    """Every text of `TEXTS`, decoded plainly while nothing goes wrong."""
    async with (
        _fleet(FleetShape(kv_tokens=16384), models) as fleet,
        AsyncClient(fleet.router.address) as client,
    ):

        async def one(text: Text) -> Expected:
            options: GenerateOptions = {**text.options, "drafter": DraftMethod.NONE}
            answer = await client.generate(PROMPTS[text.prompt], **options)
            return Expected(
                token_ids=answer.token_ids,
                text=answer.text,
                reason=answer.finish.reason,
                exact=text.exact,
            )

        return dict(zip(TEXTS, await asyncio.gather(*map(one, TEXTS)), strict=True))


@asynccontextmanager
async def _fleet(shape: FleetShape, models: Models) -> AsyncGenerator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="outrider-chaos-") as folder:
        async with Fleet(shape, models, Path(folder)) as fleet:
            yield fleet


async def run_schedule(schedule: Schedule, models: Models, oracle: Oracle) -> Outcome:
    """Run a schedule; never raises, and takes no longer than `RUN_S` and what ends it."""
    outcome = Outcome(schedule=schedule)
    before, began = Holdings.now(), time.monotonic()
    try:
        async with (
            asyncio.timeout(RUN_S * models.slowness),
            _fleet(schedule.fleet, models) as fleet,
        ):
            await _run(fleet, schedule, oracle, outcome, models.slowness)
    except TimeoutError:
        outcome.violations.append(Violation(promise="hang", detail="the run does not end"))
    except Exception as error:
        detail = f"the run itself: {type(error).__name__}: {error}"
        outcome.violations.append(Violation(promise="crash", detail=detail))
    outcome.violations += [Violation(promise="leak", detail=line) for line in await leaked(before)]
    outcome.seconds = time.monotonic() - began
    return outcome


async def _run(
    fleet: Fleet, schedule: Schedule, oracle: Oracle, outcome: Outcome, slowness: float
) -> None:
    began = time.monotonic()
    readers = [
        Reader(number, ask, await fleet.door(number), began, timeout_s=TIMEOUT_S * slowness)
        for number, ask in enumerate(schedule.asks)
    ]
    outcome.histories = [reader.history for reader in readers]
    _set_deadlines(readers, schedule, slowness)
    nemesis = Nemesis(fleet, readers, schedule.seed)
    outcome.hit, outcome.missed = nemesis.done, nemesis.missed
    await asyncio.gather(*(reader.start() for reader in readers), nemesis.run(schedule.faults))
    outcome.preemptions = sum(part.preemptions for part in fleet.verifiers)
    for reader in readers:
        expected = oracle[reader.ask.text]
        allowed = allowed_errors(schedule, reader.ask, reader.history.number)
        outcome.violations += check(reader.history, expected, allowed=allowed)
    outcome.violations += await _settle(fleet, SETTLE_S * slowness)
    outcome.violations += await _serves_again(fleet, oracle, TIMEOUT_S * slowness)


def _set_deadlines(readers: list[Reader], schedule: Schedule, slowness: float) -> None:
    for fault in schedule.faults:
        if fault.role is Role.CLIENT and fault.kind is Kind.DEADLINE:
            readers[fault.index % len(readers)].deadline_s = 3 * fault.lasts_s * slowness


async def _settle(fleet: Fleet, timeout_s: float) -> list[Violation]:
    """What is still held a while after the last client has gone and everybody is well."""
    if not await fleet.healthy():
        return [Violation(promise="recovery", detail="the fleet does not become healthy")]
    end = time.monotonic() + timeout_s
    while held := await fleet.held():
        if time.monotonic() > end:
            return [Violation(promise="leak", detail=line) for line in held]
        await asyncio.sleep(0.01)
    return []


async def _serves_again(fleet: Fleet, oracle: Oracle, timeout_s: float) -> list[Violation]:
    """After all that, a request is answered, with drafts, as in calm."""
    text = TEXTS[0]
    ask = Ask(text=text)
    try:
        async with AsyncClient(fleet.router.address, timeout_s=timeout_s) as client:
            answer = await client.generate(PROMPTS[text.prompt], **ask.options)
    except OutriderError as error:
        return [Violation(promise="recovery", detail=f"{type(error).__name__}: {error}")]
    if answer.token_ids != oracle[text].token_ids:
        return [Violation(promise="text", detail="the answer after all faults is another")]
    return []
