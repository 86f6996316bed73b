"""Preemption on the device engine, over the tiny target: the texts are those of the calm run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from outrider_verifier.service import VerifierService

from outrider.spec.plan import Plan
from tests.unit.verifier.device_serving import (
    OWN,
    SAMPLINGS,
    plain_texts,
    run_all,
    run_drafted,
    serving,
)
from tests.unit.verifier.harness import CHAIN

FEW_TOKENS = 12 * 16
"""Nine blocks for three sessions that need thirteen at their ends; three are the engine's own."""


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    """See `plain_texts`."""
    return plain_texts(tiny_target)


def expects_little(service: VerifierService) -> None:
    """Have more let in than fit."""
    lengths: Any = service._core.room.lengths
    lengths.expected = lambda emitted, most: emitted


def preemptions(service: VerifierService) -> int:
    """So far."""
    counters = service._core.counters
    return counters["preemptions_swap"] + counters["preemptions_recompute"]


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["greedy", "coupled", "counted"])
async def test_own_drafts_survive(
    name: str,
    way: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    async with serving(
        tiny_target, tiny_head, placement="fused", kv_tokens=FEW_TOKENS, preemption=way
    ) as service:
        expects_little(service)
        results = await run_all(service, OWN, SAMPLINGS[name])
        assert preemptions(service) > 0
    assert [tokens for tokens, _ in results] == texts[name]
    assert all(stats.proposed > 0 for _, stats in results)


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["greedy", "truncated"])
async def test_drafts_from_outside_change_no_text(
    name: str,
    way: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    known = {tuple(prompt): text for prompt, text in zip(_prompts(), texts[name], strict=True)}
    async with serving(tiny_target, tiny_head, kv_tokens=FEW_TOKENS, preemption=way) as service:
        expects_little(service)
        results = await run_drafted(service, known, CHAIN, SAMPLINGS[name])
        assert preemptions(service) > 0
    assert [tokens for tokens, _ in results] == texts[name]


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_plain_text_is_that_of_the_calm_run(
    way: str, tiny_target: Path, texts: dict[str, list[list[int]]]
) -> None:
    async with serving(tiny_target, kv_tokens=11 * 16, max_tree_nodes=8, preemption=way) as service:
        expects_little(service)
        results = await run_all(service, Plan(), SAMPLINGS["penalties"])
        assert preemptions(service) > 0
    assert [tokens for tokens, _ in results] == texts["penalties"]


def _prompts() -> tuple[tuple[int, ...], ...]:
    from tests.unit.verifier.device_serving import PROMPTS

    return PROMPTS
