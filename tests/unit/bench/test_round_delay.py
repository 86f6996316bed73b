"""Rounds that last as long as a larger model's: what is asked of each shape, on CPU and GPU."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from outrider_bench.hooks import round_delay
from outrider_bench.hooks.round_delay import TargetDuration, install
from outrider_verifier.hooks import RoundThrottle, VerifierHooks

from outrider.engine.device.graphs.shapes import AcceptanceMode, DraftKind, RoundShape
from outrider.errors import InvalidRequestError

ONE = RoundShape(
    rows=1,
    nodes=1,
    draft_kind=DraftKind.NONE,
    acceptance_mode=AcceptanceMode.MATCH,
    has_features=False,
)


def installed(round_ms: float, row_us: float = 0.0) -> RoundThrottle:
    hooks = VerifierHooks()
    install(hooks, round_ms=round_ms, row_us=row_us)
    assert hooks.round_throttle is not None
    return hooks.round_throttle


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (ONE, 0.004),
        (replace(ONE, nodes=6, draft_kind=DraftKind.CHAIN), 0.0041),
        (replace(ONE, rows=8, chunks=2), 0.00542),
    ],
)
def test_a_round_lasts_by_the_rows_of_its_forward(shape: RoundShape, seconds: float) -> None:
    model = TargetDuration(round_s=0.004, row_s=0.00002)
    assert model.seconds(shape.token_rows) == pytest.approx(seconds)


def test_a_forward_on_a_cpu_takes_what_is_missing_and_no_more() -> None:
    throttle = installed(10.0, 1000.0)
    began = time.perf_counter()
    throttle.delay_forward(3, began)
    assert time.perf_counter() - began >= 0.012
    again = time.perf_counter()
    throttle.delay_forward(3, again - 1.0)
    assert time.perf_counter() - again < 0.012


def test_a_device_waits_behind_rounds_of_known_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[int]()
    monkeypatch.setattr(round_delay, "_cycles_per_s", lambda: 1e6)
    monkeypatch.setattr("torch.cuda._sleep", waited.append)
    throttle = installed(4.0)
    wide, unknown = replace(ONE, rows=8), replace(ONE, rows=64)
    slowed = throttle.calibrate({ONE: 0.001, wide: 0.005})
    assert slowed == {ONE: pytest.approx(0.004), wide: 0.005}
    for shape in (ONE, wide, unknown):
        throttle.delay_launch(shape)
    assert waited == [pytest.approx(3000, abs=1)]


@pytest.mark.parametrize(("round_ms", "row_us"), [(0.0, 20.0), (-1.0, 0.0), (4.0, -1.0)])
def test_times_out_of_range_are_refused(round_ms: float, row_us: float) -> None:
    with pytest.raises(InvalidRequestError, match="round_ms must be positive"):
        install(VerifierHooks(), round_ms=round_ms, row_us=row_us)
