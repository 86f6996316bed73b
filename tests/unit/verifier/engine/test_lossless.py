"""Whatever a drafter says, the text is that of plain decoding, and the statistics are right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.wire.messages import FinishReason
from tests.fakes.scripted_drafter import Draft, Followed, ProposeFn, make_tree
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import (
    CHAIN,
    TREE,
    bushy_tree,
    garbage,
    good_chain,
    half_good_chain,
    make_spec,
    verifier,
)

DRAFTS: dict[str, tuple[Callable[[FakeTarget], ProposeFn], SpeculationPlan]] = {
    "good chain": (good_chain, CHAIN),
    "half good chain": (half_good_chain, CHAIN),
    "tree": (bushy_tree, TREE),
    "garbage": (garbage, TREE),
    "no proposal": (lambda _target: lambda _followed: make_tree([]), CHAIN),
}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=0.8, seed=11),
    "coupled with everything": SamplingParams(
        temperature=1.1,
        top_k=12,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        banned_ids=(2, 7),
        seed=5,
    ),
    "greedy with penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5),
}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_the_text_is_that_of_plain_decoding(drafts: str, sampling: str) -> None:
    make, plan = DRAFTS[drafts]
    async with verifier() as rig:
        await rig.attach(make(rig.target))
        specs = [
            make_spec(
                f"s{i}",
                prompt=tuple(range(i, i + 3 + 5 * i)) if i else (9,),
                max_new_tokens=20,
                plan=plan,
                sampling=SAMPLINGS[sampling],
            )
            for i in range(3)
        ]
        results = await rig.run_all(specs)
        for spec, result in zip(specs, results, strict=True):
            assert result.error is None
            assert result.tokens == rig.reference(spec)
            assert result.last.finish_reason is FinishReason.LENGTH
        await rig.idle()


async def test_mixed_rules_share_a_round_and_each_keeps_its_text() -> None:
    plain = SpeculationPlan()
    async with verifier() as rig:
        await rig.attach(half_good_chain(rig.target))
        specs = [
            make_spec("greedy", sampling=SamplingParams()),
            make_spec("coupled", sampling=SamplingParams(temperature=1.0, seed=3)),
            make_spec("plain", plan=plain, drafter=None),
            make_spec("greedy plain", plan=plain, sampling=SamplingParams(temperature=0.7, seed=1)),
        ]
        results = await rig.run_all(specs)
        assert [r.tokens for r in results] == [rig.reference(s) for s in specs]


async def test_good_drafts_are_counted_node_by_node() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target, depth=4))
        result = await rig.run(make_spec(max_new_tokens=16))
    stats = result.last.stats
    # 1 token by prefill, then 5 a round: 4 accepted and the bonus token.
    assert stats.rounds == 3
    assert (stats.emitted, stats.proposed, stats.accepted) == (15, 12, 12)
    assert stats.accepted_per_depth == (3, 3, 3, 3)
    assert stats.fallback_rounds == stats.target_only_rounds == 0
    assert [e.round_id for e in result.events] == [0, 1, 2, 3]
    assert [len(e.tokens) for e in result.events] == [1, 5, 5, 5]


async def test_a_draft_is_trimmed_to_the_remaining_budget() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target, depth=4))
        spec = make_spec(max_new_tokens=9)
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
    stats = result.last.stats
    # 1 by prefill, 5, then 3 remain: a draft of depth 2 fills them.
    assert (stats.rounds, stats.emitted, stats.proposed, stats.accepted) == (2, 8, 6, 6)
    assert stats.accepted_per_depth == (2, 2, 1, 1)


async def test_the_last_single_token_waits_for_no_draft_and_is_no_fallback() -> None:
    async with verifier() as rig:
        wanted: list[bool] = []
        chain = good_chain(rig.target, depth=4)

        def propose(followed: Followed) -> Draft:
            wanted.append(followed.verdicts[-1].draft_wanted)
            return chain(followed)

        await rig.attach(propose)
        result = await rig.run(make_spec(max_new_tokens=7))
        # After 1 + 5 tokens one is left: no draft is asked for.
        assert wanted == [True]
    stats = result.last.stats
    assert (stats.rounds, stats.emitted, stats.fallback_rounds) == (2, 6, 0)


async def test_a_stop_token_inside_an_accepted_draft_ends_the_text_there() -> None:
    target = FakeTarget(num_blocks=256)
    text = target.decode((3, 1, 4, 1, 5), 16, SamplingParams())
    stop = text[3]
    expected = text[: text.index(stop) + 1]
    async with verifier(target=target) as rig:
        await rig.attach(good_chain(target, depth=6))
        result = await rig.run(make_spec(stop_token_ids=(stop,)))
        assert result.tokens == expected
        assert result.last.finish_reason is FinishReason.STOP_TOKEN
        stats = result.last.stats
        assert stats.emitted == len(expected) - 1
        assert stats.accepted == sum(stats.accepted_per_depth) == stats.emitted
        await rig.idle()


@pytest.mark.parametrize("min_new", [0, 1, 6, 9])
@pytest.mark.parametrize("drafts", ["good chain", "tree", "garbage"])
async def test_stop_tokens_are_banned_below_the_minimum_length(drafts: str, min_new: int) -> None:
    target = FakeTarget(vocab_size=6, num_blocks=256, peak=1.0)
    make, plan = DRAFTS[drafts]
    async with verifier(target=target) as rig:
        await rig.attach(make(target))
        for seed in range(4):
            spec = make_spec(
                f"s{seed}",
                plan=plan,
                stop_token_ids=(0, 3),
                min_new_tokens=min_new,
                sampling=SamplingParams(temperature=1.0, seed=seed),
            )
            result = await rig.run(spec)
            assert result.tokens == rig.reference(spec)
            assert len(result.tokens) > min_new or not {0, 3} & set(result.tokens)


async def test_a_resumed_session_continues_the_same_text() -> None:
    sampling = SamplingParams(temperature=0.9, seed=2, presence_penalty=0.5)
    async with verifier() as rig:
        await rig.attach(half_good_chain(rig.target))
        whole = await rig.run(make_spec("whole", max_new_tokens=20, sampling=sampling))
        prompt = (3, 1, 4, 1, 5)
        rest = await rig.run(
            make_spec(
                "rest",
                prompt=(*prompt, *whole.tokens[:8]),
                prompt_len=len(prompt),
                max_new_tokens=12,
                epoch=1,
                sampling=sampling,
            )
        )
    assert whole.tokens[8:] == rest.tokens


async def test_a_rejection_session_without_a_law_is_judged_target_only() -> None:
    sampling = SamplingParams(temperature=1.0, seed=4, rule=Rule.REJECTION)
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        result = await rig.run(make_spec(sampling=sampling))
    assert len(result.tokens) == 16
    assert result.last.stats.target_only_rounds > 0


async def test_an_ngram_drafter_gets_tokens_without_features() -> None:
    plan = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=4, proposal_timeout_ms=30_000)
    seen: list[Followed] = []

    def propose(followed: Followed) -> Draft:
        seen.append(followed)
        return make_tree([])

    async with verifier() as rig:
        await rig.attach(propose)
        spec = make_spec(plan=plan)
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
    assert seen
    assert all(v.features is None for v in seen[0].verdicts)
