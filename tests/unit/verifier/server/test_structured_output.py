"""Sessions in a grammar on a verifier: one text, whoever computes, drafts or went before."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from outrider_verifier.server.service import VerifierService

from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.grammar.grammar_constraint import GrammarConstraint
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.text.tokenizer import Tokenizer
from tests.unit.verifier.device_serving import (
    PROMPTS,
    SAMPLINGS,
    run_all,
    run_drafted,
    serving,
    texts_of,
)
from tests.unit.verifier.forced_preemption import preempt_often, preemptions
from tests.unit.verifier.harness import CHAIN, TREE, make_spec, verifier

STOP = 2
FORM = StructuredOutput(
    StructuredKind.REGEX, r'\{"a": [1-9][0-9]?, "b": \[("[a-z0-9]{0,6}"(, )?){2,4}\]\}'
)
SPEC: dict[str, Any] = {
    "structured_output": FORM,
    "stop_token_ids": (STOP,),
    "max_new_tokens": 120,
    "min_new_tokens": 3,
}
NAMES = ["greedy", "coupled", "truncated", "penalties", "counted", "biased"]
Texts = list[list[int]]


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, Texts]:
    """Plain text in the form, by sampling, from the host's engine."""

    async def collect() -> dict[str, Texts]:
        async with serving(tiny_target, device=None) as service:
            return {
                name: texts_of(await run_all(service, SpeculationPlan(), SAMPLINGS[name], **SPEC))
                for name in NAMES
            }

    return asyncio.run(collect())


@pytest.mark.parametrize("name", NAMES)
def test_plain_texts_have_the_form_and_end_where_it_is_complete(
    name: str, texts: dict[str, Texts], tiny_target: Path
) -> None:
    tokenizer = Tokenizer.load(tiny_target)
    for tokens in texts[name]:
        assert tokens[-1] == STOP
        assert re.fullmatch(FORM.text, tokenizer.decode(tokens[:-1]))


@pytest.mark.parametrize("name", NAMES)
async def test_the_device_gives_the_hosts_text(
    name: str, tiny_target: Path, texts: dict[str, Texts]
) -> None:
    async with serving(tiny_target) as service:
        assert (
            texts_of(await run_all(service, SpeculationPlan(), SAMPLINGS[name], **SPEC))
            == texts[name]
        )


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["greedy", "coupled", "counted"])
async def test_drafts_from_outside_change_no_text_and_stand(
    name: str,
    plan: SpeculationPlan,
    device: str | None,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, Texts],
) -> None:
    """The trees hold tokens that the grammar does not allow beside those that stand."""
    known = dict(zip(PROMPTS, texts[name], strict=True))
    async with serving(tiny_target, tiny_head, device=device) as service:
        results = await run_drafted(service, known, plan, SAMPLINGS[name], **SPEC)
    assert texts_of(results) == texts[name]
    assert all(stats.accepted > 0 for _, stats in results)


async def run_one(
    service: VerifierService,
    name: str,
    plan: SpeculationPlan,
    sampling: SamplingParams,
    **other: Any,
) -> tuple[list[int], Any]:
    spec = make_spec(
        name,
        prompt=PROMPTS[0],
        plan=plan,
        sampling=sampling,
        drafter=None,
        **({"max_new_tokens": 40} | other),
    )
    tokens: list[int] = []
    async for event in service.open_session(spec):
        tokens += event.tokens
        stats = event.stats
    return tokens, stats


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_preempted_sessions_go_on_where_their_grammar_was(
    way: str, device: str | None, tiny_target: Path, texts: dict[str, Texts]
) -> None:
    async with serving(tiny_target, device=device, preemption=way) as service:
        preempt_often(service)
        results = await run_all(service, SpeculationPlan(), SAMPLINGS["coupled"], **SPEC)
        assert preemptions(service) >= 6
    assert texts_of(results) == texts["coupled"]


@pytest.mark.parametrize("device", ["cpu", None])
async def test_a_session_goes_on_from_what_another_verifier_emitted(
    device: str | None, tiny_target: Path, texts: dict[str, Texts]
) -> None:
    whole = texts["coupled"][0]
    async with serving(tiny_target, device=device) as service:
        for done in (1, len(whole) // 2, len(whole) - 1):
            moved = {
                **SPEC,
                "prompt": (*PROMPTS[0], *whole[:done]),
                "prompt_len": len(PROMPTS[0]),
                "max_new_tokens": 120 - done,
            }
            spec = make_spec(
                f"s{done}",
                plan=SpeculationPlan(),
                sampling=SAMPLINGS["coupled"],
                drafter=None,
                **moved,
            )
            rest = [t async for event in service.open_session(spec) for t in event.tokens]
            assert [*whole[:done], *rest] == whole
        spec = make_spec(
            "odd",
            plan=SpeculationPlan(),
            drafter=None,
            **(moved | {"prompt": (1, 2, 3, 4)} | {"prompt_len": 2}),
        )
        with pytest.raises(InvalidRequestError, match="does not fit the structured output"):
            [event async for event in service.open_session(spec)]


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TARGET_ONLY])
@pytest.mark.parametrize("device", ["cpu", None])
async def test_rules_that_toss_coins_stay_in_the_grammar_whatever_is_drafted(
    device: str | None, rule: Rule, tiny_target: Path, tiny_head: Path, texts: dict[str, Texts]
) -> None:
    tokenizer = Tokenizer.load(tiny_target)
    sampling = SamplingParams(temperature=1.2, rule=rule, seed=3)
    known = dict(zip(PROMPTS, texts["coupled"], strict=True))
    async with serving(tiny_target, tiny_head, device=device) as service:
        results = await run_drafted(service, known, TREE, sampling, **SPEC)
    for tokens in texts_of(results):
        assert tokens[-1] == STOP
        assert re.fullmatch(FORM.text, tokenizer.decode(tokens[:-1]))


async def test_a_grammar_that_fails_on_the_way_ends_its_session_alone(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = GrammarConstraint.advance_to

    def failing(self: GrammarConstraint, output_ids: Any) -> None:
        follow(self, output_ids)
        if len(output_ids) >= 4:
            self.failure = "too many items"

    monkeypatch.setattr(GrammarConstraint, "advance_to", failing)
    async with serving(tiny_target, device=None) as service:
        bound = asyncio.create_task(
            run_one(service, "bound", SpeculationPlan(), SAMPLINGS["greedy"], **SPEC)
        )
        free = await run_one(service, "free", SpeculationPlan(), SAMPLINGS["greedy"])
        with pytest.raises(InvalidRequestError, match="cannot go on: too many items"):
            await bound
    assert len(free[0]) == 40


async def test_a_verifier_without_a_grammar_library_refuses() -> None:
    async with verifier() as rig:
        result = await rig.run(make_spec(drafter=None, plan=SpeculationPlan(), **SPEC))
        assert isinstance(result.error, FailedPreconditionError)
        assert result.error.reason == "NO_STRUCTURED_OUTPUT"
        await rig.idle()


async def test_a_form_without_an_end_or_with_a_bad_text_is_refused(tiny_target: Path) -> None:
    async with serving(tiny_target, device=None) as service:
        endless = {**SPEC, "stop_token_ids": ()}
        with pytest.raises(InvalidRequestError, match="needs a stop token id"):
            await run_one(service, "endless", SpeculationPlan(), SAMPLINGS["greedy"], **endless)
        bad = {**SPEC, "structured_output": StructuredOutput(StructuredKind.REGEX, "(")}
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            await run_one(service, "bad", SpeculationPlan(), SAMPLINGS["greedy"], **bad)


async def test_who_leaves_while_its_form_is_compiled_leaves_nothing(tiny_target: Path) -> None:
    async with serving(tiny_target, device=None) as service:
        for number in range(5):
            form = StructuredOutput(StructuredKind.REGEX, f"[a-z]{{{number + 3}}}")
            spec = make_spec(
                f"s{number}",
                drafter=None,
                plan=SpeculationPlan(),
                **{**SPEC, "structured_output": form},
            )
            stream = service.open_session(spec)
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        tokens, _ = await run_one(service, "after", SpeculationPlan(), SAMPLINGS["greedy"], **SPEC)
        assert tokens[-1] == STOP
        assert service.core.num_sessions == 0
