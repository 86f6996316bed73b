"""Where sessions are placed, and what the loss of a verifier or drafter does to them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from outrider_router.api.server_status import make_server_info
from outrider_router.requests.service import RouterService

from outrider.errors import UnavailableError
from outrider.spec.plan import DraftMethod
from outrider.wire.inference import SpeculationOptions
from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request
from tests.waiting import soon, until


async def test_while_no_verifier_is_healthy_requests_are_unavailable(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.lost.set()
    async with running_router(tmp_path, {"v": verifier}, wait=False) as router:
        with pytest.raises(UnavailableError) as caught:
            await router.generate(text_request())
        assert caught.value.retry_after_s is not None


def break_stream(verifier: FakeVerifier) -> None:
    verifier.lost.set()


def hang(verifier: FakeVerifier) -> None:
    verifier.hung = True


@pytest.mark.parametrize("kill", [break_stream, hang])
async def test_a_lost_verifier_without_another_is_a_typed_error_in_time_that_says_what_was_emitted(
    tmp_path: Path, kill: object
) -> None:
    assert callable(kill)
    verifier = FakeVerifier(round_s=0.01)
    async with running_router(tmp_path, {"v": verifier}, failover_timeout_s=0.5) as router:
        task = asyncio.create_task(router.generate(text_request(max_tokens=1000)))
        await until(
            lambda: any(len(entry.output.token_ids) >= 3 for entry in router.running_requests)
        )
        (entry,) = router.running_requests
        kill(verifier)
        with pytest.raises(UnavailableError, match="incomplete") as caught:
            await soon(task)
        assert caught.value.reason == "VERIFIER_LOST"
        assert f"{len(entry.output.token_ids)} tokens" in caught.value.message
        await until(lambda: router.registry.any_verifier_info() is None)
        assert sample(router, "outrider_verifier_losses_total", verifier="v0") == 1
        verifier.lost.clear()
        verifier.hung = False
        verifier.change_info(incarnation="2")
        await until(lambda: router.registry.any_verifier_info() is not None)
        assert (await router.generate(text_request())).text == "abcabc"
        await assert_all_freed(router, verifier)


async def test_a_restart_between_two_looks_is_a_pause_of_its_sessions(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    task = asyncio.create_task(router.generate(text_request()))
    await until(lambda: verifier.live)
    verifier.gate, gate = None, verifier.gate
    verifier.change_info(incarnation="2")
    assert (await soon(task)).text == "abcabc"
    gate.set()
    assert [spec.epoch for spec in verifier.specs] == [0, 1]
    await assert_all_freed(router, verifier)


async def test_the_loss_of_the_drafter_is_counted_and_the_stream_goes_on(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.005)
    drafter = FakeDrafter({"v": verifier})
    async with running_router(tmp_path, {"v": verifier}, {"d": drafter}) as router:
        task = asyncio.create_task(router.generate(text_request(max_tokens=60)))
        await until(
            lambda: any(
                entry.drafter and entry.drafter.is_attached for entry in router.running_requests
            )
        )
        assert verifier.specs[0].drafter_id == "d0"
        drafter.lost = True
        verifier.drafters_alive = False
        verifier.change_info(drafters=())
        result = await task
        assert result.text == "abc" * 20
        assert result.finish.stats.fallback_rounds > 0
        assert sample(router, "outrider_drafter_losses_total", drafter="d0") == 1
        assert sample(router, "outrider_drafter_up", drafter="d0") == 0
        assert sample(router, "outrider_drafter_detached_sessions_total") == 1
        await router.generate(text_request())
        assert verifier.specs[-1].drafter_id is None
        drafter.lost, verifier.drafters_alive = False, True
        drafter.change_info(incarnation="2")
        await until(lambda: sample(router, "outrider_drafter_up", drafter="d0") == 1)
        await router.generate(text_request())
        assert verifier.specs[-1].drafter_id == "d0"
        assert drafter.attached == ["v", "v"]


async def test_opting_out_of_speculation_places_no_drafter(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    drafter = FakeDrafter({"v": verifier})
    async with running_router(tmp_path, {"v": verifier}, {"d": drafter}) as router:
        for options in (
            SpeculationOptions(enabled=False),
            SpeculationOptions(method=DraftMethod.NONE),
            SpeculationOptions(draft_tokens=0),
        ):
            await router.generate(text_request(speculation=options))
        assert [spec.drafter_id for spec in verifier.specs] == [None] * 3
        assert not any(spec.plan.is_speculative for spec in verifier.specs)


async def test_sessions_spread_over_two_verifiers(tmp_path: Path) -> None:
    first, second = FakeVerifier(round_s=0.01), FakeVerifier(round_s=0.01)
    first.change_info(verifier_id="va")
    second.change_info(verifier_id="vb")
    async with running_router(tmp_path, {"a": first, "b": second}) as router:
        await until(lambda: sample(router, "outrider_verifier_up", verifier="vb") == 1)
        await until(lambda: sample(router, "outrider_verifier_up", verifier="va") == 1)
        await asyncio.gather(*(router.generate(text_request(max_tokens=20)) for _ in range(8)))
    assert (len(first.specs), len(second.specs)) == (4, 4)


async def test_a_verifier_that_drafts_itself_gets_its_sessions_without_a_drafter(
    tmp_path: Path, verifier: FakeVerifier
) -> None:
    verifier.change_info(
        in_process_methods=(DraftMethod.EAGLE3,),
        in_process_draft_length=3,
        simulated_acceptance="2.6",
    )
    drafter = FakeDrafter({"v": verifier})
    async with running_router(tmp_path, {"v": verifier}, {"d": drafter}) as router:
        for method in (None, DraftMethod.EAGLE3, DraftMethod.NGRAM):
            wish = SpeculationOptions(method=method, draft_tokens=7)
            result = await router.generate(text_request(speculation=wish))
        stats = result.finish.stats
        own, asked, remote = verifier.specs
        for spec in (own, asked):
            assert (spec.drafter_id, spec.plan.method) == (None, DraftMethod.EAGLE3)
            assert (spec.plan.draft_tokens, spec.plan.top_k) == (3, 1)
        assert remote.plan.draft_tokens == 7
        assert remote.drafter_id is not None
        assert stats.fallback_rounds == 0
        (summary,) = make_server_info(router).verifiers
        assert summary.in_process_methods == (DraftMethod.EAGLE3,)
        assert summary.simulated_acceptance == "2.6"
