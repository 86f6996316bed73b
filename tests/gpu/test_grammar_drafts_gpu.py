"""Sessions in a grammar on a GPU, with graphs: the host engine's texts, in-process drafts or
not."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.spec.plan import SpeculationPlan
from tests.unit.verifier.device_serving import OWN, SAMPLINGS, run_all, serving
from tests.unit.verifier.model_runner.test_grammar_drafts import (
    Levels,
    accepted,
    plan_of,
    texts_by_sampling,
)
from tests.unit.verifier.server.test_structured_output import SPEC, texts_of

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    return texts_by_sampling(tiny_target, "greedy", "coupled", "counted")


@pytest.mark.parametrize("name", ["greedy", "coupled", "counted"])
async def test_masks_on_the_device_keep_the_text(
    name: str, tiny_target: Path, texts: dict[str, list[list[int]]]
) -> None:
    async with serving(tiny_target, device=CUDA, cuda_graphs=True) as service:
        results = await run_all(service, SpeculationPlan(), SAMPLINGS[name], **SPEC)
    assert texts_of(results) == texts[name]


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("placement", ["fused", "colocated"])
@pytest.mark.parametrize("topk", [1, 4], ids=["chain", "tree"])
async def test_own_drafts_change_no_text_and_stand(
    topk: int,
    placement: str,
    cuda_graphs: bool,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    plan, settings = plan_of(topk)
    for name in ("greedy", "coupled", "counted"):
        async with serving(
            tiny_target,
            tiny_head,
            device=CUDA,
            cuda_graphs=cuda_graphs,
            placement=placement,
            **settings,
        ) as service:
            results = await run_all(service, plan, SAMPLINGS[name], **SPEC)
        assert texts_of(results) == texts[name]
        assert all(stats.proposed > 0 for _, stats in results)
        assert accepted(results) > 0


@pytest.mark.parametrize("name", ["coupled", "counted"])
async def test_levels_under_no_masks_are_the_chain_that_a_round_drafts(
    name: str, tiny_target: Path, tiny_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = Levels(monkeypatch)
    async with serving(
        tiny_target, tiny_head, device=CUDA, cuda_graphs=True, placement="fused"
    ) as service:
        await run_all(service, OWN, SAMPLINGS[name], **SPEC)
    # The order of sums depends on how many rows share a product.
    assert len(levels.same) > 20 and sum(levels.same) > 0.95 * len(levels.same)
    assert max(levels.apart) < 1e-3
