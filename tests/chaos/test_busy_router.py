"""A router that is stopped for some seconds keeps its sessions, and nothing is computed again; one
that two thousand requests reach at once serves its streams and /health meanwhile."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import pytest

from tests.integration.gap_meter import MAX_EXTRA_GAP_S, GapMeter, measure_calm
from tests.integration.stack import Stack, StackOptions, metric, slow_rounds
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {
        "router": ["--metrics-port", "0", "--http", "127.0.0.1:0"],
        "verifier": [*slow_rounds(30), "--metrics-port", "0", "--no-shared-memory"],
    }


@pytest.mark.parametrize("held_s", [3.0, 8.0])
def test_its_streams_go_on_without_a_new_session(stack: Stack, held_s: float) -> None:
    http = stack.router.ready["http"]
    calm = measure_calm(stack.router.address, http)
    with GapMeter(stack.router.address, http) as meter:
        wait_until(lambda: meter.gaps.tokens > 20, what="streams")
        sessions = metric(stack.verifier, "outrider_verifier_cancelled_total")
        stack.router.freeze()
        time.sleep(held_s)
        stack.router.thaw()
        tokens = meter.gaps.tokens
        wait_until(lambda: meter.gaps.tokens > tokens + 20, what="streams that go on")
        assert metric(stack.router, "outrider_failovers_total") == 0
        assert metric(stack.router, "outrider_verifier_losses_total") == 0
        assert metric(stack.verifier, "outrider_verifier_cancelled_total") == sessions
    # Time in which the process does not run is no pause of its own.
    meter.gaps.assert_close_to(calm, extra_s=held_s + 1.0)


def test_a_burst_waits_or_is_told_to_come_later_and_holds_nobody_up(stack: Stack) -> None:
    address, http = stack.router.address, stack.router.ready["http"]
    # Half of the files are for connections, and this process has as many.
    count = min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 100)
    calm = measure_calm(address, http, streams=1)
    with GapMeter(address, http, streams=1) as meter:
        wait_until(lambda: meter.gaps.tokens > 10, what="a stream")
        start = time.monotonic()
        burst = subprocess.run(
            [sys.executable, "-m", "tests.fakes.burst", http, str(count)],
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
        burst_s = time.monotonic() - start
    statuses = json.loads(burst.stdout)
    assert set(statuses) <= {"200", "429"} and statuses["200"] >= 64, statuses
    assert sum(statuses.values()) == count
    # A stream that waits for the burst waits for most of it, which takes long on a busy machine.
    meter.gaps.assert_close_to(calm, extra_s=max(MAX_EXTRA_GAP_S, burst_s / 4))
    assert metric(stack.router, "outrider_verifier_losses_total") == 0
