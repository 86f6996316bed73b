"""Log-probabilities on a GPU, with graphs: those of the target's own forward on the CPU."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from outrider.engine.model_loader import load_target
from outrider.spec.plan import SpeculationPlan
from tests.unit.verifier.device_serving import OWN, attached, serving
from tests.unit.verifier.harness import CHAIN, DRAFTER, TREE
from tests.unit.verifier.model_runner.test_logprobs import (
    PLAIN,
    SAMPLINGS,
    TOPS,
    answers_of,
    check,
    guesses,
)

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("plan", [PLAIN, CHAIN, TREE], ids=["none", "chain", "tree"])
async def test_logprobs_are_the_targets_own(
    plan: SpeculationPlan, cuda_graphs: bool, tiny_target: Path, tiny_head: Path
) -> None:
    target = load_target(tiny_target, kv_tokens=512, packed=False)
    for name, sampling in SAMPLINGS.items():
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(
                serving(tiny_target, tiny_head, device=CUDA, cuda_graphs=cuda_graphs)
            )
            drafter = None
            if plan is not PLAIN:
                await stack.enter_async_context(attached(service, guesses(target, plan)))
                drafter = DRAFTER
            answers = await answers_of(service, plan=plan, sampling=sampling, drafter=drafter)
        for answer, top in zip(answers, TOPS, strict=True):
            assert len(answer.tokens) >= 16, name
            check(target, answer, top)


@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("placement", ["colocated", "fused"])
async def test_logprobs_beside_own_drafts_are_the_targets_own(
    placement: str, topk: int, tiny_target: Path, tiny_head: Path
) -> None:
    target = load_target(tiny_target, kv_tokens=512, packed=False)
    nodes = 3 if topk == 1 else 8
    for name in ("coupled", "rejection"):
        async with serving(
            tiny_target,
            tiny_head,
            device=CUDA,
            placement=placement,
            draft_length=nodes,
            draft_top_k=topk,
        ) as service:
            plan = SpeculationPlan(method=OWN.method, draft_tokens=nodes)
            answers = await answers_of(service, plan=plan, sampling=SAMPLINGS[name], drafter=None)
        for answer, top in zip(answers, TOPS, strict=True):
            check(target, answer, top)
