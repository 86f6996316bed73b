"""Two verifiers share a pool of drafters that come, go and die; texts never change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import GenerateResult
from outrider.client.commands.drafters import add_drafter, remove_drafter
from tests.integration.pool_stack import PoolStack, Requests
from tests.integration.stack import slow_rounds
from tests.waiting import wait_until

COUNT = 8
TOKENS = 100


@pytest.fixture(scope="module")
def shared(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PoolStack]:
    directory = tmp_path_factory.mktemp("pool")
    with PoolStack(
        directory,
        model=str(tiny_target),
        head=str(tiny_head),
        # Requests last until what happens to them was seen.
        verifier=slow_rounds(24),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def plain(shared: PoolStack) -> list[tuple[int, ...]]:
    """What the requests say without any drafter."""
    return [r.token_ids for r in Requests(shared, COUNT, TOKENS, drafter="none").results()]


@pytest.fixture
def pool(shared: PoolStack) -> PoolStack:
    shared.repair()
    return shared


def check(results: list[GenerateResult], plain: list[tuple[int, ...]]) -> None:
    assert [result.token_ids for result in results] == plain
    # The drafts of a random head seldom stand: now and then one.
    assert all(result.finish.stats.proposed > 0 for result in results)
    assert sum(result.finish.stats.accepted for result in results) > 0


def running(pool: PoolStack, names: tuple[str, ...] = ("d0", "d1")) -> Requests:
    """Requests that these drafters draft for now."""
    requests = Requests(pool, COUNT, TOKENS)
    wait_until(
        lambda: sum(sum(pool.sessions_of(name).values()) for name in names) == COUNT,
        timeout_s=20.0,
        what="sessions",
    )
    return requests


def test_sessions_are_spread_over_drafters_and_verifiers(
    pool: PoolStack, plain: list[tuple[int, ...]]
) -> None:
    requests = running(pool)
    first, second = pool.sessions_of("d0"), pool.sessions_of("d1")
    check(requests.results(), plain)
    assert sum(first.values()) == sum(second.values()) == COUNT // 2
    for verifier in ("v0", "v1"):
        assert first[verifier] + second[verifier] == COUNT // 2
    drafter = pool.drafter("d0")
    assert drafter is not None and any(link.answer_ms > 0.0 for link in drafter.links)


def test_a_killed_drafters_sessions_are_drafted_for_by_the_other(
    pool: PoolStack, plain: list[tuple[int, ...]]
) -> None:
    before = pool.metric('outrider_session_moves_total{why="lost"')
    requests = running(pool)
    pool.drafters["d1"].kill()
    wait_until(lambda: sum(pool.sessions_of("d0").values()) == COUNT, what="sessions moved")
    results = requests.results()
    check(results, plain)
    assert pool.metric('outrider_session_moves_total{why="lost"') == before + COUNT // 2
    # Far from decoding plainly until the end.
    for result in results:
        assert result.finish.stats.fallback_rounds < 0.5 * result.finish.stats.rounds


def test_a_drafter_that_is_added_while_requests_run_gets_some_of_them(
    pool: PoolStack, plain: list[tuple[int, ...]]
) -> None:
    late = pool.start_drafter("late").wait_ready()
    requests = running(pool)
    add_drafter(pool.pool, late.address)
    wait_until(lambda: sum(pool.sessions_of("late").values()) > 0, what="sessions moved")
    check(requests.results(), plain)
    assert remove_drafter(pool.pool, late.address) == (0, 0)


def test_a_drafter_can_be_removed_and_ended_while_requests_run(
    pool: PoolStack, plain: list[tuple[int, ...]]
) -> None:
    lost = pool.metric("outrider_drafter_detached_sessions_total")
    requests = running(pool)
    leaving, sessions = pool.drafters["d0"], sum(pool.sessions_of("d0").values())
    removed = remove_drafter(pool.pool, leaving.address)
    leaving.stop()
    assert sessions > 0 and removed == (sessions, 0)
    # As the verifiers say it, when they are asked next.
    wait_until(lambda: sum(pool.sessions_of("d1").values()) == COUNT, what="all with the other")
    assert pool.drafter("d0") is None
    check(requests.results(), plain)
    # Nobody was without a drafter at any time.
    assert pool.metric("outrider_drafter_detached_sessions_total") == lost


def test_one_drafter_serves_two_verifiers_alike(
    pool: PoolStack, plain: list[tuple[int, ...]]
) -> None:
    remove_drafter(pool.pool, pool.drafters["d1"].address)
    requests = running(pool, ("d0",))
    shares = pool.sessions_of("d0")
    assert shares == {"v0": COUNT // 2, "v1": COUNT // 2}
    results = requests.results()
    check(results, plain)
    for result in results:
        stats = result.finish.stats
        assert stats.fallback_rounds < 0.2 * stats.rounds
