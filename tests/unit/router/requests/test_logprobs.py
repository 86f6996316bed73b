"""Log-probabilities on their way through the router: one for each id, whatever happens to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_router.requests.resumption.log_records import (
    EmittedRow,
    decode_log,
    encode_emitted,
    encode_file,
    encode_opened,
)

from outrider.errors import InternalError, InvalidRequestError
from outrider.ids import RequestId
from outrider.wire.inference import Delta, StoppingOptions, TokenLogprobs
from outrider.wire.messages import SessionSpec
from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import collect, emitted, pair, text_request
from tests.unit.router.requests.test_log_records import OPENED
from tests.unit.router.requests.test_restart import journalled, killed
from tests.unit.router.requests.test_resumable_answers import Reader, resumable
from tests.waiting import soon, until

PROMPT_LEN = 3


def assert_whole(logprobs: list[TokenLogprobs], count: int, top: int) -> None:
    """Of the first `count` tokens of an answer, by what the fake verifier says."""
    assert [entry.logprob for entry in logprobs] == [-(PROMPT_LEN + i) / 8 for i in range(count)]
    assert all([token for token, _ in entry.top] == list(range(top)) for entry in logprobs)


def of_reader(*readers: Reader) -> list[TokenLogprobs]:
    events = [event for reader in readers for event in reader.events]
    assert all(
        len(event.logprobs) == len(event.token_ids) for event in events if isinstance(event, Delta)
    )
    return [entry for event in events if isinstance(event, Delta) for entry in event.logprobs]


@pytest.mark.parametrize("top", [None, 0, 3])
async def test_an_answer_has_one_for_each_of_its_ids(tmp_path: Path, top: int | None) -> None:
    verifier = FakeVerifier(tokens_per_round=4)
    async with running_router(tmp_path, {"v": verifier}) as router:
        request = text_request(max_tokens=11, top_logprobs=top)
        result = await router.generate(request)
        events = await collect(router, request)
    assert verifier.specs[0].top_logprobs == top
    streamed = [e for event in events if isinstance(event, Delta) for e in event.logprobs]
    assert list(result.logprobs) == streamed
    if top is None:
        assert streamed == []
    else:
        assert_whole(streamed, 11, top)


@pytest.mark.parametrize("top", [-1, 21])
async def test_a_number_that_is_not_allowed_is_refused(tmp_path: Path, top: int) -> None:
    async with running_router(tmp_path, {"v": FakeVerifier()}) as router:
        with pytest.raises(InvalidRequestError, match=r"top_logprobs must be in \[0, 20\]"):
            await router.generate(text_request(top_logprobs=top))


async def test_a_stop_string_leaves_one_for_each_id_that_is_passed_on(tmp_path: Path) -> None:
    verifier = FakeVerifier(tokens_per_round=5)
    async with running_router(tmp_path, {"v": verifier}) as router:
        verifier.script = lambda spec: router.tokenizer.encode("abcd</e>fghij")
        request = replace(
            text_request(top_logprobs=1),
            stopping=StoppingOptions(max_tokens=13, stop=("</e>",)),
        )
        result = await router.generate(request)
    assert result.text == "abcd" and len(result.token_ids) == 8
    assert_whole(list(result.logprobs), 8, 1)


async def test_a_failover_leaves_no_gap_and_says_nothing_twice(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        request = text_request(max_tokens=30, top_logprobs=2)
        task = asyncio.create_task(collect(both.router, request))
        await emitted(both.router, 10)
        both.first.lost.set()
        events = await soon(task)
        assert both.second.specs[0].top_logprobs == 2
        both.first.restart()
    told = [e for event in events if isinstance(event, Delta) for e in event.logprobs]
    assert_whole(told, 30, 2)


@pytest.mark.parametrize("seen", [0, 1, 9])
async def test_a_stream_that_goes_on_has_them_behind_what_its_client_has(
    tmp_path: Path, seen: int
) -> None:
    verifier = FakeVerifier(round_s=0.002)
    async with running_router(tmp_path, {"v": verifier}) as router:
        first = Reader(seen).begin(router, resumable(40, top_logprobs=2))
        await until(lambda: len(first.events) >= seen and len(router.running_requests))
        await first.cut()
        second = Reader().resume(router, len(first.ids), len(first.text))
        assert second.task is not None
        await second.task
        assert_whole(of_reader(first, second), 40, 2)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_restarted_router_has_them_in_its_journal(tmp_path: Path, ended: bool) -> None:
    verifier = FakeVerifier(round_s=0.002)
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        first = Reader().begin(router, resumable(60, top_logprobs=2))
        assert first.task is not None
        if ended:
            await first.task
        await until(lambda: len(first.ids) >= 17)
        ids, text, before = list(first.ids), first.text, of_reader(first)
        left = await killed(tmp_path / "log", tmp_path / "left")
    async with journalled(tmp_path, FakeVerifier(round_s=0.002), left) as router:
        second = Reader().resume(router, len(ids), len(text))
        assert second.task is not None
        await second.task
        assert_whole(before + of_reader(second), 60, 2)
        third = Reader().resume(router)
        assert third.task is not None
        await third.task
        assert_whole(of_reader(third), 60, 2)


ENTRIES = [TokenLogprobs(-i / 8, ((i, -i / 8), (7, -9999.0))) for i in range(4)]
ASKED = replace(OPENED, job=replace(OPENED.job, top_logprobs=2))


def test_ids_whose_logprobs_are_lost_are_lost() -> None:
    opened = encode_opened(1, ASKED)
    both = encode_emitted([EmittedRow(1, 0, [5, 6], ENTRIES[:2])])
    more = encode_emitted([EmittedRow(1, 2, [7, 8], ENTRIES[2:])])
    ids_alone = encode_emitted([EmittedRow(1, 2, [7, 8])])
    logged = decode_log(encode_file([opened, both, more])).requests[1]
    assert (logged.emitted, logged.logprobs) == ([5, 6, 7, 8], ENTRIES)
    logged = decode_log(encode_file([opened, both, ids_alone])).requests[1]
    assert (logged.emitted, logged.logprobs) == ([5, 6], ENTRIES[:2])
    # A record of ids that is cut off leaves more of the others than there are ids.
    torn = encode_file([opened, both, more])[:-3]
    logged = decode_log(torn).requests[1]
    assert logged.emitted == [5, 6] and logged.logprobs[:2] == ENTRIES[:2]


@pytest.mark.parametrize("told", ["nothing", "fewer", "unasked"])
async def test_a_verifier_that_says_too_little_or_too_much_serves_nobody(
    tmp_path: Path, told: str
) -> None:
    verifier = FakeVerifier()

    def wrong(spec: SessionSpec, end: int, tokens: list[int]) -> tuple[TokenLogprobs, ...]:
        if told == "nothing":
            return ()
        return tuple(TokenLogprobs(-1.0, ((1, -1.0),)) for _ in tokens)

    verifier.logprobs = wrong  # type: ignore[assignment]
    async with running_router(tmp_path, {"v": verifier}) as router:
        request = text_request(
            top_logprobs=None if told == "unasked" else 2, request_id=RequestId("r")
        )
        with pytest.raises(InternalError, match="malformed events"):
            await router.generate(request)
        await until(lambda: not verifier.live)
