"""What a request yields: its stream, its text, its place in the metrics."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from outrider_router.requests.service import RouterService

from outrider.ids import RequestId
from outrider.wire.inference import (
    ChatMessage,
    ChatPrompt,
    Delta,
    FinishInfo,
    GenerateRequest,
    PromptInfo,
    SamplingOptions,
    StoppingOptions,
    TextPrompt,
)
from outrider.wire.messages import FinishReason
from tests.fakes.router import sample
from tests.fakes.tokenizer import EOS_ID
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, collect, text_request
from tests.waiting import until


async def test_a_stream_is_prompt_info_then_deltas_then_finish(
    router: RouterService, verifier: FakeVerifier
) -> None:
    events = await collect(router, text_request())
    assert isinstance(events[0], PromptInfo) and events[0].prompt_tokens == 3
    deltas = [event for event in events if isinstance(event, Delta)]
    assert deltas == events[1:-1]
    assert "".join(delta.text for delta in deltas) == "abcabc"
    finish = events[-1]
    assert isinstance(finish, FinishInfo)
    assert finish.reason is FinishReason.LENGTH
    assert finish.usage.completion_tokens == 6
    assert finish.stats.emitted == 5
    await assert_all_freed(router, verifier)


async def test_unary_and_stream_say_the_same(router: RouterService) -> None:
    result = await router.generate(text_request(request_id=RequestId("mine")))
    assert (result.request_id, result.model, result.text) == ("mine", "fake", "abcabc")
    assert router.tokenizer.decode(result.token_ids) == "abcabc"


async def test_a_conversation_goes_through_the_chat_template(
    router: RouterService, verifier: FakeVerifier
) -> None:
    await router.generate(
        GenerateRequest(
            prompt=ChatPrompt((ChatMessage(role="user", content="Hi"),)),
            stopping=StoppingOptions(max_tokens=1),
        )
    )
    expected = router.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert verifier.specs[0].token_ids == expected


async def test_the_models_end_of_turn_stops_and_contributes_no_text(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = lambda spec: [*router.tokenizer.encode("ok"), EOS_ID, 70, 71]
    result = await router.generate(text_request(max_tokens=20))
    assert (result.text, result.token_ids[-1]) == ("ok", EOS_ID)
    assert result.finish.reason is FinishReason.STOP_TOKEN
    assert result.finish.stop_token_id == EOS_ID


async def test_ignore_eos_drops_the_models_own_stop_ids_only(
    router: RouterService, verifier: FakeVerifier
) -> None:
    request = GenerateRequest(
        prompt=TextPrompt("a"),
        stopping=StoppingOptions(max_tokens=2, ignore_eos=True, stop_token_ids=(7,)),
    )
    await router.generate(request)
    assert verifier.specs[0].stop_token_ids == (7,)


@pytest.mark.parametrize("tokens_per_round", [1, 2, 3, 50])
async def test_a_stop_string_across_rounds_cuts_text_and_ids_at_the_same_place(
    router: RouterService, verifier: FakeVerifier, tokens_per_round: int
) -> None:
    verifier.tokens_per_round = tokens_per_round
    verifier.script = lambda spec: router.tokenizer.encode("one\n\ntwo and three")
    request = GenerateRequest(
        prompt=TextPrompt("a"), stopping=StoppingOptions(max_tokens=40, stop=("\n\ntw", "zzz"))
    )
    result = await router.generate(request)
    assert result.text == "one"
    assert router.tokenizer.decode(result.token_ids) == "one\n\ntw"
    assert result.finish.reason is FinishReason.STOP_STRING
    assert result.finish.stop_string == "\n\ntw"
    assert result.finish.usage.completion_tokens == 7
    await assert_all_freed(router, verifier)


async def test_a_character_is_never_shown_in_halves(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = lambda spec: router.tokenizer.encode("\u20ac\U0001f680!")
    events = await collect(router, text_request(max_tokens=8))
    texts = [event.text for event in events if isinstance(event, Delta) and event.text]
    assert "".join(texts) == "\u20ac\U0001f680!"
    assert all("\ufffd" not in text for text in texts)


async def test_a_slow_client_gets_the_rounds_that_came_meanwhile_in_one_message(
    router: RouterService, verifier: FakeVerifier
) -> None:
    async with aclosing(router.stream(text_request(max_tokens=50))) as events:
        await anext(events)
        first = await anext(events)
        await until(lambda: not verifier.live)
        rest = [event async for event in events]
    assert isinstance(first, Delta)
    assert [type(event) for event in rest] == [Delta, FinishInfo]


async def test_seeds_are_drawn_unless_given(router: RouterService, verifier: FakeVerifier) -> None:
    for options in (SamplingOptions(seed=0), SamplingOptions(), SamplingOptions()):
        await router.generate(text_request(sampling=options))
    seeds = [spec.sampling.seed for spec in verifier.specs]
    assert seeds[0] == 0 and len(set(seeds)) == 3


async def test_what_a_session_did_is_in_the_metrics(
    router: RouterService, verifier: FakeVerifier
) -> None:
    await router.generate(text_request(max_tokens=10))
    assert sample(router, "outrider_requests_total", outcome="length") == 1
    assert sample(router, "outrider_generation_tokens_total") == 10
    assert sample(router, "outrider_prompt_tokens_total") == 3
    assert sample(router, "outrider_rounds_total") == 9
    assert sample(router, "outrider_fallback_rounds_total") == 9
    assert sample(router, "outrider_time_to_first_token_seconds_count") == 1
    assert sample(router, "outrider_inter_token_latency_seconds_count") == 9
    assert sample(router, "outrider_queue_depth", priority="0") == 0
