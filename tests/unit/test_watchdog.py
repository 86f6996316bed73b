"""A worker thread that has work and makes no step is noticed; any other one is left alone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from outrider import watchdog
from outrider.watchdog import Progress, Watchdog, record_step, unbounded_step

TIMEOUT_S = 0.2


async def stalls(
    progress: Progress, *, work: bool = True, timeout_s: float = TIMEOUT_S, watch_s: float = 1.0
) -> list[float]:
    """The stalls that are noticed within `watch_s`."""
    noticed: list[float] = []
    dog = Watchdog(progress, has_work=lambda: work, on_stall=noticed.append, timeout_s=timeout_s)
    dog.start()
    await asyncio.sleep(watch_s)
    dog.stop()
    return noticed


async def test_a_thread_with_work_and_without_a_step_is_noticed_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (silent_s,) = await stalls(Progress())
    assert TIMEOUT_S <= silent_s < 2 * TIMEOUT_S
    assert [record.message for record in caplog.records] == ["worker thread stalled"]


async def test_a_thread_without_work_may_be_silent() -> None:
    assert await stalls(Progress(), work=False) == []


async def test_nothing_is_watched_without_a_time() -> None:
    assert await stalls(Progress(), timeout_s=0.0) == []


async def test_steps_and_unbounded_steps_of_the_thread_itself_count() -> None:
    """As the layers of a long forward and the captures of graphs do."""
    progress, over = Progress(), threading.Event()

    def work() -> None:
        progress.bind()
        while not over.wait(TIMEOUT_S / 4):
            record_step()

    def capture() -> None:
        progress.bind()
        with unbounded_step():
            over.wait()

    for target in (work, capture):
        over.clear()
        thread = threading.Thread(target=target)
        thread.start()
        assert await stalls(progress) == []
        over.set()
        thread.join()


async def test_the_log_says_where_the_thread_hangs(caplog: pytest.LogCaptureFixture) -> None:
    progress, over = Progress(), threading.Event()

    def hang_here() -> None:
        progress.bind()
        over.wait()

    thread = threading.Thread(target=hang_here)
    thread.start()
    assert len(await stalls(progress)) == 1
    over.set()
    thread.join()
    assert "hang_here" in caplog.records[0].__dict__["stack"]


def test_a_step_of_a_thread_that_nobody_watches_is_nothing() -> None:
    record_step()
    with unbounded_step():
        pass


async def test_a_loop_that_was_held_up_takes_no_thread_for_hung() -> None:
    """A stopped process does not find its own thread hung when it goes on."""
    import time

    progress = Progress()
    noticed: list[float] = []
    dog = Watchdog(progress, has_work=lambda: True, on_stall=noticed.append, timeout_s=0.4)
    dog.start()
    await asyncio.sleep(0.05)
    time.sleep(0.6)
    await asyncio.sleep(0.05)
    assert noticed == []
    dog.stop()


def test_the_status_is_its_own() -> None:
    assert watchdog.EXIT_STALLED not in (0, 1, 2)
