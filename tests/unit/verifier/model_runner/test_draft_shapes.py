"""Chains and trees of one in-process drafter: rounds change from one to the other, and no text
changes with them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
from outrider_verifier.config import VerifierConfig
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner

from outrider.engine.device.graphs import shape_family
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.wire.messages import SessionSpec
from tests.unit.verifier.harness import make_spec
from tests.unit.verifier.round_driver import Driver, device_runner, host_runner, texts

CHAIN, SHORT, TREE = 5, 4, 13
"""Nodes of a row, the root included."""
PLAN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=8)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=0.8, seed=3, rule=Rule.COUPLED),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4),
}
SETTINGS: dict[str, Any] = {"draft_length": CHAIN - 1, "draft_tree_nodes": TREE - 1}


def specs(sampling: SamplingParams, count: int = 3) -> list[SessionSpec]:
    return [
        make_spec(
            f"s{i}",
            prompt=tuple((7 * i + j) % 24 for j in range(8 + 3 * i)),
            plan=PLAN,
            sampling=sampling,
            max_new_tokens=24,
        )
        for i in range(count)
    ]


def verified_in_turn(
    sampling: SamplingParams, other: int, ahead: bool, target: Path, head: Path
) -> set[int]:
    """Numbers of draft nodes that rows verified while chains and `other` shapes took turns. The
    texts must be those of the host's engine."""
    wanted = specs(sampling)
    runner, pool = host_runner(target)
    expected = texts(Driver(runner, pool), wanted)
    runner, pool = device_runner(target, head, **SETTINGS)

    def change(driver: Driver, step: int) -> None:
        runner.set_draft_shape(other if step // 4 % 2 else CHAIN)

    driver = Driver(runner, pool, ahead=ahead)
    assert texts(driver, wanted, change) == expected
    return {nodes for rows in driver.drafted.values() for nodes in rows[1:]}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_of_either_shape_change_no_text(
    name: str, ahead: bool, tiny_target: Path, tiny_head: Path
) -> None:
    verified = verified_in_turn(SAMPLINGS[name], TREE, ahead, tiny_target, tiny_head)
    assert verified == {0, CHAIN - 1, TREE - 1}, "a round without drafts lies between two shapes"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_shorter_chains_change_no_text_and_follow_longer_ones_at_once(
    name: str, ahead: bool, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_family, "MIN_SHORT_CHAIN_ROWS", 1)
    verified = verified_in_turn(SAMPLINGS[name], SHORT, ahead, tiny_target, tiny_head)
    assert verified == {CHAIN - 1, SHORT - 1}, "no round between them lacks drafts"


@pytest.mark.parametrize("shapes", [(CHAIN, TREE), (CHAIN, SHORT)])
def test_sessions_under_the_rejection_rule_go_through_both_shapes(
    shapes: tuple[int, int], tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_family, "MIN_SHORT_CHAIN_ROWS", 1)
    sampling = SamplingParams(temperature=0.8, seed=3, rule=Rule.REJECTION)
    runner, pool = device_runner(tiny_target, tiny_head, **SETTINGS)
    driver = Driver(runner, pool)
    texts(driver, specs(sampling), lambda _, step: runner.set_draft_shape(shapes[step % 2]))
    assert driver.counts


def test_shorter_chains_are_a_choice_from_a_number_of_sessions_on(
    tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape_family, "MIN_SHORT_CHAIN_ROWS", 3)
    runner, _ = device_runner(tiny_target, tiny_head, **{**SETTINGS, "draft_tree_nodes": 0})
    assert isinstance(runner, GpuModelRunner)
    runner.round_times.set_measurements(
        {shape: 1e-3 * shape.nodes for shape in runner.rounds.family.all_shapes()}
    )
    assert [each.num_nodes for each in runner.draft_shapes(2)] == [CHAIN]
    assert [each.num_nodes for each in runner.draft_shapes(3)] == [CHAIN, SHORT]


def test_few_sessions_get_no_shorter_chains(tiny_target: Path, tiny_head: Path) -> None:
    runner, pool = device_runner(tiny_target, tiny_head, **SETTINGS)
    runner.set_draft_shape(SHORT)
    driver = Driver(runner, pool)
    texts(driver, specs(SamplingParams()))
    assert SHORT - 1 not in {nodes for rows in driver.drafted.values() for nodes in rows}


def test_more_sessions_than_trees_are_for_get_chains(tiny_target: Path, tiny_head: Path) -> None:
    runner, pool = device_runner(
        tiny_target,
        tiny_head,
        blocks=256,
        **SETTINGS,
        max_sessions=20,
        prefill_tokens_per_round=1024,
    )
    runner.set_draft_shape(TREE)
    driver = Driver(runner, pool)
    texts(driver, specs(SamplingParams(), 17))
    assert CHAIN - 1 in {nodes for rows in driver.drafted.values() for nodes in rows}


def test_all_have_chains_while_any_session_is_in_a_grammar(
    tiny_target: Path, tiny_head: Path
) -> None:
    runner, pool = device_runner(tiny_target, tiny_head, **SETTINGS)
    runner.set_draft_shape(TREE)
    driver = Driver(runner, pool)
    one, other = (driver.open(spec) for spec in specs(SamplingParams(), 2))
    # It waits, or sits rounds out.
    other.constraint = cast(Any, object())
    runner.open_session(other)
    driver.resume(one)
    for _ in range(4):
        driver.step()
    assert driver.drafted[one.ticket][-1] == CHAIN - 1
    runner.close_session(other)
    for _ in range(2):
        driver.step()
    assert driver.drafted[one.ticket][-2:] == [0, TREE - 1]
    driver.close()


def test_without_measured_times_there_is_no_choice(tiny_target: Path, tiny_head: Path) -> None:
    runner, _ = device_runner(tiny_target, tiny_head, **SETTINGS)
    assert isinstance(runner, GpuModelRunner)
    (only,) = runner.draft_shapes(4)
    assert only.num_nodes == CHAIN and math.isnan(only.seconds)
    runner.round_times.set_measurements(
        {shape: 1e-3 * shape.nodes for shape in runner.rounds.family.all_shapes()}
    )
    found = [(each.num_nodes, each.is_tree) for each in runner.draft_shapes(4)]
    assert found == [(CHAIN, False), (TREE, True)]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 3),
        ({"draft_length": 3}, 2),
        ({"draft_length": 2}, 0),
        ({"draft_top_k": 4}, 0),
        ({"planner": "fixed"}, 0),
        ({"placement": "separate"}, 0),
        ({"placement": "separate", "device": "cuda:0"}, 3),
        ({"simulated_acceptance": "2.6"}, 0),
    ],
)
def test_chains_may_be_shortened_where_the_planner_may_choose(
    settings: dict[str, Any], tokens: int
) -> None:
    settings = {"model": "m", "placement": "fused", "feature_head": "h", **settings}
    assert VerifierConfig(**settings).short_chain_tokens == tokens


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [
        ({}, 16),
        ({"draft_tree_nodes": 0}, 0),
        ({"draft_tree_nodes": 4}, 0),
        ({"draft_top_k": 4}, 0),
        ({"planner": "fixed"}, 0),
        ({"max_tree_nodes": 9}, 9),
        ({"placement": "separate"}, 0),
        ({"simulated_acceptance": "2.6"}, 0),
    ],
)
def test_trees_are_beside_chains_where_the_planner_may_choose(
    settings: dict[str, Any], nodes: int
) -> None:
    settings = {"model": "m", "placement": "fused", "feature_head": "h", **settings}
    assert VerifierConfig(**settings).in_process_tree_nodes == nodes
