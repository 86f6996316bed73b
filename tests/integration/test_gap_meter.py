"""The gap meter itself: it sees a pause that a test makes, and none where there is none."""

from __future__ import annotations

import time

import pytest

from tests.integration.gap_meter import GapMeter, measure_calm
from tests.integration.stack import Stack, StackOptions


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {"router": ["--http", "127.0.0.1:0", "--metrics-port", "0"], "with_drafter": False}


def test_a_stopped_router_is_a_gap_of_streams_and_health(survivor: Stack) -> None:
    addresses = (survivor.router.address, str(survivor.router.ready["http"]))
    calm = measure_calm(*addresses, seconds=2.0)
    assert calm.tokens > 10 and not calm.errors
    with GapMeter(*addresses) as meter:
        time.sleep(1.0)
        survivor.router.freeze()
        time.sleep(1.4)
        survivor.router.thaw()
        time.sleep(1.0)
    assert min(meter.gaps.stream_s, meter.gaps.health_s) > 1.2
    with pytest.raises(AssertionError):
        meter.gaps.assert_close_to(calm, extra_s=0.2)
