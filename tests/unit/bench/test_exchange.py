"""The benchmark of the exchange goes round by every way."""

from __future__ import annotations

import pytest
from outrider_bench.exchange.cli import TRANSPORTS, run_transport


@pytest.mark.parametrize("way", TRANSPORTS)
def test_a_round_trip_by_every_way(way: str) -> None:
    taken = run_transport(way, [(1, 0.0), (2, 0.1)], rounds=4)
    assert [len(times) for times in taken] == [4, 4]
    assert all(time > 0.0 for times in taken for time in times)
