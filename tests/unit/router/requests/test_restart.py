"""A router that starts with the journal of one that was killed goes on with its requests."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_router.requests.resumption.log_records import encode_file, encode_opened, encode_tick
from outrider_router.requests.service import RouterService

from outrider.errors import FailedPreconditionError, InvalidRequestError, UnavailableError
from outrider.ids import RequestId
from outrider.wire.inference import GenerateRequest, SamplingOptions, StoppingOptions, TextPrompt
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request
from tests.unit.router.requests.test_log_records import OPENED
from tests.unit.router.requests.test_resumable_answers import Reader, resumable
from tests.waiting import until


@asynccontextmanager
async def journalled(
    directory: Path, verifier: FakeVerifier, journal: Path, **config: object
) -> AsyncGenerator[RouterService]:
    async with running_router(directory, {"v": verifier}, journal=journal, **config) as service:
        yield service


async def killed(journal: Path, to: Path) -> Path:
    """What a router that is killed now would leave."""
    shutil.copy(journal, to)
    return to


@pytest.mark.parametrize("seen", [0, 1, 17])
async def test_running_requests_go_on_behind_what_their_clients_have(
    tmp_path: Path, seen: int
) -> None:
    verifier = FakeVerifier(round_s=0.002)
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        sampling = SamplingOptions(allowed_token_ids=(5, 6), bad_words=("xyz",))
        first = Reader().begin(router, resumable(60, priority=3, sampling=sampling))
        await until(lambda: len(first.ids) >= seen and verifier.specs)
        ids, text = list(first.ids), first.text
        left = await killed(tmp_path / "log", tmp_path / "left")
    other = FakeVerifier(round_s=0.002)
    async with journalled(tmp_path, other, left) as router:
        second = Reader().resume(router, len(ids), len(text))
        assert second.task is not None
        await second.task
        assert text + second.text == "abc" * 20
        assert tuple(ids + second.ids) == router.tokenizer.encode("abc") * 20
        (before,), (after,) = verifier.specs, other.specs
        assert after.token_ids[: before.prompt_len] == before.token_ids
        assert len(after.token_ids) >= before.prompt_len + seen
        assert (after.priority, after.sampling, after.plan) == (3, before.sampling, before.plan)
        assert after.token_limits == before.token_limits is not None
        assert after.epoch > before.epoch and after.session_id != before.session_id
        assert sample(router, "outrider_restored_requests_total", state="running") == 1
        await assert_all_freed(router, other)


@pytest.mark.parametrize(
    ("stop", "shown", "text"),
    [
        ("zz", False, "h\u20ac" * 2 + "h\u20ac"[:1]),
        ("\u20ac", False, "h"),
        ("\u20ac", True, "h\u20ac"),
    ],
)
async def test_an_end_that_its_client_did_not_hear_of_is_still_there(
    stop: str, shown: bool, text: str, tmp_path: Path
) -> None:
    verifier = FakeVerifier()
    request = GenerateRequest(
        prompt=TextPrompt("h\u20ac"),
        stopping=StoppingOptions(max_tokens=9, stop=(stop,), include_stop_str_in_output=shown),
        request_id=RequestId("r"),
        resumable=True,
        skip_special_tokens=not shown,
        return_prompt_token_ids=shown,
    )
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        whole = await router.generate(request)
        assert whole.text == text
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        reader = Reader().resume(router)
        assert reader.task is not None
        await reader.task
        assert (reader.text, tuple(reader.ids)) == (whole.text, whole.token_ids)
        assert reader.finish == whole.finish
        again = router.resumables.get_answer(RequestId("r"))
        assert again is not None and again.result() == whole
        assert len(whole.prompt_token_ids) == (4 if shown else 0)
        assert len(verifier.specs) == 1
        assert sample(router, "outrider_restored_requests_total", state="ended") == 1
    async with journalled(tmp_path, verifier, tmp_path / "log", resume_grace_s=0.0) as router:
        assert sample(router, "outrider_restored_requests_total", state="dropped") == 1


async def test_a_stop_string_and_a_length_that_were_reached_end_it_without_a_session(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(round_s=0.002)
    for name, stopping in (
        ("length", StoppingOptions(max_tokens=9)),
        ("string", StoppingOptions(max_tokens=50, stop=("ca",))),
    ):
        request = GenerateRequest(
            prompt=TextPrompt("abc"),
            stopping=stopping,
            request_id=RequestId("r"),
            resumable=True,
        )
        log = tmp_path / name
        async with journalled(tmp_path, verifier, log) as router:
            whole = await router.generate(request)
            records = log.read_bytes()
            # The kill came between the last ids and the end.
            end = records.rfind(b"\xf7\x0dJ\x01")
        log.write_bytes(records[:end])
        opened = len(verifier.specs)
        async with journalled(tmp_path, verifier, log) as router:
            reader = Reader().resume(router)
            assert reader.task is not None
            await reader.task
            assert (reader.text, tuple(reader.ids)) == (whole.text, whole.token_ids)
            assert reader.finish is not None and reader.finish.reason == whole.finish.reason
        assert len(verifier.specs) == opened


async def test_a_client_may_have_more_than_a_failed_machine_wrote_if_the_same_comes_again(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(round_s=0.002)
    for name, sampling in (
        ("greedy", SamplingOptions()),
        ("rejection", SamplingOptions(temperature=1.0, rule="rejection")),  # type: ignore[arg-type]
    ):
        log = tmp_path / name
        async with journalled(tmp_path, verifier, log) as router:
            first = Reader().begin(router, resumable(60, sampling=sampling))
            await until(lambda first=first: len(first.ids) >= 5)
            await killed(log, tmp_path / "left")
            await until(lambda first=first: len(first.ids) >= 20)
            ids, text = list(first.ids), first.text
        async with journalled(tmp_path, verifier, tmp_path / "left") as router:
            second = Reader().resume(router, len(ids), len(text))
            if name == "greedy":
                assert second.task is not None
                await second.task
                assert text + second.text == "abc" * 20
            else:
                error = await second.error()
                assert isinstance(error, InvalidRequestError)


async def test_what_is_not_resumable_is_not_restored_nor_what_was_aborted(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.002)
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        plain = asyncio.create_task(router.generate(text_request(max_tokens=500)))
        reader = Reader().begin(router, resumable(500))
        await until(lambda: len(verifier.live) == 2 and reader.ids)
        router.abort_requests([RequestId("r")])
        await reader.error()
        await killed(tmp_path / "log", tmp_path / "left")
        plain.cancel()
        await asyncio.gather(plain, return_exceptions=True)
    async with journalled(tmp_path, verifier, tmp_path / "left") as router:
        assert len(router.running_requests) == len(router.resumables) == 0


async def test_a_stop_hands_resumable_requests_over_and_waits_for_the_others(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(round_s=0.005)
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        reader = Reader().begin(router, resumable(200))
        plain = asyncio.create_task(router.generate(text_request(max_tokens=30)))
        await until(lambda: len(verifier.live) == 2 and reader.ids)
        assert await router.drain(10.0)
        assert plain.done() and len(router.running_requests) == 1
        await router.close()
        error = await reader.error()
        assert isinstance(error, UnavailableError) and error.reason == "SHUTDOWN"
        ids, text = list(reader.ids), reader.text
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        rest = Reader().resume(router, len(ids), len(text))
        assert rest.task is not None
        await rest.task
        assert text + rest.text == ("abc" * 67)[:200]
        await assert_all_freed(router, verifier)


async def test_restored_requests_wait_for_a_verifier_and_end_without_their_clients(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(round_s=0.002)
    verifier.gate = asyncio.Event()
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        Reader().begin(router, resumable(500))
        await until(lambda: verifier.live)
        await killed(tmp_path / "log", tmp_path / "left")
        verifier.gate.set()
    verifier.gate = None
    verifier.lost.set()
    config = {"journal": tmp_path / "left", "resume_grace_s": 3.0}
    async with running_router(tmp_path, {"v": verifier}, wait=False, **config) as router:
        await asyncio.sleep(0.2)
        assert len(router.running_requests) == 1
        # It does not end before the time is up.
        verifier.round_s = 0.05
        verifier.lost.clear()
        await until(lambda: verifier.live)
        await until(lambda: not len(router.running_requests))
        await assert_all_freed(router, verifier)
        assert sample(router, "outrider_requests_total", outcome="cancelled") == 1


async def test_a_request_of_another_tokenizer_is_not_taken_up(tmp_path: Path) -> None:
    now = time.time()
    records = [
        encode_opened(1, OPENED),
        encode_opened(2, replace(OPENED, request_id=RequestId("late"), deadline=now - 1.0)),
        encode_tick(now),
    ]
    (tmp_path / "log").write_bytes(encode_file(records))
    async with journalled(tmp_path, FakeVerifier(), tmp_path / "log") as router:
        assert len(router.running_requests) == 0
        assert sample(router, "outrider_restored_requests_total", state="dropped") == 2


async def test_a_second_router_does_not_start_on_the_same_journal(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    async with journalled(tmp_path, verifier, tmp_path / "log") as router:
        with pytest.raises(FailedPreconditionError) as caught:
            async with journalled(tmp_path, verifier, tmp_path / "log"):
                pass
        assert caught.value.reason == "JOURNAL_LOCKED"
        assert (await router.generate(text_request())).text == "abcabc"
