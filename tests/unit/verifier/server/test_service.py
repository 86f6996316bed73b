"""The service: admission, refusals, leaving, failures of a round, and what `info` says."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest
from outrider_bench.hooks.round_delay import RoundDelay, TargetDuration
from outrider_verifier.model_runner.cpu_runner import CpuModelRunner
from outrider_verifier.state.session import Session

from outrider.engine.target import ForwardBatch
from outrider.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import DraftTree
from outrider.wire.messages import FinishReason
from tests.fakes.target import FakeProjection, FakeTarget
from tests.unit.verifier.harness import (
    CHAIN,
    close,
    garbage,
    good_chain,
    half_good_chain,
    make_spec,
    verifier,
)
from tests.waiting import until


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ()}, "EMPTY_PROMPT"),
        ({"prompt": (1, 24)}, "TOKEN_OUT_OF_RANGE"),
        ({"prompt": (-1,)}, "TOKEN_OUT_OF_RANGE"),
        ({"stop_token_ids": (24,)}, "TOKEN_OUT_OF_RANGE"),
        ({"prompt_len": 6}, "INVALID_PROMPT_LEN"),
        ({"max_new_tokens": 0}, "INVALID_MAX_NEW_TOKENS"),
        ({"max_new_tokens": 4096}, "CONTEXT_TOO_LONG"),
        ({"plan": SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=17)}, "INVALID_PLAN"),
    ],
)
async def test_a_request_that_can_never_be_served_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    async with verifier() as rig:
        result = await rig.run(make_spec(**changes))
        assert isinstance(result.error, InvalidRequestError)
        assert result.error.reason == reason
        await rig.idle()


async def test_a_session_that_does_not_fit_now_waits_its_turn() -> None:
    # A token is decoded at a time: 5 of prompt and 16 of output take 6 blocks of 4; 10 are there.
    async with verifier(target=FakeTarget(num_blocks=10), max_preemptions=0) as rig:
        rig.target.forward_s = 0.01
        first = asyncio.create_task(
            rig.run(make_spec("first", plan=SpeculationPlan(), drafter=None))
        )
        await until(lambda: rig.service.core.num_sessions == 1)
        second = await rig.run(make_spec("second", plan=SpeculationPlan(), drafter=None))
        assert first.done()
        assert second.tokens == first.result().tokens == rig.reference(make_spec())
        await rig.idle()


async def test_the_number_of_sessions_is_bounded() -> None:
    async with verifier(max_sessions=2, max_waiting=0) as rig:
        rig.target.forward_s = 0.01
        results = await rig.run_all([make_spec(f"s{i}") for i in range(3)])
        errors = [r.error for r in results if r.error]
        assert len(errors) == 1
        assert isinstance(errors[0], ResourceExhaustedError)


async def test_a_session_id_in_use_is_refused_unless_the_epoch_is_newer() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        old = asyncio.create_task(rig.run(make_spec(max_new_tokens=200)))
        await until(lambda: rig.service.core.num_sessions == 1)
        again = await rig.run(make_spec())
        assert isinstance(again.error, AlreadyExistsError)
        newer = await rig.run(make_spec(epoch=1))
        assert newer.tokens == rig.reference(make_spec())
        assert all(event.epoch == 1 for event in newer.events)
        replaced = await old
        assert replaced.last.finish_reason is FinishReason.CANCELLED
        await rig.idle()


async def test_closing_the_iterator_frees_everything() -> None:
    async with verifier() as rig:
        # Slow enough that the session could not end by itself while the test waits.
        rig.target.forward_s = 0.05
        await rig.attach(half_good_chain(rig.target))
        stream = rig.service.open_session(make_spec(max_new_tokens=900))
        await anext(stream)
        await anext(stream)
        assert rig.target.pool.free_blocks < rig.target.pool.total_blocks
        await close(stream)
        await rig.idle()


async def test_closing_by_id_ends_the_stream_with_cancelled_and_is_idempotent() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.005
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=500)))
        await until(lambda: rig.service.core.num_sessions == 1)
        await rig.service.close_session(SessionId("s"))
        assert rig.target.pool.free_blocks == rig.target.pool.total_blocks
        await rig.service.close_session(SessionId("s"))
        result = await running
        assert result.last.finish_reason is FinishReason.CANCELLED
        assert result.last.tokens == ()


async def test_a_thousand_cancelled_sessions_leak_nothing() -> None:
    rng = random.Random(0)
    async with verifier(max_sessions=64) as rig:
        drafter = await rig.attach(garbage(rig.target))
        (link,) = rig.service.drafter_connections.links

        async def one(number: int) -> None:
            stream = rig.service.open_session(
                make_spec(f"s{number}", prompt=(1,) * rng.randint(1, 20), max_new_tokens=100)
            )
            events = rng.choice([0, 0, 1, 2])
            try:
                async with asyncio.timeout(rng.choice([0.0, 0.001, 5.0])):
                    for _ in range(events):
                        await anext(stream)
            except (TimeoutError, OutriderError):
                pass
            finally:
                await close(stream)

        for start in range(0, 1000, 20):
            await asyncio.gather(*(one(start + i) for i in range(20)))
        await rig.idle()
        assert rig.service.router_streams.num_sessions == 0
        handles = np.arange(2 * 64)
        assert not rig.service.core.verdict_builder.announced_mask(link.link_id, handles).any()
        await until(lambda: drafter.sessions == {})


async def test_an_exception_in_a_round_fails_its_sessions_and_never_the_loop() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))

        def explode(batch: ForwardBatch) -> None:
            # By then the other one is through, or it is not in this round.
            if len(batch.segments) == 1 and batch.segments[0].sequence.len > 30:
                raise RuntimeError("injected")

        rig.target.before_forward = explode
        long, short = await rig.run_all(
            [make_spec("long", max_new_tokens=100), make_spec("short", max_new_tokens=4)]
        )
        assert isinstance(long.error, InternalError)
        assert short.error is None
        rig.target.before_forward = None
        spec = make_spec("after")
        assert (await rig.run(spec)).tokens == rig.reference(spec)
        await rig.idle()
        assert rig.service.core.counters["failed_rounds"] == 1


async def test_a_round_that_fails_after_some_rows_were_settled_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        commit = Session.commit_tokens
        calls = iter(range(1000))

        def sometimes(*arguments: Any) -> None:
            if next(calls) == 3:
                raise RuntimeError("injected")
            commit(*arguments)

        monkeypatch.setattr(Session, "commit_tokens", sometimes)
        results = await rig.run_all([make_spec(f"s{i}", max_new_tokens=40) for i in range(3)])
        assert any(isinstance(r.error, InternalError) for r in results)
        await rig.idle()


async def test_an_unknown_session_has_no_plan_to_change() -> None:
    async with verifier() as rig:
        with pytest.raises(NotFoundError):
            await rig.service.set_plan(SessionId("nobody"), CHAIN)


async def test_a_plan_that_needs_missing_features_is_refused() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        ngram = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=2)
        running = asyncio.create_task(rig.run(make_spec(plan=ngram, max_new_tokens=50)))
        await until(lambda: rig.service.core.num_sessions == 1)
        with pytest.raises(InvalidRequestError):
            await rig.service.set_plan(SessionId("s"), CHAIN)
        assert (await running).error is None


async def test_prompts_and_decoding_sessions_share_forwards() -> None:
    async with verifier(prefill_tokens_per_round=8) as rig:
        rig.target.forward_s = 0.002
        specs = [make_spec(f"s{i}", prompt=(2,) * 30, drafter=None) for i in range(4)]
        results = await rig.run_all(specs)
        assert all(r.tokens == rig.reference(s) for r, s in zip(results, specs, strict=True))
        batches = rig.target.batches
        assert any({s.num_rows == 1 for s in b.segments} == {True, False} for b in batches)
        assert max(int(b.token_ids.shape[0]) for b in batches) <= 8 + 4
        assert len(batches) < sum(16 + 4 for _ in specs)


async def test_info_counts_sessions_blocks_rounds_and_drafters() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        rig.target.forward_s = 0.005
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=600)))
        await until(lambda: rig.service.core.counters["rounds"] > 5)
        info = await rig.service.info()
        assert info.sessions == 1
        assert info.kv_free_blocks < info.kv_total_blocks == 256
        assert [(d.drafter_id, d.sessions) for d in info.drafters] == [("drafter-0", 1)]
        assert info.feature_fingerprint == "fake-projection"
        # A session longer than the whole KV budget is no context that could be served.
        assert info.max_context_len == 256 * 4 - 16
        await running
        info = await rig.service.info()
        assert info.tokens_total == 600
        assert info.forward_ms_p50 >= 5.0
        assert info.round_ms_p50 >= info.forward_ms_p50
        assert info.overhead_ms_p50 > 0.0


async def test_rounds_last_as_long_as_a_larger_models() -> None:
    target = FakeTarget(num_blocks=256)
    throttle = RoundDelay(TargetDuration(round_s=0.02, row_s=0.001))
    runner = CpuModelRunner(target, FakeProjection(), max_nodes=16, throttle=throttle)
    async with verifier(target=target, runner=runner) as rig:
        spec = make_spec(drafter=None, max_new_tokens=6)
        assert (await rig.run(spec)).tokens == rig.reference(spec)
        assert (await rig.service.info()).forward_ms_p50 >= 20.0
        await rig.attach(good_chain(rig.target))
        # Five rows a round: most of the rounds now.
        await rig.run(make_spec(max_new_tokens=60))
        assert (await rig.service.info()).forward_ms_p50 >= 24.0


async def test_rounds_with_an_empty_proposal_are_no_fallback_rounds() -> None:
    async with verifier() as rig:
        await rig.attach(lambda followed: DraftTree.chain(np.empty(0, np.int32)))
        await rig.run(make_spec(max_new_tokens=16))
        await rig.idle()
        read = rig.service.metrics.registry.get_sample_value
        # The last token needs no proposal.
        assert read("outrider_verifier_empty_proposal_rounds_total") == 14
        assert read("outrider_verifier_fallback_rounds_total") == 0


async def test_metrics_tell_what_happened() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        await rig.run(make_spec(max_new_tokens=16))
        await rig.idle()
        read = rig.service.metrics.registry.get_sample_value
        assert read("outrider_verifier_emitted_tokens_total") == 16
        assert read("outrider_verifier_accepted_tokens_total") == 12
        assert read("outrider_verifier_proposals_total", {"outcome": "used"}) == 3
        assert read("outrider_verifier_fallback_rounds_total") == 0
        assert read("outrider_verifier_kv_blocks_free") == 256
        assert read("outrider_verifier_round_seconds_count", {"part": "forward"}) == 4
        assert read("outrider_verifier_drafters_connected") == 1


async def test_draining_refuses_new_sessions_and_lets_the_running_ones_finish() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        running = asyncio.create_task(rig.run(make_spec(drafter=None)))
        await until(lambda: rig.service.core.num_sessions == 1)
        draining = asyncio.create_task(rig.service.drain(5.0))
        await asyncio.sleep(0)
        refused = await rig.run(make_spec("late"))
        assert isinstance(refused.error, UnavailableError)
        assert refused.error.reason == "DRAINING"
        assert (await rig.service.info()).draining
        assert await draining
        assert (await running).error is None


async def test_stopping_fails_what_still_runs_and_ends_the_thread() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=500)))
        await until(lambda: rig.service.core.num_sessions == 1)
        assert not await rig.service.drain(0.05)
        await rig.service.stop()
        result = await running
        assert isinstance(result.error, UnavailableError)
        assert result.error.reason == "DRAINING"
        assert "outrider-engine" not in [thread.name for thread in threading.enumerate()]
        late = await rig.run(make_spec("late"))
        assert isinstance(late.error, UnavailableError)
