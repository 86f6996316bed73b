"""Whole rounds on a GPU: the text is the host engine's, and graphs change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from tests.unit.verifier.device_serving import (
    OWN,
    PROMPTS,
    SAMPLINGS,
    plain_texts,
    run_all,
    run_drafted,
    serving,
)
from tests.unit.verifier.harness import CHAIN, TREE

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"
ALL = SAMPLINGS | {
    str(rule): SamplingParams(temperature=1.0, seed=4, rule=rule)
    for rule in (Rule.REJECTION, Rule.TARGET_ONLY)
}


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    """See `plain_texts`."""
    return plain_texts(tiny_target)


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_plain_text_is_the_hosts(
    name: str, cuda_graphs: bool, tiny_target: Path, texts: dict[str, list[list[int]]]
) -> None:
    async with serving(tiny_target, device=CUDA, cuda_graphs=cuda_graphs) as service:
        results = await run_all(service, SpeculationPlan(), SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]


@pytest.mark.parametrize("placement", ["colocated", "fused"])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_own_drafts_change_no_text(
    name: str,
    placement: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    async with serving(tiny_target, tiny_head, device=CUDA, placement=placement) as service:
        results = await run_all(service, OWN, SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]


@pytest.mark.parametrize("name", ALL)
async def test_graphs_and_eager_mode_agree(name: str, tiny_target: Path, tiny_head: Path) -> None:
    found = []
    for cuda_graphs, placement in ((True, "fused"), (True, "colocated"), (False, "fused")):
        async with serving(
            tiny_target, tiny_head, device=CUDA, placement=placement, cuda_graphs=cuda_graphs
        ) as service:
            # One session at a time: its rounds then do not depend on when others join.
            one = [await run_all(service, OWN, ALL[name], prompts=(p,)) for p in PROMPTS]
            found.append([[(tokens, s.accepted) for tokens, s in results] for results in one])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_drafts_from_outside_change_no_text(
    name: str,
    plan: SpeculationPlan,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
) -> None:
    known = dict(zip(PROMPTS, texts[name], strict=True))
    async with serving(tiny_target, tiny_head, device=CUDA) as service:
        results = await run_drafted(service, known, plan, SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]
    assert all(stats.accepted > 0 for _, stats in results)
