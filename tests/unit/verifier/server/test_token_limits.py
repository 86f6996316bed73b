"""Sessions with allowed ids and bad words: one text, whoever computes, drafts or went before."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.token_limits import TokenLimits
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

ALLOWED = tuple(range(40, 72))
Texts = list[list[int]]


def follows(tokens: list[int], limits: TokenLimits) -> bool:
    """Whether nothing was emitted that the limits forbid."""
    allowed = not limits.allowed_ids or set(tokens) <= set(limits.allowed_ids)
    return allowed and not any(
        tuple(tokens[at : at + len(word)]) == word
        for word in limits.bad_words
        for at in range(len(tokens))
    )


async def plain(target: Path, limits: TokenLimits, sampling: SamplingParams) -> Texts:
    """Text by sampling, from the host's engine."""
    async with serving(target, device=None) as service:
        return texts_of(await run_all(service, SpeculationPlan(), sampling, token_limits=limits))


@pytest.fixture(scope="module")
def limits(tiny_target: Path) -> TokenLimits:
    """Bad words that the texts would have: pairs of what comes with the allowed ids alone."""
    free = asyncio.run(plain(tiny_target, TokenLimits(allowed_ids=ALLOWED), SAMPLINGS["coupled"]))
    assert all(set(tokens) <= set(ALLOWED) for tokens in free)
    words = [tuple(tokens[at : at + 2]) for tokens in free for at in (3, 9, 15)]
    return TokenLimits(allowed_ids=ALLOWED, bad_words=(*words, tuple(free[0][:3])))


@pytest.fixture(scope="module")
def texts(tiny_target: Path, limits: TokenLimits) -> dict[str, Texts]:
    return {
        name: asyncio.run(plain(tiny_target, limits, SAMPLINGS[name]))
        for name in ("greedy", "coupled", "penalties")
    }


def test_nothing_is_emitted_that_is_forbidden(texts: dict[str, Texts], limits: TokenLimits) -> None:
    for tokens in itertools.chain(*texts.values()):
        assert len(tokens) >= 24 and follows(tokens, limits)


@pytest.mark.parametrize("name", ["greedy", "coupled", "penalties"])
async def test_the_device_gives_the_hosts_text(
    name: str, tiny_target: Path, texts: dict[str, Texts], limits: TokenLimits
) -> None:
    async with serving(tiny_target) as service:
        results = await run_all(service, SpeculationPlan(), SAMPLINGS[name], token_limits=limits)
    assert texts_of(results) == texts[name]


@pytest.mark.parametrize(("device", "plan"), [("cpu", TREE), (None, TREE), (None, CHAIN)])
async def test_drafts_from_outside_change_no_text_and_stand(
    plan: SpeculationPlan,
    device: str | None,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, Texts],
    limits: TokenLimits,
) -> None:
    """The trees hold ids that are not allowed beside those that stand."""
    known = dict(zip(PROMPTS, texts["coupled"], strict=True))
    async with serving(tiny_target, tiny_head, device=device) as service:
        results = await run_drafted(service, known, plan, SAMPLINGS["coupled"], token_limits=limits)
    assert texts_of(results) == texts["coupled"]
    assert all(stats.accepted > 0 for _, stats in results)


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [({}, 4), ({"draft_length": 6, "draft_top_k": 3}, 6)],
    ids=["chain", "tree"],
)
async def test_own_drafts_change_no_text_and_stand(
    settings: dict[str, Any],
    nodes: int,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, Texts],
    limits: TokenLimits,
) -> None:
    plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=nodes)
    async with serving(tiny_target, tiny_head, placement="fused", **settings) as service:
        results = await run_all(service, plan, SAMPLINGS["coupled"], token_limits=limits)
    assert texts_of(results) == texts["coupled"]
    assert sum(stats.accepted for _, stats in results) > 0


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TARGET_ONLY])
async def test_rules_that_toss_coins_emit_nothing_that_is_forbidden(
    rule: Rule, tiny_target: Path, tiny_head: Path, limits: TokenLimits
) -> None:
    sampling = SamplingParams(temperature=1.2, rule=rule, seed=3)
    async with serving(tiny_target, tiny_head, placement="fused") as service:
        results = await run_all(service, OWN, sampling, token_limits=limits)
    assert all(follows(tokens, limits) and stats.proposed > 0 for tokens, stats in results)


@pytest.mark.parametrize(("device", "way"), [("cpu", "recompute"), (None, "swap")])
async def test_preempted_sessions_go_on_with_the_same_limits(
    way: str,
    device: str | None,
    tiny_target: Path,
    texts: dict[str, Texts],
    limits: TokenLimits,
) -> None:
    async with serving(tiny_target, device=device, preemption=way) as service:
        preempt_often(service)
        results = await run_all(
            service, SpeculationPlan(), SAMPLINGS["coupled"], token_limits=limits
        )
        assert preemptions(service) >= 6
    assert texts_of(results) == texts["coupled"]


async def test_a_session_goes_on_from_what_another_verifier_emitted(
    tiny_target: Path, texts: dict[str, Texts], limits: TokenLimits
) -> None:
    whole = texts["coupled"][0]
    async with serving(tiny_target, device=None) as service:
        for done in (1, 3, 10):
            spec = make_spec(
                f"s{done}",
                prompt=(*PROMPTS[0], *whole[:done]),
                prompt_len=len(PROMPTS[0]),
                max_new_tokens=len(whole) - done,
                plan=SpeculationPlan(),
                sampling=SAMPLINGS["coupled"],
                drafter=None,
                token_limits=limits,
            )
            rest = [t async for event in service.open_session(spec) for t in event.tokens]
            assert [*whole[:done], *rest] == whole


async def test_a_form_and_limits_hold_together(tiny_target: Path) -> None:
    tokenizer = Tokenizer.load(tiny_target)
    a, b = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    options = {
        "structured_output": StructuredOutput(StructuredKind.REGEX, "[abc]{8}"),
        "stop_token_ids": (2,),
        "token_limits": TokenLimits(allowed_ids=(a, b), bad_words=((a, a), (b, b))),
    }
    async with serving(tiny_target, device=None) as service:
        results = await run_all(service, SpeculationPlan(), SAMPLINGS["coupled"], **options)
    for tokens in texts_of(results):
        assert tokenizer.decode(tokens) in ("abababab", "babababa") and tokens[-1] == 2


async def test_ids_beyond_the_vocabulary_are_refused(tiny_target: Path) -> None:
    async with serving(tiny_target, device=None) as service:
        for odd in (TokenLimits(allowed_ids=(384,)), TokenLimits(bad_words=((1, 384),))):
            with pytest.raises(InvalidRequestError, match="bad words must be in"):
                await run_all(service, SpeculationPlan(), SAMPLINGS["greedy"], token_limits=odd)
