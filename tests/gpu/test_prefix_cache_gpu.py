"""Sessions that begin with what others left behind, on a GPU with graphs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.spec.plan import SpeculationPlan
from tests.unit.verifier.device_serving import OWN, PROMPTS, SAMPLINGS, run_all, serving

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"


@pytest.mark.parametrize("placement", ["fused", "colocated"])
@pytest.mark.parametrize("name", ["greedy", "counted"])
def test_texts_and_own_drafts_are_those_of_prompts_that_were_computed(
    name: str, placement: str, tiny_target: Path, tiny_head: Path
) -> None:
    async def served(*, cached: bool) -> list[Any]:
        place: dict[str, Any] = {"placement": placement, "prefix_cache": cached}
        async with serving(tiny_target, tiny_head, device=CUDA, **place) as service:
            plain = await run_all(service, SpeculationPlan(), SAMPLINGS[name])
            drafted = [await run_all(service, OWN, SAMPLINGS[name]) for _ in range(2)]
            found = service.core.counters["prefix_cache_hit_tokens"]
        assert found == (sum((len(p) - 1) // 16 * 16 for p in PROMPTS) if cached else 0)
        return [plain, *drafted]

    found, truths = (asyncio.run(served(cached=cached)) for cached in (True, False))
    for mine, truth in zip(found, truths, strict=True):
        assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in truth]
        # Sums differ in their last bits with a round's rows, so a draft may at a near tie.
        for (_, stats), (_, known) in zip(mine, truth, strict=True):
            assert abs(stats.accepted - known.accepted) <= 1
