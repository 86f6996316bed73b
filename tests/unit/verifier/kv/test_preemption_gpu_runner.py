"""Preemption on the device engine, over the tiny target: the texts are those of the calm run."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.spec.plan import SpeculationPlan
from tests.unit.verifier.device_serving import (
    OWN,
    PROMPTS,
    SAMPLINGS,
    plain_texts,
    run_all,
    run_drafted,
    serving,
)
from tests.unit.verifier.forced_preemption import preempt_often, preemptions
from tests.unit.verifier.harness import CHAIN, TREE

WAYS = ["swap", "recompute"]


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    """See `plain_texts`."""
    return plain_texts(tiny_target)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["coupled", "counted"])
async def test_own_drafts_go_on(
    name: str,
    way: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    async with serving(tiny_target, tiny_head, placement="fused", preemption=way) as service:
        preempt_often(service)
        results = await run_all(service, OWN, SAMPLINGS[name])
        assert preemptions(service) >= 6
    assert [tokens for tokens, _ in results] == texts[name]
    # The round after a swap has no draft of its own, all others have.
    assert all(stats.proposed >= 3 * (stats.rounds - 8) > 0 for _, stats in results)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("plan", "name"), [(CHAIN, "truncated"), (TREE, "greedy")], ids=["chain", "tree"]
)
async def test_drafts_from_outside_change_no_text(
    name: str,
    plan: SpeculationPlan,
    way: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    known = {prompt: text for prompt, text in zip(PROMPTS, texts[name], strict=True)}
    async with serving(tiny_target, tiny_head, preemption=way) as service:
        preempt_often(service, every=2)
        results = await run_drafted(service, known, plan, SAMPLINGS[name])
        assert preemptions(service) >= 3
    assert [tokens for tokens, _ in results] == texts[name]
    # Drafts wait for a session that has no KV.
    assert sum(stats.accepted for _, stats in results) > 0


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["penalties"])
async def test_plain_text_is_that_of_the_calm_run(
    name: str, way: str, device: str | None, tiny_target: Path, texts: dict[str, list[list[int]]]
) -> None:
    async with serving(tiny_target, device=device, preemption=way) as service:
        preempt_often(service, every=2)
        results = await run_all(service, SpeculationPlan(), SAMPLINGS[name])
        assert preemptions(service) >= 9
    assert [tokens for tokens, _ in results] == texts[name]
