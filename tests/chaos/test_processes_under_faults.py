"""Real processes behind proxies are killed, stopped and cut off: their clients hear whole texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from outrider_chaos.clients import ChaosClient
from outrider_chaos.process_fleet import ProcessFleet
from outrider_chaos.seed_runs import make_tiny

from outrider.chaos.checker import ExpectedAnswer, allow_none, check_history
from outrider.chaos.faults import Fault, FaultKind, FaultRole
from outrider.chaos.requests import DRAFTING_SETS, PROMPTS, TEXTS, ChaosRequest
from outrider.client import AsyncClient
from outrider.client.options import GenerateOptions
from outrider.spec.plan import DraftMethod

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ASKS = tuple(
    ChaosRequest(text=text, drafting=drafting, starts_s=0.05 * number)
    for number, (text, drafting) in enumerate(
        zip(
            [text for text in TEXTS if text.is_deterministic][-12:],
            list(DRAFTING_SETS) * 2,
            strict=False,
        )
    )
)
HITS_AFTER = 20
"""Tokens of all clients."""
TIMEOUT_S = 100.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ProcessFleet]:
    target, head = make_tiny(tmp_path_factory.mktemp("tiny"))
    async with ProcessFleet(target, head, tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def oracle(fleet: ProcessFleet) -> list[ExpectedAnswer]:
    """What every client is to hear."""
    assert fleet.router is not None

    async def one(ask: ChaosRequest) -> ExpectedAnswer:
        options: GenerateOptions = {**ask.options, "drafter": DraftMethod.NONE}
        answer = await client.generate(PROMPTS[ask.text.prompt], **options)
        return ExpectedAnswer(
            token_ids=answer.token_ids, text=answer.text, reason=answer.finish.reason
        )

    async with AsyncClient(fleet.router.process.address) as client:
        return list(await asyncio.gather(*map(one, ASKS)))


FAULTS = {
    "killed verifier": Fault(kind=FaultKind.KILL, role=FaultRole.VERIFIER),
    "told verifier": Fault(kind=FaultKind.TERMINATE, role=FaultRole.VERIFIER, index=1),
    "stopped verifier": Fault(kind=FaultKind.STOP, role=FaultRole.VERIFIER, lasts_s=4.0),
    "verifier cut off one way": Fault(
        kind=FaultKind.ONE_WAY, role=FaultRole.VERIFIER, index=1, lasts_s=4.0
    ),
    "verifier's streams cut in a frame": Fault(kind=FaultKind.TRUNCATE, role=FaultRole.VERIFIER),
    "killed drafter": Fault(kind=FaultKind.KILL, role=FaultRole.DRAFTER),
    "slow link": Fault(kind=FaultKind.DELAY, role=FaultRole.VERIFIER, lasts_s=0.5),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_clients_hear_whole_texts_and_nothing_is_held(
    fleet: ProcessFleet, oracle: list[ExpectedAnswer], name: str
) -> None:
    began = time.monotonic()
    readers = [
        ChaosClient(number, ask, await fleet.door(number), began, timeout_s=TIMEOUT_S)
        for number, ask in enumerate(ASKS)
    ]
    reading = [reader.start() for reader in readers]
    while sum(reader.tokens for reader in readers) < HITS_AFTER:
        assert time.monotonic() - began < TIMEOUT_S
        await asyncio.sleep(0.005)
    await asyncio.gather(fleet.hit(FAULTS[name]), *reading)
    for reader, expected in zip(readers, oracle, strict=True):
        assert check_history(reader.history, expected, allowed=allow_none) == []
    assert await fleet.healthy(60.0), "something is held, or somebody does not come back"
