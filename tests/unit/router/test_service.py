"""The life of a request, on scripted verifiers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from outrider_router.service import RouterService
from outrider_router.status import server_info

from outrider.errors import (
    AlreadyExistsError,
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.ids import RequestId
from outrider.spec.plan import DraftMethod
from outrider.wire.inference import (
    ChatMessage,
    ChatPrompt,
    Delta,
    FinishInfo,
    GenerateRequest,
    PromptInfo,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    StreamEvent,
    TextPrompt,
    TokenPrompt,
)
from outrider.wire.messages import FinishReason, SessionSpec
from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import eventually, running_router, sample
from tests.fakes.tokenizer import EOS_ID
from tests.fakes.verifier import FakeVerifier


def text_request(
    text: str = "abc", *, max_tokens: int | None = 6, **more: object
) -> GenerateRequest:
    return GenerateRequest(
        prompt=TextPrompt(text),
        stopping=StoppingOptions(max_tokens=max_tokens),
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def verifier() -> FakeVerifier:
    return FakeVerifier()


@pytest.fixture
async def router(tmp_path: Path, verifier: FakeVerifier) -> AsyncGenerator[RouterService]:
    async with running_router(tmp_path, {"v": verifier}, queue_limit=2) as service:
        yield service


def assert_all_freed(service: RouterService, verifier: FakeVerifier) -> None:
    assert not verifier.live
    assert len(service.journal) == 0
    assert service.admission.running == service.admission.waiting == 0
    assert service.admission.reserved_tokens == 0


async def collect(service: RouterService, request: GenerateRequest) -> list[StreamEvent]:
    return [event async for event in service.stream(request)]


def saying(text: str, router: RouterService) -> object:
    """A script that emits this text."""
    return lambda spec: router.tokenizer.encode(text)


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
    assert_all_freed(router, verifier)


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
    assert_all_freed(router, verifier)


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
        await eventually(lambda: not verifier.live)
        rest = [event async for event in events]
    assert isinstance(first, Delta)
    assert [type(event) for event in rest] == [Delta, FinishInfo]


async def test_closing_the_stream_frees_everything(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    events = router.stream(text_request(max_tokens=1000))
    for _ in range(3):
        await anext(events)
    assert verifier.live
    await events.aclose()
    assert_all_freed(router, verifier)
    assert sample(router, "outrider_requests_total", outcome="CANCELLED") == 1


async def test_cancelling_the_task_frees_everything(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    task = asyncio.create_task(router.generate(text_request(max_tokens=1000)))
    await eventually(lambda: verifier.live)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_all_freed(router, verifier)


async def test_abort_by_id_ends_running_and_queued_requests_and_is_idempotent(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(max_sessions=1, round_s=0.01)
    async with running_router(tmp_path, {"v": verifier}) as router:
        running, queued = RequestId("running"), RequestId("queued")
        tasks = [
            asyncio.create_task(router.generate(text_request(max_tokens=1000, request_id=id_)))
            for id_ in (running, queued)
        ]
        await eventually(lambda: router.admission.waiting == 1 and verifier.live)
        assert router.abort([running, queued, RequestId("unknown")]) == (running, queued)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, CancelledRequestError)
            assert outcome.reason == "ABORTED"
        assert router.abort([running, queued]) == ()
        assert_all_freed(router, verifier)


async def test_a_deadline_ends_a_running_request(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    with pytest.raises(DeadlineExceededError):
        await router.generate(text_request(max_tokens=1000), timeout_s=0.1)
    assert_all_freed(router, verifier)


async def test_a_deadline_ends_a_queued_request(tmp_path: Path) -> None:
    verifier = FakeVerifier(max_sessions=1, round_s=0.01)
    async with running_router(tmp_path, {"v": verifier}) as router:
        holder = asyncio.create_task(router.generate(text_request(max_tokens=1000)))
        await eventually(lambda: verifier.live)
        with pytest.raises(DeadlineExceededError):
            await router.generate(text_request(), timeout_s=0.1)
        assert router.admission.waiting == 0
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        assert_all_freed(router, verifier)


async def test_a_full_queue_refuses_with_a_retry_hint(tmp_path: Path) -> None:
    verifier = FakeVerifier(max_sessions=1)
    verifier.gate = asyncio.Event()
    async with running_router(tmp_path, {"v": verifier}, queue_limit=2) as router:
        tasks = [asyncio.create_task(router.generate(text_request())) for _ in range(6)]
        await eventually(lambda: sum(task.done() for task in tasks) == 3)
        verifier.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [o for o in outcomes if isinstance(o, ResourceExhaustedError)]
        assert len(refused) == 3 and len([o for o in outcomes if not isinstance(o, Exception)]) == 3
        assert all(o.retry_after_s and o.retry_after_s > 0 for o in refused)
        assert_all_freed(router, verifier)


async def test_sessions_that_do_not_fit_wait_for_their_turn(tmp_path: Path) -> None:
    verifier = FakeVerifier(kv_blocks=12, round_s=0.001)
    async with running_router(tmp_path, {"v": verifier}) as router:
        results = await asyncio.gather(
            *(router.generate(text_request(str(i) * 8, max_tokens=8)) for i in range(8))
        )
        assert [r.text for r in results] == [str(i) * 8 for i in range(8)]
        assert_all_freed(router, verifier)


async def test_a_verifier_without_room_is_tried_again(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.refusals = 2
    result = await router.generate(text_request())
    assert result.text == "abcabc"
    assert_all_freed(router, verifier)


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
    assert_all_freed(router, verifier)


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
    assert_all_freed(router, verifier)


async def test_seeds_are_drawn_unless_given(router: RouterService, verifier: FakeVerifier) -> None:
    for options in (SamplingOptions(seed=0), SamplingOptions(), SamplingOptions()):
        await router.generate(text_request(sampling=options))
    seeds = [spec.sampling.seed for spec in verifier.specs]
    assert seeds[0] == 0 and len(set(seeds)) == 3


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
async def test_a_lost_verifier_is_a_typed_error_and_it_serves_again_when_it_is_back(
    tmp_path: Path, kill: object
) -> None:
    assert callable(kill)
    verifier = FakeVerifier(round_s=0.01)
    async with running_router(tmp_path, {"v": verifier}) as router:
        task = asyncio.create_task(router.generate(text_request(max_tokens=1000)))
        await eventually(lambda: verifier.live)
        kill(verifier)
        with pytest.raises(UnavailableError) as caught:
            await asyncio.wait_for(task, 5)
        assert caught.value.reason == "VERIFIER_LOST"
        await eventually(lambda: router.registry.any_info() is None)
        assert sample(router, "outrider_verifier_losses_total", verifier="v0") == 1
        verifier.lost.clear()
        verifier.hung = False
        verifier.change_info(incarnation="2")
        await eventually(lambda: router.registry.any_info() is not None)
        assert (await router.generate(text_request())).text == "abcabc"
        assert_all_freed(router, verifier)


async def test_a_restart_between_two_looks_ends_the_old_sessions(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    task = asyncio.create_task(router.generate(text_request()))
    await eventually(lambda: verifier.live)
    verifier.change_info(incarnation="2")
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(task, 5)
    verifier.gate = None
    assert (await router.generate(text_request())).text == "abcabc"


async def test_the_loss_of_the_drafter_is_counted_and_the_stream_goes_on(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.005)
    drafter = FakeDrafter({"v": verifier})
    async with running_router(tmp_path, {"v": verifier}, {"d": drafter}) as router:
        task = asyncio.create_task(router.generate(text_request(max_tokens=60)))
        await eventually(lambda: verifier.live)
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
        await eventually(lambda: sample(router, "outrider_drafter_up", drafter="d0") == 1)
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
        assert not any(spec.plan.speculative for spec in verifier.specs)


async def test_sessions_spread_over_two_verifiers(tmp_path: Path) -> None:
    first, second = FakeVerifier(round_s=0.01), FakeVerifier(round_s=0.01)
    first.change_info(verifier_id="va")
    second.change_info(verifier_id="vb")
    async with running_router(tmp_path, {"a": first, "b": second}) as router:
        await eventually(lambda: sample(router, "outrider_verifier_up", verifier="vb") == 1)
        await eventually(lambda: sample(router, "outrider_verifier_up", verifier="va") == 1)
        await asyncio.gather(*(router.generate(text_request(max_tokens=20)) for _ in range(8)))
    assert (len(first.specs), len(second.specs)) == (4, 4)


async def test_draining_refuses_new_requests_and_lets_the_running_ones_end(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    task = asyncio.create_task(router.generate(text_request(max_tokens=10)))
    await eventually(lambda: verifier.live)
    draining = asyncio.create_task(router.drain(5.0))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await router.generate(text_request())
    assert await draining
    assert (await task).finish.reason is FinishReason.LENGTH


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
    assert sample(router, "outrider_queue_depth") == 0


@pytest.mark.parametrize(
    ("raised", "expected"), [(InvalidRequestError, InvalidRequestError), (KeyError, InternalError)]
)
async def test_an_error_of_the_session_reaches_the_client_and_frees_everything(
    router: RouterService,
    verifier: FakeVerifier,
    raised: type[Exception],
    expected: type[OutriderError],
) -> None:
    def broken(spec: SessionSpec) -> list[int]:
        raise raised("script")

    verifier.script = broken
    with pytest.raises(expected):
        await router.generate(text_request())
    assert_all_freed(router, verifier)


async def test_a_thousand_cancelled_requests_leak_nothing(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.001)
    async with running_router(tmp_path, {"v": verifier}) as router:
        await cancel_a_thousand(router)
        assert_all_freed(router, verifier)


async def cancel_a_thousand(router: RouterService) -> None:

    async def one(index: int) -> None:
        async with aclosing(router.stream(text_request(max_tokens=500))) as events:
            for _ in range(1 + index % 3):
                await anext(events)

    for start in range(0, 1000, 50):
        await asyncio.gather(*(one(i) for i in range(start, start + 50)))


async def test_a_verifier_that_drafts_itself_gets_its_sessions_without_a_drafter(
    tmp_path: Path, verifier: FakeVerifier
) -> None:
    verifier.change_info(
        own_methods=(DraftMethod.EAGLE3,), own_draft_length=3, simulated_acceptance="2.6"
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
        (summary,) = server_info(router).verifiers
        assert summary.own_methods == (DraftMethod.EAGLE3,)
        assert summary.simulated_acceptance == "2.6"
