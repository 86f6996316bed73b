"""One drafter that exchanges between devices with several verifiers, as real processes: each gets
drafts, and none notices what becomes of another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider.client import Client, GenerateResult, user
from tests.integration.stack import Process, Stack, slow_rounds
from tests.waiting import wait_until

PROMPTS = [f"Count: {first} 1 2 3 4 5 6 7 8 9 0 1 2 3" for first in range(6)]
LENGTH = 100
OPENED, LOST = "exchanging between devices", "the exchange between devices is lost"


def count(process: Process, event: str) -> int:
    """How often a process has logged an event."""
    lines = process.log_path.read_text().splitlines()
    return sum(json.loads(line).get("event") == event for line in lines if line.startswith("{"))


@pytest.fixture(scope="module")
def stack(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    flags = ["--device-exchange", "on"]
    with pytest.MonkeyPatch.context() as patch:
        # On busy cores a drafter may be late.
        patch.setenv("OUTRIDER_VERIFIER_EXCHANGE_TIMEOUT_MS", "1000")
        with Stack(
            tmp_path_factory.mktemp("verifiers"),
            model=str(tiny_target),
            head=str(tiny_head),
            # Requests last until what happens to them was seen.
            verifier=[*flags, *slow_rounds(15)],
            drafter=flags,
            spare=2,
        ) as stack:
            opened(stack.verifiers, 1)
            yield stack


@pytest.fixture(scope="module")
def plain(stack: Stack) -> list[tuple[int, ...]]:
    """What the requests say without a drafter."""
    return texts(Load(stack, "none").results())


def opened(verifiers: list[Process], times: int) -> None:
    """Wait until these verifiers have begun to exchange so many times."""
    wait_until(
        lambda: all(count(each, OPENED) >= times for each in verifiers),
        timeout_s=30.0,
        what="exchanges",
    )


class Load:
    """Requests that run at the same time."""

    def __init__(self, stack: Stack, drafter: str) -> None:
        self._stack, self._drafter = stack, drafter
        self._threads = ThreadPoolExecutor(len(PROMPTS))
        self._running = [self._threads.submit(self._ask, prompt) for prompt in PROMPTS]

    def _ask(self, prompt: str) -> GenerateResult:
        with Client(self._stack.router.address, timeout_s=120.0) as client:
            return client.generate(
                [user(prompt)],
                max_tokens=LENGTH,
                ignore_eos=True,
                temperature=0.0,
                drafter=self._drafter,
            )

    def results(self) -> list[GenerateResult]:
        """All answers, in the order of the prompts."""
        found = [each.result(timeout=120.0) for each in self._running]
        self._threads.shutdown()
        return found


def wait_sessions(stack: Stack, verifiers: int) -> None:
    """Wait until all requests run, on so many verifiers."""

    def spread() -> bool:
        with stack.client(timeout_s=5.0) as client:
            verifiers_now = client.server_info().verifiers
        sessions = [each.sessions for each in verifiers_now if each.healthy]
        return sum(sessions) == len(PROMPTS) and sum(map(bool, sessions)) == verifiers

    wait_until(spread, timeout_s=20.0, what="sessions")


def texts(results: list[GenerateResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def test_verifiers_come_and_go_and_the_others_go_on(
    stack: Stack, plain: list[tuple[int, ...]]
) -> None:
    first, second, third = stack.verifiers

    load = Load(stack, "eagle3")
    wait_sessions(stack, 3)
    third.kill()
    results = load.results()
    assert texts(results) == plain
    assert all(result.finish.stats.proposed > 0 for result in results)

    load = Load(stack, "eagle3")
    wait_sessions(stack, 2)
    third.restart()
    opened([third], 2)
    results = load.results()
    assert texts(results) == plain
    # A session whose exchange was lost, or whose rounds were late, would have decoded plainly.
    for stats in (result.finish.stats for result in results):
        assert stats.proposed >= 3 * (stats.rounds - 3)

    load = Load(stack, "eagle3")
    wait_sessions(stack, 3)
    assert texts(load.results()) == plain
    assert [count(each, OPENED) for each in stack.verifiers] == [1, 1, 2]
    assert [count(each, LOST) for each in (first, second)] == [0, 0]


def test_a_stopped_verifier_holds_up_no_other(stack: Stack, plain: list[tuple[int, ...]]) -> None:
    first, second, third = stack.verifiers
    load = Load(stack, "eagle3")
    wait_sessions(stack, 3)
    third.freeze()
    results = load.results()
    third.thaw()
    assert texts(results) == plain
    assert [count(each, LOST) for each in (first, second)] == [0, 0]
