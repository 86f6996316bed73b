"""Sessions with a thinking budget: one text, whoever computes, drafts or went before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from outrider_verifier.model_runner.grammar_preparation import start_session_constraint

from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.grammar.tool_calls import ThinkTags, wrap_structured_output
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.thinking_budget import ThinkingBudget
from outrider.text.tokenizer import Tokenizer
from tests.unit.verifier.device_serving import (
    OWN,
    PROMPTS,
    SAMPLINGS,
    run_all,
    run_drafted,
    serving,
    texts_of,
)
from tests.unit.verifier.forced_preemption import preempt_often, preemptions
from tests.unit.verifier.harness import CHAIN, TREE, make_spec

NUM_THINKING = 7
Texts = list[list[int]]


@pytest.fixture(scope="module")
def budget(tiny_target: Path) -> ThinkingBudget:
    """Random weights write no tag of their own accord."""
    ids = Tokenizer.load(tiny_target).encode("</think>", add_special_tokens=False)
    assert len(ids) > 2
    return ThinkingBudget(max_tokens=NUM_THINKING, close_tag="</think>", close_ids=ids)


@pytest.fixture(scope="module")
def texts(tiny_target: Path, budget: ThinkingBudget) -> dict[str, Texts]:
    """Texts by sampling, from the host's engine."""

    async def plain(name: str) -> Texts:
        async with serving(tiny_target, device=None) as service:
            return texts_of(
                await run_all(service, SpeculationPlan(), SAMPLINGS[name], thinking_budget=budget)
            )

    return {name: asyncio.run(plain(name)) for name in ("greedy", "coupled", "penalties")}


def ends_in_time(tokens: list[int], budget: ThinkingBudget) -> bool:
    end = NUM_THINKING + len(budget.close_ids)
    return len(tokens) > end and tuple(tokens[NUM_THINKING:end]) == budget.close_ids


async def test_the_close_tag_comes_when_the_budget_is_used_up(
    tiny_target: Path, texts: dict[str, Texts], budget: ThinkingBudget
) -> None:
    async with serving(tiny_target, device=None) as service:
        free = texts_of(await run_all(service, SpeculationPlan(), SAMPLINGS["coupled"]))
    for tokens, unlimited in zip(texts["coupled"], free, strict=True):
        assert ends_in_time(tokens, budget)
        assert tokens[:NUM_THINKING] == unlimited[:NUM_THINKING] and tokens != unlimited
    assert all(ends_in_time(tokens, budget) for each in texts.values() for tokens in each)


@pytest.mark.parametrize("name", ["greedy", "coupled", "penalties"])
async def test_the_device_gives_the_hosts_text(
    name: str, tiny_target: Path, texts: dict[str, Texts], budget: ThinkingBudget
) -> None:
    async with serving(tiny_target) as service:
        results = await run_all(service, SpeculationPlan(), SAMPLINGS[name], thinking_budget=budget)
    assert texts_of(results) == texts[name]


@pytest.mark.parametrize(("device", "plan"), [("cpu", TREE), (None, TREE), (None, CHAIN)])
async def test_drafts_from_outside_change_no_text_and_stand(
    plan: SpeculationPlan,
    device: str | None,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, Texts],
    budget: ThinkingBudget,
) -> None:
    known = dict(zip(PROMPTS, texts["coupled"], strict=True))
    async with serving(tiny_target, tiny_head, device=device) as service:
        results = await run_drafted(
            service, known, plan, SAMPLINGS["coupled"], thinking_budget=budget
        )
    assert texts_of(results) == texts["coupled"]
    assert all(stats.accepted > 0 for _, stats in results)


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [({}, 4), ({"draft_length": 6, "draft_top_k": 3}, 6)],
    ids=["chain", "tree"],
)
async def test_own_drafts_change_no_text(
    settings: dict[str, Any],
    nodes: int,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, Texts],
    budget: ThinkingBudget,
) -> None:
    plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=nodes)
    async with serving(tiny_target, tiny_head, placement="fused", **settings) as service:
        results = await run_all(service, plan, SAMPLINGS["coupled"], thinking_budget=budget)
    assert texts_of(results) == texts["coupled"]
    assert all(stats.proposed > 0 for _, stats in results)


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TARGET_ONLY])
async def test_rules_that_toss_coins_keep_the_budget(
    rule: Rule, tiny_target: Path, tiny_head: Path, budget: ThinkingBudget
) -> None:
    sampling = SamplingParams(temperature=1.2, rule=rule, seed=3)
    async with serving(tiny_target, tiny_head, placement="fused") as service:
        results = await run_all(service, OWN, sampling, thinking_budget=budget)
    assert all(ends_in_time(tokens, budget) and stats.proposed > 0 for tokens, stats in results)


@pytest.mark.parametrize(("device", "way"), [("cpu", "recompute"), (None, "swap")])
async def test_preempted_sessions_go_on_with_the_same_budget(
    way: str,
    device: str | None,
    tiny_target: Path,
    texts: dict[str, Texts],
    budget: ThinkingBudget,
) -> None:
    async with serving(tiny_target, device=device, preemption=way) as service:
        preempt_often(service)
        results = await run_all(
            service, SpeculationPlan(), SAMPLINGS["coupled"], thinking_budget=budget
        )
        assert preemptions(service) >= 6
    assert texts_of(results) == texts["coupled"]


async def test_a_session_goes_on_from_what_another_verifier_emitted(
    tiny_target: Path, texts: dict[str, Texts], budget: ThinkingBudget
) -> None:
    """Within the reasoning, at its end, within the forced tag and behind it."""
    whole = texts["coupled"][0]
    async with serving(tiny_target, device=None) as service:
        for done in (1, NUM_THINKING, NUM_THINKING + 2, NUM_THINKING + len(budget.close_ids) + 1):
            spec = make_spec(
                f"s{done}",
                prompt=(*PROMPTS[0], *whole[:done]),
                prompt_len=len(PROMPTS[0]),
                max_new_tokens=len(whole) - done,
                plan=SpeculationPlan(),
                sampling=SAMPLINGS["coupled"],
                drafter=None,
                thinking_budget=budget,
            )
            rest = [t async for event in service.open_session(spec) for t in event.tokens]
            assert [*whole[:done], *rest] == whole


async def test_a_form_follows_the_forced_tag(tiny_target: Path, budget: ThinkingBudget) -> None:
    think = ThinkTags(open_tag="<think>", close_tag="</think>", is_open=True)
    form = StructuredOutput(StructuredKind.REGEX, "[abc]{8}")
    options = {
        "structured_output": wrap_structured_output(form, special_ids={}, think=think),
        "stop_token_ids": (2,),
        "thinking_budget": budget,
        "max_new_tokens": 60,
    }
    async with serving(tiny_target, device=None) as service:
        results = await run_all(service, SpeculationPlan(), SAMPLINGS["coupled"], **options)
    tokenizer = Tokenizer.load(tiny_target)
    for tokens in texts_of(results):
        thought, _, answer = tokenizer.decode(tokens).partition("</think>")
        assert thought and len(answer.strip()) == 8 and set(answer.strip()) <= set("abc")
        # A character that has begun is completed.
        assert len(tokens) <= NUM_THINKING + 3 + len(budget.close_ids) + 4 + 8 + 1
        assert tokens[-1] == 2


async def test_a_budget_that_cannot_be_kept_is_refused(
    tiny_target: Path, budget: ThinkingBudget
) -> None:
    beyond = replace(budget, close_ids=(*budget.close_ids, 384))
    wrong = replace(budget, close_ids=budget.close_ids[:-1])
    async with serving(tiny_target, device=None) as service:
        for odd, why in ((beyond, "thinking budget must be in"), (wrong, "do not write")):
            with pytest.raises(InvalidRequestError, match=why):
                await run_all(service, SpeculationPlan(), SAMPLINGS["greedy"], thinking_budget=odd)
    spec = make_spec("s", prompt=(1,), plan=SpeculationPlan(), thinking_budget=budget)
    with pytest.raises(FailedPreconditionError, match="tokenizer") as refused:
        start_session_constraint(spec, None, vocab_size=384)
    assert refused.value.reason == "NO_THINKING_BUDGET"
