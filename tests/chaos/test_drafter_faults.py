"""Drafters of a pool are stopped, continued and restarted under load: no text changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from outrider.client import Client, GenerateResult, RetryPolicy
from tests.integration.pool_stack import PROMPT, PoolStack
from tests.integration.stack import slow_rounds
from tests.waiting import wait_until

COUNT = 4
TOKENS = 80
LONG = 160
"""Tokens of sessions that are still drafted for when a fault strikes."""
PATIENCE_MS = 100


@pytest.fixture(scope="module")
def shared(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PoolStack]:
    directory = tmp_path_factory.mktemp("pool")
    settings = directory / "router.toml"
    settings.write_text(f"[speculation]\nproposal_timeout_ms = {PATIENCE_MS}\n")
    with PoolStack(
        directory,
        model=str(tiny_target),
        head=str(tiny_head),
        # Requests last long enough for a fault and what follows it.
        verifier=slow_rounds(15),
        router=["--config", str(settings)],
    ) as running:
        yield running


@pytest.fixture
def pool(shared: PoolStack) -> PoolStack:
    shared.repair()
    return shared


class Load:
    """Clients that ask the same, each with its seed, again and again until they are told to stop;
    any error fails the test."""

    plain: ClassVar[dict[int, tuple[tuple[int, ...], ...]]] = {}
    """What they hear without a drafter, by tokens."""

    def __init__(self, pool: PoolStack, *, tokens: int = TOKENS) -> None:
        self._address = pool.router.address
        self._tokens = tokens
        self._enough = threading.Event()
        self._threads = ThreadPoolExecutor(COUNT)
        if tokens not in Load.plain:
            plain = [self._threads.submit(self._ask, seed, drafter="none") for seed in range(COUNT)]
            Load.plain[tokens] = tuple(each.result(timeout=60.0).token_ids for each in plain)
        self._running = [self._threads.submit(self._run, seed) for seed in range(COUNT)]
        wait_until(
            lambda: min(sessions(pool, "d0"), sessions(pool, "d1")) > 0,
            timeout_s=30.0,
            what="sessions",
        )

    def _ask(self, seed: int, **options: object) -> GenerateResult:
        retry = RetryPolicy(max_attempts=1)
        with Client(self._address, timeout_s=60.0, retry=retry) as client:
            return client.generate(
                PROMPT,
                max_tokens=self._tokens,
                ignore_eos=True,
                temperature=0.8,
                seed=seed,
                **options,  # type: ignore[arg-type]
            )

    def _run(self, seed: int) -> list[GenerateResult]:
        heard: list[GenerateResult] = []
        while not self._enough.is_set():
            heard.append(self._ask(seed))
        return heard

    def check(self) -> list[GenerateResult]:
        """Let all end, and see that they heard what they should; their last answers."""
        self._enough.set()
        last: list[GenerateResult] = []
        for seed, running in enumerate(self._running):
            heard = running.result(timeout=60.0)
            assert {result.token_ids for result in heard} == {self.plain[self._tokens][seed]}
            last.append(heard[-1])
        self._threads.shutdown()
        return last


def sessions(pool: PoolStack, name: str) -> int:
    return sum(pool.sessions_of(name).values())


def drafts(pool: PoolStack, name: str) -> bool:
    """Whether it has answered a verifier that has sessions of it."""
    drafter = pool.drafter(name)
    return drafter is not None and any(
        link.sessions and link.answer_ms > 0.0 for link in drafter.links
    )


def test_a_stopped_drafter_is_in_quarantine_and_gets_sessions_again_when_it_goes_on(
    pool: PoolStack,
) -> None:
    silent = 'outrider_drafter_quarantines_total{reason="silent"'
    before = pool.metric(silent)
    load = Load(pool, tokens=LONG)
    # Before a drafter's first proposals for a session nobody waits for it: to be missed it must
    # have answered.
    wait_until(lambda: drafts(pool, "d1"), timeout_s=30.0, what="drafts")
    pool.drafters["d1"].freeze()
    wait_until(lambda: pool.metric(silent) > before, timeout_s=20.0, what="quarantine")
    wait_until(lambda: sessions(pool, "d1") == 0, timeout_s=20.0, what="sessions moved")
    pool.drafters["d1"].thaw()
    wait_until(lambda: sessions(pool, "d1") > 0, timeout_s=30.0, what="sessions back")
    load.check()


def test_a_rolling_restart_is_noticed_by_nobody(pool: PoolStack) -> None:
    losses = pool.metric("outrider_drafter_losses_total{")
    load = Load(pool)
    assert pool.drafters["d0"].end() == 0
    wait_until(lambda: sessions(pool, "d0") == 0, timeout_s=20.0, what="all with the other")
    pool.drafters["d0"].restart()
    wait_until(lambda: sessions(pool, "d0") > 0, timeout_s=30.0, what="its share")
    assert pool.drafters["d1"].end() == 0
    wait_until(lambda: sessions(pool, "d0") == COUNT, timeout_s=20.0, what="all with the first")
    for result in load.check():
        assert result.finish.stats.proposed > 0
    assert pool.metric("outrider_drafter_losses_total{") == losses
