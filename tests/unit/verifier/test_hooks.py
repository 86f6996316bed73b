"""Hook points of a verifier: what slows the rounds of either model runner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from outrider_verifier.config import VerifierConfig
from outrider_verifier.hooks import VerifierHooks
from outrider_verifier.model_runner.gpu_runner import runner as gpu_runner
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from outrider_verifier.server.service_builder import build_model_runner, build_service

from outrider.engine.device.graphs.shapes import RoundShape
from outrider.engine.model_loader import load_target
from outrider.spec.plan import SpeculationPlan
from tests.unit.verifier.harness import make_spec
from tests.unit.verifier.round_driver import MAX_NODES, Driver, texts


class Noted:
    """A throttle that waits for nothing."""

    def __init__(self) -> None:
        self.forwards: list[int] = []
        self.launches: list[RoundShape] = []

    def delay_forward(self, num_tokens: int, began: float) -> None:
        assert began > 0.0
        self.forwards.append(num_tokens)

    def calibrate(self, measured: Mapping[RoundShape, float]) -> Mapping[RoundShape, float]:
        return {shape: 2.0 * seconds for shape, seconds in measured.items()}

    def delay_launch(self, shape: RoundShape) -> None:
        self.launches.append(shape)


def config(target: Path, **settings: object) -> VerifierConfig:
    return VerifierConfig(
        model=str(target), max_sessions=4, max_tree_nodes=MAX_NODES, threads=1, **settings
    )


async def test_a_service_is_built_with_its_throttle(tiny_target: Path) -> None:
    throttle = Noted()
    service = build_service(config(tiny_target), hooks=VerifierHooks(round_throttle=throttle))
    spec = make_spec(prompt=(1, 2, 3), max_new_tokens=3, drafter=None, plan=SpeculationPlan())
    try:
        events = [event async for event in service.open_session(spec)]
    finally:
        await service.stop()
    assert sum(len(event.tokens) for event in events) == 3
    assert throttle.forwards == [3, 1, 1]


def test_each_forward_of_the_cpu_runner_is_throttled(tiny_target: Path) -> None:
    throttle = Noted()
    target = load_target(tiny_target, kv_tokens=1024)
    runner = build_model_runner(config(tiny_target), target, None, throttle)
    texts(Driver(runner, target.pool), [make_spec(prompt=(1, 2, 3), max_new_tokens=3)])
    assert throttle.forwards == [3, 1, 1] and not throttle.launches


def test_each_launch_of_the_gpu_runner_is_throttled_once_its_shapes_are_timed(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttle, measured = Noted(), dict[RoundShape, float]()
    target = load_target(tiny_target, kv_tokens=1024, packed=False)
    runner = GpuModelRunner.build(config(tiny_target), target, throttle=throttle)
    runner.warm_up()
    texts(Driver(runner, target.pool), [make_spec(prompt=(1, 2, 3), max_new_tokens=3)])
    assert not throttle.launches, "without graphs"
    # Of a device, which captures graphs.
    measured |= dict.fromkeys(runner.rounds.family.all_shapes(), 0.001)
    monkeypatch.setattr(gpu_runner, "warm_up_shapes", lambda *_: measured)
    graphs = runner.rounds.graphs
    monkeypatch.setattr(graphs, "enabled", True)
    monkeypatch.setattr(graphs, "run_graph", lambda key, fn: fn())
    runner.warm_up()
    assert runner.plain_round_s(1, own=False) == pytest.approx(0.002)
    texts(Driver(runner, target.pool), [make_spec(prompt=(1, 2, 3), max_new_tokens=3)])
    assert [shape.rows for shape in throttle.launches] == [0, 1, 1] and not throttle.forwards
