"""What is refused, with what is allowed, and what waits for its turn."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from outrider_router.requests.service import RouterService

from outrider.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.ids import RequestId
from outrider.wire.inference import (
    GenerateRequest,
    SamplingOptions,
    SpeculationOptions,
    TextPrompt,
    TokenPrompt,
)
from outrider.wire.messages import FinishReason
from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request
from tests.waiting import until


async def test_a_full_queue_refuses_with_a_retry_hint(tmp_path: Path) -> None:
    verifier = FakeVerifier(max_sessions=1)
    verifier.gate = asyncio.Event()
    async with running_router(tmp_path, {"v": verifier}, queue_limit=2) as router:
        tasks = [asyncio.create_task(router.generate(text_request())) for _ in range(6)]
        await until(lambda: sum(task.done() for task in tasks) == 3)
        verifier.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [o for o in outcomes if isinstance(o, ResourceExhaustedError)]
        assert len(refused) == 3 and len([o for o in outcomes if not isinstance(o, Exception)]) == 3
        assert all(o.retry_after_s and o.retry_after_s > 0 for o in refused)
        await assert_all_freed(router, verifier)


async def test_sessions_that_do_not_fit_wait_for_their_turn(tmp_path: Path) -> None:
    verifier = FakeVerifier(kv_blocks=12, round_s=0.001)
    async with running_router(tmp_path, {"v": verifier}) as router:
        results = await asyncio.gather(
            *(router.generate(text_request(str(i) * 8, max_tokens=8)) for i in range(8))
        )
        assert [r.text for r in results] == [str(i) * 8 for i in range(8)]
        await assert_all_freed(router, verifier)


async def test_a_verifier_without_room_is_tried_again(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.refusals = 2
    result = await router.generate(text_request())
    assert result.text == "abcabc"
    await assert_all_freed(router, verifier)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (GenerateRequest(prompt=TextPrompt("")), "no tokens"),
        (GenerateRequest(prompt=TokenPrompt((1, 259))), r"\[0, 259\)"),
        (text_request(max_tokens=0), "max_tokens"),
        (text_request(max_tokens=100_000), "leaves"),
        (text_request(sampling=SamplingOptions(temperature=-1.0)), "temperature"),
        (text_request(sampling=SamplingOptions(banned_token_ids=(999,))), "banned_token_ids"),
        (text_request(speculation=SpeculationOptions(draft_tokens=10_000)), "draft_tokens"),
        (text_request("x" * 3000), "context"),
        (text_request(request_id=RequestId("")), "request_id"),
    ],
)
async def test_bad_requests_are_refused_with_what_is_allowed(
    router: RouterService, verifier: FakeVerifier, request_: GenerateRequest, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        await router.generate(request_)
    await assert_all_freed(router, verifier)


async def test_more_kv_than_any_verifier_has_is_invalid_not_queued(tmp_path: Path) -> None:
    verifier = FakeVerifier(kv_blocks=8)
    async with running_router(tmp_path, {"v": verifier}) as router:
        with pytest.raises(InvalidRequestError):
            await router.generate(text_request(max_tokens=100))


async def test_an_unknown_model_is_not_found(router: RouterService) -> None:
    with pytest.raises(NotFoundError, match="'fake' is"):
        await router.generate(text_request(model="other"))


async def test_two_running_requests_may_not_share_an_id(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    twin = text_request(max_tokens=1000, request_id=RequestId("twin"))
    async with aclosing(router.stream(twin)) as events:
        await anext(events)
        with pytest.raises(AlreadyExistsError):
            await router.generate(twin)
    await assert_all_freed(router, verifier)


async def test_draining_refuses_new_requests_and_lets_the_running_ones_end(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    task = asyncio.create_task(router.generate(text_request(max_tokens=10)))
    await until(lambda: verifier.live)
    draining = asyncio.create_task(router.drain(5.0))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await router.generate(text_request())
    assert await draining
    assert (await task).finish.reason is FinishReason.LENGTH
