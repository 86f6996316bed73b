"""What sessions leave behind: others begin with it, get the texts that they would have had, and
their drafters hear of all that nobody computed for them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from outrider_verifier.kv.prefix_cache import PrefixCache
from outrider_verifier.server import engine_builder

from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from tests.fakes.scripted_drafter import Followed
from tests.fakes.target import FakeTarget
from tests.unit.verifier.device_serving import OWN, PROMPTS, SAMPLINGS, run_all, serving
from tests.unit.verifier.harness import CHAIN, Rig, good_chain, half_good_chain, make_spec, verifier
from tests.waiting import until

PLAIN: dict[str, Any] = {"drafter": None, "plan": SpeculationPlan()}
NGRAM = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=4, proposal_timeout_ms=30_000)
PROMPT = tuple((5 * i + i // 7) % 24 for i in range(21))
"""Five blocks of four tokens, and the token behind them."""


def computed(rig: Rig) -> int:
    """Prompt tokens that rounds have computed."""
    return rig.service.core.counters["prefill_tokens"]


def found(rig: Rig) -> int:
    """Tokens whose KV was there."""
    return rig.service.core.counters["prefix_cache_hit_tokens"]


async def check(rig: Rig, *specs: Any) -> list[int]:
    """Serve these one after the other; how many tokens of each were found. The texts are right."""
    counts: list[int] = []
    for spec in specs:
        before = found(rig)
        result = await rig.run(spec)
        assert result.error is None
        assert result.tokens == rig.reference(spec)
        counts.append(found(rig) - before)
    return counts


async def test_a_prompt_that_was_served_before_is_computed_from_its_last_block_on() -> None:
    async with verifier() as rig:
        assert await check(rig, make_spec(prompt=PROMPT, **PLAIN)) == [0]
        before = computed(rig)
        other = (*PROMPT[:16], 23, *PROMPT[17:])
        again = [make_spec(prompt=p, **PLAIN) for p in (PROMPT, PROMPT[:20], PROMPT[:3], other)]
        # The token behind a block is a part of what it is known by.
        assert await check(rig, *again) == [20, 16, 0, 12]
        assert computed(rig) - before == 1 + 4 + 3 + 9
        info = await rig.service.info()
        assert (info.prefix_cache_query_tokens, info.prefix_cache_hit_tokens) == (
            21 + 21 + 20 + 3 + 21,
            48,
        )


async def test_the_first_event_of_a_session_says_how_much_of_its_prompt_was_found() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        answer = (await rig.run(make_spec("a", prompt=PROMPT, **PLAIN))).tokens
        drafted = make_spec("b", prompt=PROMPT, plan=NGRAM)
        # As after a failover: tokens of the answer are no tokens of the prompt.
        moved = make_spec("c", prompt=PROMPT + tuple(answer[:12]), prompt_len=18, **PLAIN)
        for spec, cached in ((drafted, 20), (moved, 18), (make_spec("d", **PLAIN), 0)):
            first, *others = (await rig.run(spec)).events
            assert first.cached_tokens == cached
            assert others and not any(event.cached_tokens for event in others)


async def test_sessions_that_run_share_blocks_of_a_device_and_have_copies_on_a_cpu(
    tiny_target: Path,
) -> None:
    prompt = tuple(range(60, 100))
    for device in ("cpu", None):
        async with serving(tiny_target, device=device) as service:
            alone = await run_all(service, SpeculationPlan(), SamplingParams(), prompts=(prompt,))
            core = service.core
            together = asyncio.ensure_future(
                run_all(
                    service, SpeculationPlan(), SamplingParams(), prompts=(prompt, prompt, prompt)
                )
            )
            shared = 0
            while not together.done():
                held = [block for s in list(core.sessions.values()) for block in s.kv.blocks[:2]]
                shared = max(shared, sum(count > 1 for count in Counter(held).values()))
                await asyncio.sleep(0)
            texts = [tokens for tokens, _ in await together]
            count = len(alone[0][0])
            assert all(text[:count] == alone[0][0] for text in texts)
            assert core.counters["prefix_cache_hit_tokens"] == 3 * 32
            assert shared == (2 if device else 0)


async def test_a_conversation_goes_on_behind_its_answer() -> None:
    async with verifier() as rig:
        first = make_spec(prompt=PROMPT[:9], max_new_tokens=20, **PLAIN)
        answer = (await rig.run(first)).tokens
        follow_up = PROMPT[:9] + tuple(answer) + (1, 2, 3)
        # The last token was emitted and never written.
        assert await check(rig, make_spec(prompt=follow_up, **PLAIN)) == [28]


async def test_nothing_is_left_of_what_was_cut_off_an_answer() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        spec = make_spec(prompt=PROMPT[:9], max_new_tokens=9, plan=NGRAM)
        answer = (await rig.run(spec)).tokens
        truth = rig.reference(make_spec(prompt=PROMPT[:9], max_new_tokens=30, **PLAIN))
        follow_up = PROMPT[:9] + tuple(answer) + tuple(truth[9:20])
        assert await check(rig, make_spec(prompt=follow_up, **PLAIN)) == [16]


@pytest.mark.parametrize("method", [DraftMethod.EAGLE3, DraftMethod.NGRAM])
async def test_a_drafter_hears_of_every_position_that_nobody_computed(method: DraftMethod) -> None:
    plan = SpeculationPlan(method=method, draft_tokens=4, proposal_timeout_ms=30_000)
    heard: dict[str, Followed] = {}
    async with verifier() as rig:
        propose = good_chain(rig.target)

        def note(followed: Followed) -> Any:
            heard[str(followed.start.session_id)] = followed
            return propose(followed)

        await rig.attach(note)
        specs = [make_spec(name, prompt=PROMPT, plan=plan) for name in ("first", "second")]
        assert await check(rig, *specs) == [0, 20]
    second = heard["second"]
    assert second.tokens[: len(PROMPT)] == list(PROMPT)
    if method is DraftMethod.EAGLE3:
        contexts = [second.tokens[: i + 1] for i in range(len(second.features))]
        expected = [2.0 * rig.target.feature(context) for context in contexts]
        assert np.array_equal(np.array(second.features), np.array(expected))
        assert len(second.features) >= 20
    else:
        assert not second.features


async def test_who_needs_features_computes_what_others_left_without_them() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        plain = make_spec("a", prompt=PROMPT, **PLAIN)
        drafted = [make_spec(name, prompt=PROMPT) for name in "bc"]
        # The second of them finds the features that the first one left.
        assert await check(rig, plain, *drafted) == [0, 0, 20]
        assert rig.service.core.block_manager.prefix_feature_bytes > 0


async def test_a_drafter_that_comes_later_is_caught_up_over_what_was_found() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.002
        first = await rig.attach(good_chain(rig.target))
        await check(rig, make_spec("a", prompt=PROMPT))
        await first.detach()
        spec = make_spec("b", prompt=PROMPT, max_new_tokens=60)
        run = asyncio.ensure_future(rig.run(spec))
        sessions = rig.service.core.sessions
        await until(lambda: any(s.emitted > 5 for s in list(sessions.values())))
        assert found(rig) == 20
        second = await rig.attach(good_chain(rig.target))
        result = await run
        assert result.tokens == rig.reference(spec)
        assert second.starts == 1
        assert result.last.stats.accepted > 0


async def test_features_beyond_the_budget_go_those_used_longest_ago_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of 2 float32: six blocks of four tokens.
    small = {"feature_bytes": 6 * 4 * 8}
    monkeypatch.setattr(
        engine_builder, "PrefixCache", lambda pool, **given: PrefixCache(pool, **given | small)
    )
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        block_manager = rig.service.core.block_manager
        other = tuple(23 - token for token in PROMPT)
        specs = [
            make_spec(f"s{n}", prompt=prompt, max_new_tokens=2)
            for n, prompt in enumerate((PROMPT, PROMPT, other, other, PROMPT))
        ]
        # One block of the first prompt has kept them, its first.
        assert await check(rig, *specs) == [0, 20, 0, 20, 4]
        assert block_manager.prefix_feature_bytes <= 6 * 4 * 8


async def test_a_session_whose_features_would_not_fit_computes_them() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        await check(rig, make_spec("a", prompt=PROMPT))
        store = rig.service.core.store
        assert store is not None
        store.budget_bytes = 16 * 8
        assert await check(rig, make_spec("b", prompt=PROMPT)) == [0]


@pytest.mark.parametrize("by_tables", [False, True])
async def test_what_is_left_goes_where_blocks_are_needed_and_texts_stay_right(
    by_tables: bool,
) -> None:
    rng = random.Random(7)
    target = FakeTarget(num_blocks=40)
    target.pool.use_block_tables(by_tables)
    async with verifier(target=target, max_sessions=6) as rig:
        lengths: Any = rig.service.core.block_manager.lengths
        # It lets in more than fit, so that some are preempted.
        lengths.expected_len = lambda emitted, most: emitted
        await rig.attach(half_good_chain(rig.target))
        stems = [[rng.randrange(24) for _ in range(30)] for _ in range(3)]
        specs = []
        for n in range(40):
            stem = rng.choice(stems)[: rng.randrange(1, 30)]
            plan: dict[str, Any] = [PLAIN, {"plan": CHAIN}, {"plan": NGRAM}][n % 3]
            sampling = SamplingParams(temperature=0.8, seed=n) if n % 4 == 0 else SamplingParams()
            prompt = (*stem, rng.randrange(24))
            specs.append(make_spec(f"s{n}", prompt=prompt, sampling=sampling, **plan))
        for start in range(0, 40, 8):
            part = specs[start : start + 8]
            for spec, result in zip(part, await rig.run_all(part), strict=True):
                assert result.error is None and result.tokens == rig.reference(spec)
        assert found(rig) > 0
        assert rig.service.core.block_manager.prefix_blocks <= 40
        await rig.idle()


async def test_a_preempted_session_finds_what_it_had_written() -> None:
    async with verifier(max_sessions=1, preemption="recompute") as rig:
        rig.target.forward_s = 0.002
        await rig.attach(good_chain(rig.target))
        spec = make_spec("low", prompt=PROMPT, max_new_tokens=40, priority=0)
        run = asyncio.ensure_future(rig.run(spec))
        sessions = rig.service.core.sessions
        await until(lambda: any(s.emitted > 8 for s in list(sessions.values())))
        urgent = make_spec("high", prompt=(1, 2), max_new_tokens=2, priority=1, **PLAIN)
        assert (await rig.run(urgent)).tokens == rig.reference(urgent)
        result = await run
        assert result.tokens == rig.reference(spec)
        assert rig.service.core.counters["preemptions_recompute"] == 1
        assert found(rig) >= 28
        # What it finds of its own KV is not what its prompt found.
        assert not any(event.cached_tokens for event in result.events)


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_kv_of_a_prefix_that_is_computed_again_is_compared(
    is_damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with verifier(check_prefix_kv=True) as rig:
        counters, storage = rig.service.core.counters, rig.target.pool.storage
        await rig.attach(good_chain(rig.target))
        # A session without a drafter leaves no features, so that the next one computes its prompt.
        await check(rig, make_spec("a", prompt=PROMPT, **PLAIN))
        if is_damaged:
            storage.add_(torch.arange(storage.shape[3])[:, None])
        await check(rig, make_spec("b", prompt=PROMPT))
        compared = counters["prefix_kv_comparisons"]
        assert compared >= 5
        assert counters["prefix_kv_differences"] == (compared if is_damaged else 0)
        assert ("the KV of a prefix has other bits" in caplog.text) == is_damaged


async def test_switched_off_nothing_is_kept() -> None:
    async with verifier(prefix_cache=False) as rig:
        spec = make_spec(prompt=PROMPT, **PLAIN)
        assert await check(rig, spec, spec) == [0, 0]
        assert rig.service.core.block_manager.prefix_blocks == 0
        assert (await rig.run(spec)).events[0].cached_tokens == 0


async def test_a_session_that_failed_leaves_nothing_but_its_prompt() -> None:
    async with verifier() as rig:
        spec = make_spec(prompt=PROMPT, max_new_tokens=30, **PLAIN)

        def fail(batch: Any) -> None:
            if int(batch.segments[0].positions[0]) > 35:
                raise RuntimeError("on purpose")

        rig.target.before_forward = fail
        failed = await rig.run(spec)
        assert failed.error is not None
        rig.target.before_forward = None
        follow_up = PROMPT + tuple(failed.tokens) + (1,)
        assert await check(rig, make_spec(prompt=follow_up, **PLAIN)) == [20]


@pytest.mark.parametrize(("placement", "name"), [("fused", "greedy"), ("colocated", "coupled")])
async def test_an_own_head_drafts_the_same_behind_what_it_did_not_compute(
    name: str, placement: str, tiny_target: Path, tiny_head: Path
) -> None:
    async def served(**settings: Any) -> list[Any]:
        async with serving(tiny_target, tiny_head, placement=placement, **settings) as service:
            plain = await run_all(service, SpeculationPlan(), SAMPLINGS[name])
            drafted = [await run_all(service, OWN, SAMPLINGS[name]) for _ in range(2)]
            assert service.core.counters["prefix_cache_hit_tokens"] == (
                # A plain session leaves no KV of the head, so who drafts computes its prompt.
                sum((len(p) - 1) // 16 * 16 for p in PROMPTS) if not settings else 0
            )
        return [plain, *drafted]

    with_cache, without = await served(), await served(prefix_cache=False)
    for mine, reference in zip(with_cache, without, strict=True):
        for (text, stats), (truth, known) in zip(mine, reference, strict=True):
            assert text == truth
            assert (stats.accepted, stats.proposed) == (known.accepted, known.proposed)


async def test_features_of_large_blocks_are_held_in_several_chunks() -> None:
    target = FakeTarget(num_blocks=32, block_tokens=48)
    prompt = tuple((7 * i + i // 5) % 24 for i in range(120))
    heard: dict[str, Followed] = {}
    async with verifier(target=target) as rig:
        propose = good_chain(rig.target)

        def note(followed: Followed) -> Any:
            heard[str(followed.start.session_id)] = followed
            return propose(followed)

        await rig.attach(note)
        assert await check(rig, *(make_spec(name, prompt=prompt) for name in "ab")) == [0, 96]
        assert rig.service.core.block_manager.prefix_feature_bytes == 2 * 48 * 8
    features = np.array(heard["b"].features)
    contexts = [heard["b"].tokens[: i + 1] for i in range(len(features))]
    assert np.array_equal(features, np.array([2.0 * target.feature(c) for c in contexts]))


async def test_blocks_that_a_head_in_the_process_has_missed_are_not_taken_for_whole(
    tiny_target: Path, tiny_head: Path
) -> None:
    prompt = tuple((7 * i) % 300 for i in range(160))
    async with serving(tiny_target, tiny_head, placement="fused") as service:
        core, name = service.core, SessionId("p")

        async def changed() -> None:
            spec = make_spec("p", prompt=prompt, max_new_tokens=4, **PLAIN)
            async for _ in service.open_session(spec):
                pass

        run = asyncio.ensure_future(changed())
        await until(lambda: name in core.sessions and core.sessions[name].written_positions >= 32)
        await service.set_plan(name, OWN)
        await run
        blocks = core.block_manager.prefix_blocks
        assert blocks >= len(prompt) // 16
        before = core.counters["prefix_cache_hit_tokens"]
        await run_all(service, OWN, SamplingParams(), prompts=(prompt,))
        assert core.counters["prefix_cache_hit_tokens"] == before
        # The same blocks are whole now.
        await run_all(service, OWN, SamplingParams(), prompts=(prompt,))
        assert core.counters["prefix_cache_hit_tokens"] == before + 16 * ((len(prompt) - 1) // 16)
