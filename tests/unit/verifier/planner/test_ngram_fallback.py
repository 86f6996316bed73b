"""Lookups in the session's own text stand in for a drafter, and change no text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree
from outrider.wire.messages import SessionSpec
from tests.fakes.scripted_drafter import Followed, ProposeFn, make_tree
from tests.fakes.target import FakeTarget
from tests.unit.verifier.device_serving import SAMPLINGS as DEVICE_SAMPLINGS
from tests.unit.verifier.device_serving import run_all, run_proposed, serving
from tests.unit.verifier.harness import (
    Rig,
    garbage,
    good_chain,
    make_spec,
    verifier,
)
from tests.waiting import until

PLAN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=6, proposal_timeout_ms=20)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=0.7, seed=11),
    "penalties": SamplingParams(repetition_penalty=1.05, presence_penalty=0.1),
}


class Repeating(FakeTarget):
    """Says what it said seven tokens ago, most of the time."""

    def logits(self, context: Sequence[int]) -> NDArray[np.float32]:
        logits = super().logits(context)
        if len(context) >= 7 and len(context) % 40 != 0:
            logits[context[-7]] += 12.0
        return logits


def silent(_target: FakeTarget) -> ProposeFn:
    """A drafter that never answers."""
    return lambda _followed: None


def spec(sampling: SamplingParams, name: str = "s", *, tokens: int = 200) -> SessionSpec:
    prompt = np.random.default_rng(len(name)).integers(0, 24, 12).tolist()
    return make_spec(name, prompt=prompt, max_new_tokens=tokens, plan=PLAN, sampling=sampling)


def never_pauses(rig: Rig) -> None:
    """What the planner finds of drafts that are worth nothing depends on time."""
    rig.target.forward_s = 0.002
    rig.service._core.policy.should_pause = lambda session: False  # type: ignore[method-assign]


def counted(rig: Rig, name: str) -> int:
    return rig.service._core.counters[name]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", [silent, garbage])
async def test_it_drafts_where_a_drafter_is_silent_or_worse(
    drafter: ProposeFn, sampling: str
) -> None:
    async with verifier(
        target=Repeating(num_blocks=1024), planner="automatic", ngram_fallback=True
    ) as rig:
        never_pauses(rig)
        await rig.attach(drafter(rig.target))
        specs = [spec(SAMPLINGS[sampling], name) for name in ("s", "st", "str")]
        for each, result in zip(specs, await rig.run_all(specs), strict=True):
            assert result.tokens == rig.reference(each)
        assert counted(rig, "ngram_fallback_rounds") > 20
        assert counted(rig, "ngram_fallback_accepted_tokens") > 2 * counted(
            rig, "ngram_fallback_rounds"
        )
        await rig.idle()


@pytest.mark.parametrize("drafter", [silent, garbage])
async def test_it_goes_on_when_the_drafter_is_lost(drafter: ProposeFn) -> None:
    async with verifier(
        target=Repeating(num_blocks=1024), planner="automatic", ngram_fallback=True
    ) as rig:
        never_pauses(rig)
        drafts = await rig.attach(drafter(rig.target))
        each = spec(SAMPLINGS["greedy"], tokens=400)
        running = asyncio.create_task(rig.run(each))
        sessions = rig.service._core.sessions
        await until(lambda: any(session.emitted > 80 for session in sessions.values()))
        (session,) = sessions.values()
        await drafts.detach()
        await until(lambda: session.link_id is None)
        emitted, rounds = session.emitted, session.round_id
        result = await running
        assert result.tokens == rig.reference(each)
        assert result.last.stats.rounds - rounds < (400 - emitted) / 2
        await rig.idle()


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.TARGET_ONLY])
async def test_rules_that_ask_for_a_law_take_a_draft_without_one(rule: Rule) -> None:
    sampling = SamplingParams(temperature=0.7, seed=5, rule=rule)
    async with verifier(target=Repeating(num_blocks=1024), planner="automatic") as rig:
        never_pauses(rig)
        # Long enough that what else a machine does is little beside it: whether a draft is worth
        # its rows is a matter of times.
        rig.target.forward_s = 0.002
        await rig.attach(silent(rig.target))
        result = await rig.run(spec(sampling))
        assert result.error is None and len(result.tokens) == 200
        assert counted(rig, "ngram_fallback_accepted_tokens") > 20
        # It says what its target says: the period is kept but where that is broken.
        said = [a == b for a, b in zip(result.tokens[20:], result.tokens[13:], strict=False)]
        assert np.mean(said) > 0.9
        await rig.idle()


@pytest.mark.parametrize("settings", [{"planner": "fixed"}, {"ngram_fallback": False}])
async def test_it_does_not_where_plans_are_carried_out_as_they_are(
    settings: dict[str, object],
) -> None:
    asked = {"planner": "automatic", **settings}
    async with verifier(target=Repeating(num_blocks=1024), **asked) as rig:
        await rig.attach(garbage(rig.target))
        result = await rig.run(spec(SamplingParams(), tokens=60))
        assert result.tokens == rig.reference(spec(SamplingParams(), tokens=60))
        assert counted(rig, "ngram_fallback_rounds") == 0


async def test_a_good_drafter_of_a_text_that_does_not_repeat_is_left_alone() -> None:
    async with verifier(
        target=FakeTarget(vocab_size=400, num_blocks=1024), planner="automatic"
    ) as rig:
        rig.target.forward_s = 0.002
        await rig.attach(good_chain(rig.target))
        asked = spec(SamplingParams())
        result = await rig.run(asked)
        assert result.tokens == rig.reference(asked)
        assert counted(rig, "ngram_fallback_rounds") == 0
        assert counted(rig, "proposals_used") > 3


async def test_rounds_keep_within_their_nodes() -> None:
    target = Repeating(num_blocks=1024)
    settings = {"decode_tokens_per_round": 9, "prefill_tokens_per_round": 12}
    async with verifier(target=target, planner="automatic", **settings) as rig:
        rig.target.forward_s = 0.002
        await rig.attach(garbage(rig.target))
        specs = [spec(SamplingParams(), "s" * n, tokens=80) for n in (1, 2, 3, 4)]
        for each, result in zip(specs, await rig.run_all(specs), strict=True):
            assert result.tokens == rig.reference(each)
        assert counted(rig, "ngram_fallback_rounds") > 0
        # Prompts, of twelve tokens, run as a whole.
        rounds = [[segment.num_rows for segment in batch.segments] for batch in target.batches]
        assert max(sum(rows) for rows in rounds if 12 not in rows) <= 9


@pytest.mark.parametrize("name", ["greedy", "coupled", "penalties"])
async def test_on_a_device_texts_are_the_hosts(
    name: str, tiny_target: Path, tiny_head: Path
) -> None:
    """Lookups of some rows share launches with trees of others."""
    # Of three ids, so that three of them in a row come back soon.
    few = tuple((token, 60.0) for token in (7, 8, 9))
    sampling = replace(DEVICE_SAMPLINGS[name], logit_bias=few)
    asked = {"max_new_tokens": 120}
    async with serving(tiny_target, device=None) as host:
        texts = [tokens for tokens, _ in await run_all(host, SpeculationPlan(), sampling, **asked)]
    async with serving(tiny_target, tiny_head, planner="automatic") as service:
        core = service._core
        core.policy.should_pause = lambda session: False  # type: ignore[method-assign]
        plan = SpeculationPlan(
            method=DraftMethod.EAGLE3, draft_tokens=6, top_k=2, proposal_timeout_ms=30
        )
        found = await run_proposed(service, wrong_trees_for_some, plan, sampling, **asked)
        assert [tokens for tokens, _ in found] == texts
        assert core.counters["ngram_fallback_rounds"] > 0
        assert core.counters["proposals_used"] > 0


def wrong_trees_for_some(followed: Followed) -> DraftTree | None:
    """One session hears nothing of its drafter."""
    if followed.start.session_id == "s1":
        return None
    return make_tree([1, 2, 3, 4], [-1, -1, 0, 1])
