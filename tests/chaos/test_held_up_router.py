"""A router that is stopped for some seconds keeps its sessions, and nothing is computed again."""

from __future__ import annotations

import time

import pytest

from tests.integration.gap_meter import GapMeter, measure_calm
from tests.integration.stack import Stack, StackOptions, metric
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {
        "router": ["--metrics-port", "0", "--http", "127.0.0.1:0"],
        "verifier": ["--bench-round-ms", "14", "--metrics-port", "0", "--no-lanes"],
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
