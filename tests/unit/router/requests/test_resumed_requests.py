"""Requests that have emitted already when this router hears of them: they go on where they were."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_router.requests.request import ValidatedRequest, tokenize_prompt, validate_request
from outrider_router.requests.request_output import RequestOutput
from outrider_router.requests.running_requests import RequestEntry, run_unless_failed
from outrider_router.requests.service import RouterService

from outrider.errors import UnavailableError
from outrider.ids import RequestId
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateRequest,
    PromptInfo,
    StoppingOptions,
    StreamEvent,
)
from outrider.wire.messages import FinishReason
from tests.fakes.router import running_router, sample
from tests.fakes.tokenizer import EOS_ID
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request


async def job_of(router: RouterService, request: GenerateRequest) -> ValidatedRequest:
    return validate_request(
        request,
        await tokenize_prompt(request.prompt, router.tokenizer),
        info=FakeVerifier.describe(),
        tokenizer=router.tokenizer,
        config=router.config,
        seed=5,
    )


async def taken_up(
    router: RouterService, request: GenerateRequest, emitted: list[int]
) -> list[StreamEvent]:
    entry = RequestEntry(
        request_id=RequestId("old"), arrived_at=0.0, output=RequestOutput(token_ids=emitted)
    )
    router.running_requests.add_entry(entry)
    try:
        job = await run_unless_failed(entry, lambda: job_of(router, request))
        async with aclosing(router.serving.run_request(entry, job)) as events:
            return [event async for event in events]
    finally:
        router.running_requests.close_entry(entry)


def text_of(events: list[StreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


async def test_the_client_hears_of_all_tokens_and_the_verifier_gets_them_as_prefix(
    router: RouterService, verifier: FakeVerifier
) -> None:
    ids = list(router.tokenizer.encode("ab"))
    events = await taken_up(router, text_request(max_tokens=8), list(ids))
    info, first, finish = events[0], events[1], events[-1]
    assert isinstance(info, PromptInfo) and info.prompt_tokens == 3
    assert first == Delta(text="ab", token_ids=tuple(ids))
    assert text_of(events) == "abcabcab"
    assert isinstance(finish, FinishInfo)
    assert (finish.reason, finish.usage.completion_tokens) == (FinishReason.LENGTH, 8)
    (spec,) = verifier.specs
    assert spec.token_ids == router.tokenizer.encode("abcab")
    assert (spec.prompt_len, spec.max_new_tokens, spec.sampling.seed) == (3, 6, 5)
    assert sample(router, "outrider_resumed_sessions_total", cause="router_lost") == 1
    await assert_all_freed(router, verifier)


@pytest.mark.parametrize(
    ("emitted", "ends", "stop", "reason", "text"),
    [
        ("abcdef", False, (), FinishReason.LENGTH, "abcdef"),
        ("ab", True, (), FinishReason.STOP_TOKEN, "ab"),
        ("abcd", False, ("cd",), FinishReason.STOP_STRING, "ab"),
    ],
)
async def test_a_text_that_had_come_to_its_end_needs_no_session(
    router: RouterService,
    verifier: FakeVerifier,
    emitted: str,
    ends: bool,
    stop: tuple[str, ...],
    reason: FinishReason,
    text: str,
) -> None:
    ids = [*router.tokenizer.encode(emitted), *([EOS_ID] if ends else [])]
    request = replace(text_request(), stopping=StoppingOptions(max_tokens=6, stop=stop))
    events = await taken_up(router, request, ids)
    finish = events[-1]
    assert isinstance(finish, FinishInfo) and finish.reason is reason
    assert text_of(events) == text
    assert finish.stop_token_id == (EOS_ID if ends else None)
    assert verifier.specs == []
    await assert_all_freed(router, verifier)


async def test_it_waits_for_a_verifier_that_is_not_there_yet(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.lost.set()
    async with running_router(
        tmp_path, {"v": verifier}, wait=False, failover_timeout_s=10.0
    ) as router:
        ids = list(router.tokenizer.encode("ab"))
        task = asyncio.create_task(taken_up(router, text_request(max_tokens=4), ids))
        await asyncio.sleep(0.1)
        assert not task.done()
        verifier.lost.clear()
        assert text_of(await task) == "abca"


async def test_when_none_comes_the_error_says_what_was_emitted(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.lost.set()
    async with running_router(
        tmp_path, {"v": verifier}, wait=False, failover_timeout_s=0.1
    ) as router:
        ids = list(router.tokenizer.encode("ab"))
        with pytest.raises(UnavailableError, match="the answer is incomplete after 2 tokens"):
            await taken_up(router, text_request(max_tokens=4), ids)
