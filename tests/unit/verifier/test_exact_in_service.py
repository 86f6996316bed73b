"""The device engine in service where exactness is least comfortable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.spec.plan import Plan
from outrider.spec.sampling import Rule, SamplingParams
from tests.fakes.scripted_drafter import Draft, Followed, make_tree
from tests.unit.verifier import device_serving
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


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    """See `plain_texts`."""
    return plain_texts(tiny_target)


@pytest.mark.parametrize("plan", [CHAIN, TREE, OWN], ids=["chain", "tree", "own"])
async def test_coupled_text_in_bfloat16_is_the_plain_text(
    plan: Plan, tiny_target: Path, tiny_head: Path
) -> None:
    """At this width the CPU's products do not depend on how many rows share them."""
    sampling = SamplingParams(temperature=1.3, seed=5)
    async with serving(tiny_target, dtype=torch.bfloat16) as service:
        plain = [tokens for tokens, _ in await run_all(service, Plan(), sampling)]
    settings = {"placement": "fused"} if plan is OWN else {}
    async with serving(tiny_target, tiny_head, dtype=torch.bfloat16, **settings) as service:
        if plan is OWN:
            results = await run_all(service, plan, sampling)
        else:
            known = dict(zip(PROMPTS, plain, strict=True))
            results = await run_drafted(service, known, plan, sampling)
    assert [tokens for tokens, _ in results] == plain
    assert sum(stats.accepted for _, stats in results) > 0


@pytest.mark.parametrize("name", ["greedy", "coupled"])
async def test_proposals_for_other_prefixes_of_the_same_digest_change_no_text(
    name: str,
    tiny_target: Path,
    tiny_head: Path,
    texts: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All digests collide, and what is proposed was drafted for a prefix one token shorter."""
    known = dict(zip(PROMPTS, texts[name], strict=True))
    for module in (
        "outrider_verifier.sessions",
        "outrider_verifier.handover",
        "tests.fakes.scripted_drafter",
    ):
        monkeypatch.setattr(f"{module}.extend_digest", lambda digest, ids: 7)

    def late(text: dict[tuple[int, ...], list[int]], plan: Plan) -> object:
        def propose(followed: Followed) -> Draft:
            prompt = next(p for p in PROMPTS if tuple(followed.tokens[: len(p)]) == p)
            done = len(followed.tokens) - len(prompt)
            return make_tree(text[prompt][max(done - 1, 0) :][:3])

        return propose

    monkeypatch.setattr(device_serving, "follow", late)
    async with serving(tiny_target, tiny_head) as service:
        results = await run_drafted(service, known, CHAIN, SAMPLINGS[name])
    assert [tokens for tokens, _ in results] == texts[name]
    assert all(stats.proposed > 20 for _, stats in results)
    assert all(stats.accepted < stats.proposed / 4 for _, stats in results)


async def test_the_device_says_when_a_law_was_missing(
    tiny_target: Path, tiny_head: Path, texts: dict[str, list[list[int]]]
) -> None:
    known = dict(zip(PROMPTS, texts["greedy"], strict=True))
    sampling = SamplingParams(temperature=0.7, seed=9, rule=Rule.REJECTION)
    async with serving(tiny_target, tiny_head) as service:
        results = await run_drafted(service, known, CHAIN, sampling)
    assert all(0 < stats.target_only_rounds <= stats.rounds for _, stats in results)
    target_only = SamplingParams(temperature=0.7, seed=9, rule=Rule.TARGET_ONLY)
    async with serving(tiny_target, tiny_head) as service:
        results = await run_drafted(service, known, CHAIN, target_only)
    assert all(stats.target_only_rounds == 0 for _, stats in results)
