"""Streams that are taken up again: every position, every reader, every end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from outrider_router.base.tenants import Caller
from outrider_router.requests.request_output import RequestOutput
from outrider_router.requests.resumption.resumable_answers import AnswerStore
from outrider_router.requests.running_requests import RequestEntry
from outrider_router.requests.service import RouterService

from outrider.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledRequestError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
)
from outrider.ids import RequestId, TenantId
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateRequest,
    PromptInfo,
    StoppingOptions,
    StreamEvent,
    StreamPosition,
    TextPrompt,
)
from outrider.wire.messages import FinishReason
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request
from tests.waiting import PATIENCE_S, until

GRACE_S = 30.0
"""Longer than any of the tests is away."""
SHORT_S = 0.3


@pytest.fixture
def verifier() -> FakeVerifier:
    return FakeVerifier(round_s=0.002)


@pytest.fixture
async def router(tmp_path: Path, verifier: FakeVerifier) -> AsyncGenerator[RouterService]:
    async with running_router(tmp_path, {"v": verifier}, resume_grace_s=GRACE_S) as service:
        yield service


class Reader:
    """A client's call; `at_most` messages are taken, then its connection is stuck."""

    def __init__(self, at_most: int = 1 << 30) -> None:
        self.events: list[StreamEvent] = []
        self._at_most = at_most
        self.task: asyncio.Task[None] | None = None

    async def write(self, event: StreamEvent) -> None:
        if len(self.events) >= self._at_most:
            await asyncio.Event().wait()
        self.events.append(event)
        await asyncio.sleep(0)

    def begin(self, service: RouterService, request: GenerateRequest) -> Reader:
        self.task = asyncio.create_task(service.serve_request(request, self.write))
        self.task.add_done_callback(_look_at)
        return self

    def resume(self, service: RouterService, tokens: int = 0, characters: int = 0) -> Reader:
        position = StreamPosition(request_id=RequestId("r"), tokens=tokens, characters=characters)
        self.task = asyncio.create_task(service.resume_stream(position, self.write))
        self.task.add_done_callback(_look_at)
        return self

    async def error(self) -> OutriderError:
        assert self.task is not None
        (outcome,) = await asyncio.gather(self.task, return_exceptions=True)
        assert isinstance(outcome, OutriderError)
        return outcome

    async def cut(self) -> None:
        """Break the connection."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def ids(self) -> list[int]:
        return [i for event in self.events if isinstance(event, Delta) for i in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    @property
    def finish(self) -> FinishInfo | None:
        last = self.events[-1] if self.events else None
        return last if isinstance(last, FinishInfo) else None


def _look_at(task: asyncio.Task[None]) -> None:
    """Whoever wants the error of a call asks for it."""
    if not task.cancelled():
        task.exception()


def resumable(max_tokens: int = 40, **more: object) -> GenerateRequest:
    return text_request(max_tokens=max_tokens, request_id=RequestId("r"), resumable=True, **more)


@pytest.mark.parametrize("taken", [0, 1, 2, 7])
@pytest.mark.parametrize("stuck", [False, True])
async def test_a_stream_goes_on_exactly_behind_what_its_client_has(
    router: RouterService, verifier: FakeVerifier, taken: int, stuck: bool
) -> None:
    verifier.script = lambda spec: router.tokenizer.encode("h\u20ac\U0001f680llo " * 9)
    first = Reader(taken if stuck else 1 << 30).begin(router, resumable(90))
    await until(lambda: len(first.events) >= taken and len(router.running_requests))
    await first.cut()
    told = list(first.events)
    await asyncio.sleep(0.02)
    assert first.events == told
    second = Reader().resume(router, len(first.ids), len(first.text))
    assert second.task is not None
    await second.task
    assert first.text + second.text == "h\u20ac\U0001f680llo " * 7 + "h\u20ac\ufffd"
    assert router.tokenizer.encode("h\u20ac\U0001f680llo " * 9)[:90] == tuple(
        first.ids + second.ids
    )
    assert second.finish is not None and second.finish.reason is FinishReason.LENGTH
    assert isinstance(second.events[0], PromptInfo) is (not first.ids and not first.text)
    await assert_all_freed(router, verifier)
    assert sample(router, "outrider_resumed_streams_total") == 1


@pytest.mark.parametrize("stop", [(), ("cab",), ("abcX",)])
async def test_any_position_of_an_ended_answer_gives_the_rest_of_it(
    router: RouterService, verifier: FakeVerifier, stop: tuple[str, ...]
) -> None:
    whole = Reader().begin(
        router,
        GenerateRequest(
            prompt=TextPrompt("abc"),
            stopping=StoppingOptions(max_tokens=11, stop=stop),
            request_id=RequestId("r"),
            resumable=True,
        ),
    )
    assert whole.task is not None
    await whole.task
    tokens, characters = 0, 0
    for event in whole.events:
        if isinstance(event, Delta):
            tokens, characters = tokens + len(event.token_ids), characters + len(event.text)
        rest = Reader().resume(router, tokens, characters)
        assert rest.task is not None
        await rest.task
        assert rest.ids == whole.ids[tokens:]
        assert rest.text == whole.text[characters:]
        assert rest.finish == whole.finish
    await assert_all_freed(router, verifier)


async def test_a_second_reader_takes_the_stream_over_and_the_first_is_told(
    router: RouterService, verifier: FakeVerifier
) -> None:
    first = Reader(3).begin(router, resumable())
    await until(lambda: len(first.events) == 3)
    second = Reader().resume(router, len(first.ids), len(first.text))
    error = await first.error()
    assert isinstance(error, AbortedError) and error.reason == "TAKEN_OVER"
    assert second.task is not None
    await second.task
    assert first.text + second.text == ("abc" * 14)[:40]
    await assert_all_freed(router, verifier)


async def test_readers_that_come_and_go_at_any_time_hear_one_text(
    router: RouterService, verifier: FakeVerifier
) -> None:
    reader = Reader().begin(router, resumable(300))
    ids, text = list[int](), ""
    for turn in range(20):
        await asyncio.sleep(0.003 * (turn % 4))
        await reader.cut()
        ids, text = ids + reader.ids, text + reader.text
        reader = Reader(turn % 5 if turn % 2 else 1 << 30).resume(router, len(ids), len(text))
    await reader.cut()
    ids, text = ids + reader.ids, text + reader.text
    reader = Reader().resume(router, len(ids), len(text))
    assert reader.task is not None
    await reader.task
    assert text + reader.text == "abc" * 100
    assert tuple(ids + reader.ids) == router.tokenizer.encode("abc") * 100
    await assert_all_freed(router, verifier)


async def test_positions_and_requests_that_are_not_there_are_typed_errors(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    assert isinstance(await Reader().resume(router).error(), NotFoundError)
    reader = Reader().begin(router, resumable())
    await until(lambda: verifier.live)
    for position in ((1, 0), (0, 1), (1000, 0)):
        error = await Reader().resume(router, *position).error()
        assert isinstance(error, InvalidRequestError) and error.reason == "INVALID_POSITION"
    # Whoever asks for what is not there takes nothing over.
    verifier.gate.set()
    assert reader.task is not None
    await reader.task
    assert reader.text == ("abc" * 14)[:40]
    plain = asyncio.create_task(router.generate(text_request(request_id=RequestId("plain"))))
    with pytest.raises(NotFoundError):
        await router.resume_stream(StreamPosition(request_id=RequestId("plain")), Reader().write)
    await plain


async def test_without_its_client_a_request_ends_after_the_grace_time(
    tmp_path: Path, verifier: FakeVerifier
) -> None:
    loop = asyncio.get_running_loop()
    async with running_router(tmp_path, {"v": verifier}, resume_grace_s=SHORT_S) as router:
        reader = Reader().begin(router, resumable(2000))
        await until(lambda: len(reader.events) > 2)
        await reader.cut()
        cut = loop.time()
        await until(lambda: not len(router.running_requests))
        assert loop.time() - cut >= 0.9 * SHORT_S
        await assert_all_freed(router, verifier)
        await until(lambda: not len(router.resumables))
        assert isinstance(await Reader().resume(router).error(), NotFoundError)


async def test_abort_ends_it_at_once_and_a_deadline_in_time(
    router: RouterService, verifier: FakeVerifier
) -> None:
    reader = Reader().begin(router, resumable(2000))
    await until(lambda: len(reader.events) > 2)
    assert router.abort_requests([RequestId("r")]) == (RequestId("r"),)
    assert isinstance(await reader.error(), CancelledRequestError)
    await assert_all_freed(router, verifier)
    assert not len(router.resumables)
    late = Reader()
    with pytest.raises(DeadlineExceededError):
        await router.serve_request(resumable(2000), late.write, timeout_s=1.0)
    await assert_all_freed(router, verifier)
    # Its end is kept for whoever did not hear of it.
    assert isinstance(await Reader().resume(router).error(), DeadlineExceededError)


@pytest.mark.parametrize("end", ["abort", "deadline", "close"])
async def test_a_reader_that_takes_nothing_does_not_keep_a_request_from_ending(
    router: RouterService, verifier: FakeVerifier, end: str
) -> None:
    reader = Reader(4)
    timeout_s = 2.0 if end == "deadline" else None
    reader.task = asyncio.create_task(
        router.serve_request(resumable(2000), reader.write, timeout_s=timeout_s)
    )
    await until(lambda: len(reader.events) == 4)
    if end == "abort":
        router.abort_requests([RequestId("r")])
    elif end == "close":
        async with asyncio.timeout(PATIENCE_S):
            await router.close()
    assert (await reader.error()).reason in ("ABORTED", "DEADLINE", "SHUTDOWN")
    await until(lambda: not len(router.running_requests))
    await assert_all_freed(router, verifier)


async def test_a_unary_answer_outlives_its_call(
    router: RouterService, verifier: FakeVerifier
) -> None:
    task = asyncio.create_task(router.generate(resumable(30)))
    await until(lambda: verifier.live)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    reader = Reader().resume(router)
    assert reader.task is not None
    await reader.task
    assert reader.text == "abc" * 10
    # An ended request leaves its id to the next one.
    assert (await router.generate(resumable(3))).text == "abc"


async def test_an_error_before_anything_was_said_is_kept_for_nobody(
    router: RouterService, verifier: FakeVerifier
) -> None:
    reader = Reader().begin(router, resumable(5000))
    assert isinstance(await reader.error(), InvalidRequestError)
    assert isinstance(await Reader().resume(router).error(), NotFoundError)
    await assert_all_freed(router, verifier)


async def test_ended_answers_are_kept_within_bounds() -> None:
    forgotten: list[str] = []
    answers = AnswerStore(
        grace_s=60.0,
        on_forgotten=lambda entry: forgotten.append(entry.request_id),
        max_kept=3,
        max_kept_bytes=100,
    )
    for name, ids in (("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 12), ("f", 1)):
        answer = answers.add_answer(
            RequestEntry(
                request_id=RequestId(name),
                arrived_at=0.0,
                output=RequestOutput(token_ids=[0] * ids),
            )
        )
        answer.finish_answer(None)
        answers.keep_finished(answer)
    # Three are kept at most, and no more than 100 bytes: 12 ids are 96, and one more is too much.
    assert forgotten == ["a", "b", "c", "d", "e"] and len(answers) == 1
    answers.clear()


async def test_the_id_of_a_kept_answer_stays_its_tenants(router: RouterService) -> None:
    owner, other = Caller(tenant=TenantId("owner")), Caller(tenant=TenantId("other"))
    name = RequestId("kept")
    first = text_request("abc", request_id=name, resumable=True)
    kept = await router.generate(first, caller=owner)
    with pytest.raises(AlreadyExistsError):
        await router.generate(text_request("cba", request_id=name, resumable=True), caller=other)
    # Its answer is not kept, so it replaces none.
    await router.generate(text_request("cba", request_id=name), caller=other)
    again = Reader()
    await router.resume_stream(StreamPosition(request_id=name), again.write, owner)
    assert "".join(e.text for e in again.events if isinstance(e, Delta)) == kept.text
