"""Load on a running fleet: closed-loop clients whose answers are checked."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from outrider.chaos.checker import CheckViolation, ExpectedAnswer, allow_none, check_history
from outrider.chaos.history import ClientHistory
from outrider.client import AsyncClient
from outrider.client.options import GenerateOptions

PROMPTS = (
    "The ship left the harbour at dawn and",
    "Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6",
    "Three reasons to keep a journal:",
    "A short history of the number zero.",
)
SAMPLINGS: tuple[GenerateOptions, ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_p": 0.9, "seed": 11, "presence_penalty": 0.3},
)


@dataclass(slots=True)
class ChaosLoad:
    """Load of clients that repeat a fixed set of requests while faults are injected.

    It records what each client receives and compares it with the answers of a run without faults.
    """

    address: str
    max_tokens: int
    timeout_s: float
    expected: dict[tuple[int, int], ExpectedAnswer] = field(default_factory=dict)
    """Fault-free answers. A key is (index into `PROMPTS`, index into `SAMPLINGS`)."""
    histories: list[ClientHistory] = field(default_factory=list)
    violations: list[CheckViolation] = field(default_factory=list)

    async def record_baseline(self) -> None:
        """Send every request once without faults and store the answers in `expected`. Raises
        OutriderError if a request fails."""
        async with AsyncClient(self.address, timeout_s=self.timeout_s) as client:
            for prompt, text in enumerate(PROMPTS):
                for number, sampling in enumerate(SAMPLINGS):
                    answer = await client.generate(text, **self._options(sampling))
                    self.expected[prompt, number] = ExpectedAnswer(
                        token_ids=answer.token_ids, text=answer.text, reason=answer.finish.reason
                    )

    async def run_clients(self, clients: int, until: float, seed: int) -> None:
        """Run `clients` clients that send requests until `time.monotonic()` reaches `until`, and
        wait for all answers."""
        await asyncio.gather(*(self._ask_on(until, seed + number) for number in range(clients)))

    async def _ask_on(self, until: float, seed: int) -> None:
        rng = random.Random(seed)
        async with AsyncClient(self.address, timeout_s=self.timeout_s) as client:
            while time.monotonic() < until:
                what = (rng.randrange(len(PROMPTS)), rng.randrange(len(SAMPLINGS)))
                history = ClientHistory(number=len(self.histories))
                self.histories.append(history)
                await self._ask(client, what, history)
                self.violations += check_history(history, self.expected[what], allowed=allow_none)

    async def _ask(
        self, client: AsyncClient, what: tuple[int, int], history: ClientHistory
    ) -> None:
        history.began = time.monotonic()
        prompt, number = what
        try:
            stream = client.stream(PROMPTS[prompt], **self._options(SAMPLINGS[number]))
            async with stream:
                async for delta in stream:
                    history.add_delta(delta, time.monotonic())
            history.finished(stream.finish, time.monotonic())
        except Exception as error:
            history.failed(error, time.monotonic())

    def _options(self, sampling: GenerateOptions) -> GenerateOptions:
        return {**sampling, "max_tokens": self.max_tokens, "ignore_eos": True}
