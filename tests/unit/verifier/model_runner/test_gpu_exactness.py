"""The device engine in service where exactness is least comfortable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.draft_sampling import DistributionLimits
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from tests.fakes.scripted_drafter import Draft, Followed, ProposeFn, make_tree
from tests.reference.host_rounds import draft
from tests.unit.verifier.device_serving import (
    OWN,
    PROMPTS,
    SAMPLINGS,
    plain_texts,
    run_all,
    run_drafted,
    run_proposed,
    serving,
)
from tests.unit.verifier.harness import CHAIN, TREE


@pytest.fixture(scope="module")
def texts(tiny_target: Path) -> dict[str, list[list[int]]]:
    """See `plain_texts`."""
    return plain_texts(tiny_target)


@pytest.mark.parametrize("plan", [CHAIN, TREE, OWN], ids=["chain", "tree", "own"])
async def test_coupled_text_in_bfloat16_is_the_plain_text(
    plan: SpeculationPlan, tiny_target: Path, tiny_head: Path
) -> None:
    """At this width the CPU's products do not depend on how many rows share them."""
    sampling = SamplingParams(temperature=1.3, seed=5)
    async with serving(tiny_target, weights=torch.bfloat16) as service:
        plain = [tokens for tokens, _ in await run_all(service, SpeculationPlan(), sampling)]
    settings = {"placement": "fused"} if plan is OWN else {}
    async with serving(tiny_target, tiny_head, weights=torch.bfloat16, **settings) as service:
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
    for module in ("outrider_verifier.exchange.verdict_builder", "tests.fakes.scripted_drafter"):
        monkeypatch.setattr(f"{module}.extend_digest", lambda digest, ids: 7)
    monkeypatch.setattr(
        "outrider_verifier.exchange.verdict_builder.extend_ragged",
        lambda digests, counts, ids: np.full(len(digests), 7, np.uint64),
    )

    def late(followed: Followed) -> Draft:
        prompt = next(p for p in PROMPTS if tuple(followed.tokens[: len(p)]) == p)
        done = len(followed.tokens) - len(prompt)
        return make_tree(known[prompt][max(done - 1, 0) :][:3])

    async with serving(tiny_target, tiny_head) as service:
        results = await run_proposed(service, late, CHAIN, SAMPLINGS[name])
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


DRAFT_LOGITS = 0.3 * torch.randn(384, 384, generator=torch.Generator().manual_seed(8))
"""By the newest token."""


def drawn(*widths: int) -> ProposeFn:
    """Drafts by the session's rule from DRAFT_LOGITS, with the distributions that they were drawn
    from."""

    def propose(followed: Followed) -> Draft:
        def logits(context: NDArray[np.int64]) -> Tensor:
            last = context[:, -1] if context.shape[1] else np.array([followed.tokens[-1]])
            return DRAFT_LOGITS[torch.from_numpy(last)]

        sampling, position = followed.start.sampling, len(followed.tokens)
        found = draft(
            logits, [sampling], [position], widths, limits=DistributionLimits(max_ids=300)
        )
        return found.tree(0), found.law(0)

    return propose


@pytest.mark.parametrize(
    ("plan", "widths"), [(CHAIN, (1, 1, 1)), (TREE, (3, 2))], ids=["chain", "tree"]
)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
async def test_laws_from_outside_are_judged_as_the_host_judges_them(
    plan: SpeculationPlan,
    widths: tuple[int, ...],
    temperature: float,
    tiny_target: Path,
    tiny_head: Path,
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=21, rule=Rule.REJECTION)
    found = []
    for device in (None, "cpu"):
        async with serving(tiny_target, tiny_head, device=device) as service:
            results = await run_proposed(service, drawn(*widths), plan, sampling)
        found.append([(tokens, stats.accepted, stats.proposed) for tokens, stats in results])
        assert sum(stats.accepted for _, stats in results) > 3
        assert all(stats.target_only_rounds == 0 for _, stats in results)
    assert found[0] == found[1]


@pytest.mark.parametrize("rule", Rule)
async def test_a_drafter_in_service_is_not_told_the_seed(
    rule: Rule, tiny_target: Path, tiny_head: Path
) -> None:
    sampling = SamplingParams(temperature=0.9, seed=2**63 + 5, rule=rule)
    told: list[SamplingParams] = []

    def propose(followed: Followed) -> Draft:
        told.append(followed.start.sampling)
        return make_tree([1, 2])

    async with serving(tiny_target, tiny_head) as service:
        await run_proposed(service, propose, CHAIN, sampling)
    assert set(told) == {sampling.for_drafter()}
    assert told[0].seed == 0 and told[0].draft_key is not None
