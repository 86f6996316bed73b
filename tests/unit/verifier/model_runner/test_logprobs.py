"""Log-probabilities are those of the target's own full forward, whoever drafted what and whatever
the rule, on the host's engine and on the device's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from outrider_verifier.server.service import VerifierService

from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.wire.messages import FinishReason, TokenLogprobs
from tests.fakes.scripted_drafter import ProposeFn
from tests.grids import thorough
from tests.reference.logprobs import assert_the_targets_own, full_forward
from tests.unit.verifier.device_serving import OWN, PROMPTS, attached, follow, serving
from tests.unit.verifier.forced_preemption import preempt_often, preemptions
from tests.unit.verifier.harness import CHAIN, DRAFTER, TREE, make_spec

TOPS = (5, None, 0)
"""What the sessions of a batch ask for, one each."""
SAMPLINGS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=0.8, top_p=0.9, seed=11),
    "penalised": SamplingParams(repetition_penalty=1.4, logit_bias=((7, 9.0),), banned_ids=(5,)),
    "rejection": SamplingParams(temperature=0.9, seed=4, rule=Rule.REJECTION),
    "target-only": SamplingParams(temperature=0.9, seed=4, rule=Rule.TARGET_ONLY),
}
PLAIN = SpeculationPlan(method=DraftMethod.NONE)


@dataclass
class Answer:
    """What a session said."""

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    accepted: int = 0
    reason: FinishReason | None = None


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> TargetModel:
    """The target by itself."""
    return load_target(tiny_target, kv_tokens=512, packed=False)


def check(target: TargetModel, answer: Answer, top: int | None) -> None:
    """Every number of an answer against the full forward."""
    if top is None:
        assert answer.logprobs == []
    else:
        assert_the_targets_own(target, answer.prompt, answer.tokens, answer.logprobs, top)


async def answer_of(service: VerifierService, index: int, **spec: Any) -> Answer:
    """Serve one prompt."""
    answer = Answer(PROMPTS[index], [], [])
    options = {"max_new_tokens": 16 + index, "top_logprobs": TOPS[index], **spec}
    async for event in service.open_session(
        make_spec(f"s{index}", prompt=PROMPTS[index], **options)
    ):
        assert len(event.logprobs) in (0, len(event.tokens))
        answer.tokens += event.tokens
        answer.logprobs += event.logprobs
        answer.accepted, answer.reason = event.stats.accepted, event.finish_reason
    return answer


async def answers_of(service: VerifierService, **spec: Any) -> list[Answer]:
    """Serve all prompts at once."""
    wanted = range(len(PROMPTS))
    return list(await asyncio.gather(*(answer_of(service, index, **spec) for index in wanted)))


def guesses(target: TargetModel, plan: SpeculationPlan) -> ProposeFn:
    """Drafts along the greedy text: most of them stand, others do not."""
    known = {}
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(20):
            ids.append(int(full_forward(target, ids)[-1].argmax()))
        known[prompt] = ids[len(prompt) :]
    return follow(known, plan)


@pytest.fixture(scope="module")
def proposals(target: TargetModel) -> Iterator[dict[str, ProposeFn]]:
    """Chains and trees from outside."""
    yield {"chain": guesses(target, CHAIN), "tree": guesses(target, TREE)}


# Every rule by trees on the device and plainly on the host, one rule in every cell: how a token
# was chosen and what is told of it do not know of each other.
CELLS = [("tree", "cpu"), ("none", None)]
REST = [("tree", None), ("chain", None), ("chain", "cpu"), ("none", "cpu")]


@pytest.mark.parametrize(
    ("name", "drafts", "device"),
    [
        *((name, *cell) for name in SAMPLINGS for cell in CELLS),
        *(("greedy", *cell) for cell in REST),
        *(thorough(name, *cell) for name in SAMPLINGS if name != "greedy" for cell in REST),
    ],
)
async def test_logprobs_are_the_targets_own(
    name: str,
    drafts: str,
    device: str | None,
    tiny_target: Path,
    tiny_head: Path,
    target: TargetModel,
    proposals: dict[str, ProposeFn],
) -> None:
    plan = {"none": PLAIN, "chain": CHAIN, "tree": TREE}[drafts]
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(tiny_target, tiny_head, device=device))
        drafter = None
        if drafts != "none":
            await stack.enter_async_context(attached(service, proposals[drafts]))
            drafter = DRAFTER
        answers = await answers_of(service, plan=plan, sampling=SAMPLINGS[name], drafter=drafter)
    for answer, top in zip(answers, TOPS, strict=True):
        check(target, answer, top)
    if name == "greedy" and drafts != "none":
        assert all(answer.accepted > 0 for answer in answers)


@pytest.mark.parametrize(
    ("name", "topk", "placement"),
    [("coupled", 1, "fused"), ("rejection", 1, "colocated"), ("rejection", 3, "fused")],
)
async def test_logprobs_beside_own_drafts_are_the_targets_own(
    name: str, topk: int, placement: str, tiny_target: Path, tiny_head: Path, target: TargetModel
) -> None:
    nodes = 3 if topk == 1 else 8
    async with serving(
        tiny_target, tiny_head, placement=placement, draft_length=nodes, draft_top_k=topk
    ) as service:
        plan = SpeculationPlan(method=OWN.method, draft_tokens=nodes)
        answers = await answers_of(service, plan=plan, sampling=SAMPLINGS[name], drafter=None)
    for answer, top in zip(answers, TOPS, strict=True):
        check(target, answer, top)


@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
async def test_a_token_that_stops_has_one_and_what_is_behind_it_none(
    device: str | None,
    tiny_target: Path,
    tiny_head: Path,
    target: TargetModel,
    proposals: dict[str, ProposeFn],
) -> None:
    async with serving(tiny_target, tiny_head, device=device) as service:
        plain = await answer_of(service, 0, plan=PLAIN, drafter=None)
        stop = plain.tokens[6]
        async with attached(service, proposals["chain"]):
            answer = await answer_of(service, 0, plan=CHAIN, stop_token_ids=(stop,))
    assert answer.reason is FinishReason.STOP_TOKEN and answer.tokens[-1] == stop
    check(target, answer, TOPS[0])


@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "device"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_a_preempted_session_has_them_once_and_without_gaps(
    preemption: str, device: str | None, tiny_target: Path, target: TargetModel
) -> None:
    async with serving(tiny_target, device=device, preemption=preemption) as service:
        preempt_often(service, every=2)
        answers = await answers_of(service, plan=PLAIN, drafter=None)
        assert preemptions(service) >= 6
    for answer, top in zip(answers, TOPS, strict=True):
        check(target, answer, top)
