"""A stop string ends an answer for everything that counts, as an end-of-turn id does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_router.admission.capacity_ledger import OutputLengthEstimator
from outrider_router.base.tenants import Caller, TenantLimits
from outrider_router.requests.request_output import OutputAssembler, StopChecker
from outrider_router.requests.resumption.log_records import (
    EmittedRow,
    OpenedRequest,
    decode_log,
    encode_emitted,
    encode_ended,
    encode_file,
    encode_opened,
    encode_tick,
)
from outrider_router.requests.service import RouterService

from outrider.ids import RequestId, TenantId
from outrider.spec.plan import DraftMethod
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import (
    FinishInfo,
    GenerateRequest,
    GenerateResult,
    SpeculationOptions,
    StoppingOptions,
    TextPrompt,
)
from outrider.wire.messages import FinishReason
from tests.fakes.router import running_router, sample
from tests.fakes.tokenizer import make_tokenizer_dir
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import chunks, http_client
from tests.unit.router.helpers import assert_all_freed
from tests.unit.router.requests.test_log_records import OPENED
from tests.waiting import until

DRAFTS = 64
TENANT = TenantId("blue")


def drafting_verifier() -> FakeVerifier:
    """A verifier that drafts by itself, all of whose drafts are accepted."""
    verifier = FakeVerifier(tokens_per_round=DRAFTS + 1)
    verifier.change_info(in_process_methods=(DraftMethod.NGRAM,), in_process_draft_length=DRAFTS)
    # It does not hear that its router has left, so more rounds come behind the stop.
    verifier.deaf = True
    return verifier


def stopping_request(
    text: str = "ha ", stop: str = "ha ha", *, resumable: bool = False, **more: object
) -> GenerateRequest:
    return GenerateRequest(
        prompt=TextPrompt(text),
        request_id=RequestId("r"),
        stopping=StoppingOptions(max_tokens=400, stop=(stop,), **more),  # type: ignore[arg-type]
        speculation=SpeculationOptions(method=DraftMethod.NGRAM, draft_tokens=DRAFTS),
        resumable=resumable,
    )


async def test_every_count_of_a_request_ends_at_its_stop_string(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[int] = []
    add_answer = OutputLengthEstimator.add_answer

    def record_answer(lengths: OutputLengthEstimator, emitted: int, bound: int) -> None:
        assert emitted < bound, "it ended by itself"
        answers.append(emitted)
        add_answer(lengths, emitted, bound)

    monkeypatch.setattr(OutputLengthEstimator, "add_answer", record_answer)
    verifier = drafting_verifier()
    limits = {TENANT: TenantLimits(tokens_per_s=1.0, tokens_burst=1000.0)}
    async with running_router(tmp_path, {"v": verifier}, tenants=limits) as router:
        with caplog.at_level(logging.INFO, "outrider_router"):
            answer = await router.generate(stopping_request(), caller=Caller(tenant=TENANT))
        await until(lambda: not verifier.live)
        await asyncio.sleep(0.05)
        assert (answer.text, answer.finish.stop_string) == ("", "ha ha")
        assert len(answer.token_ids) == answer.finish.usage.completion_tokens == 5
        stats = answer.finish.stats
        # Prefill emitted one of the five; the round's 64 accepted drafts are cut to four.
        assert (stats.rounds, stats.emitted, stats.accepted) == (1, 4, 4)
        assert (stats.proposed, stats.drafted_rounds) == (DRAFTS, 1)
        assert stats.accepted_per_depth == (1,) * 4
        assert stats.acceptance_histogram == (0, 0, 0, 0, 1)
        assert answers == [5]
        (ended,) = [r for r in caplog.records if r.getMessage() == "request ended"]
        assert ended.tokens == 5  # type: ignore[attr-defined]
        tenant = router.admission.tenants.get_tenant(TENANT, time.monotonic())
        assert tenant.tokens is not None
        assert 990 < 1000.0 - tenant.tokens.shortage(1000.0, time.monotonic()) < 993.5
        for name, count in (
            ("generation_tokens_total", 5),
            ("request_generation_tokens_sum", 5),
            ("request_time_per_output_token_seconds_count", 1),
            ("inter_token_latency_seconds_count", 1),
            ("rounds_total", 1),
            ("round_tokens_total", 4),
            ("spec_decode_num_accepted_tokens_total", 4),
            ("spec_decode_num_draft_tokens_total", DRAFTS),
        ):
            assert sample(router, f"outrider_{name}") == count, name
        assert sample(router, "outrider_tenant_tokens_total", tenant=TENANT) == 3 + 5
        deep = "outrider_spec_decode_num_accepted_tokens_per_pos_total"
        assert [sample(router, deep, position=str(at)) for at in (3, 4)] == [1, 0]


async def test_answers_side_by_side_count_to_their_stop_strings_over_http(tmp_path: Path) -> None:
    async with running_router(tmp_path, {"v": drafting_verifier()}) as router:
        body = {"prompt": "ha ", "stop": ["ha ha"], "n": 4, "max_tokens": 100, "drafter": "ngram"}
        async with http_client(router) as client:
            told = (await client.post("/v1/completions", json=body)).json()
    assert told["usage"]["completion_tokens"] == 20
    details = told["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 16
    assert told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 16


async def test_a_stop_string_ends_the_session_although_nobody_reads(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.002)
    async with running_router(tmp_path, {"v": verifier}) as router:
        events = router.stream(stopping_request())
        await anext(events)
        await until(lambda: verifier.specs and not verifier.live)
        assert router.admission.num_running == 0
        (entry,) = router.running_requests
        assert len(entry.output.token_ids) == 5
        *_, finish = [event async for event in events]
        assert isinstance(finish, FinishInfo) and finish.reason is FinishReason.STOP_STRING
        await assert_all_freed(router, verifier)


async def test_the_journal_holds_nothing_behind_a_stop_string(tmp_path: Path) -> None:
    async with running_router(
        tmp_path, {"v": drafting_verifier()}, journal=tmp_path / "log"
    ) as router:
        answer = await router.generate(stopping_request(resumable=True))
        (logged,) = decode_log((tmp_path / "log").read_bytes()).requests.values()
    assert tuple(logged.emitted) == answer.token_ids and len(logged.emitted) == 5


@pytest.mark.parametrize("ended", [False, True])
async def test_a_journal_of_ids_behind_a_stop_string_is_cut_there(
    ended: bool, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(make_tokenizer_dir(tmp_path))
    job = replace(
        OPENED.job,
        prompt_ids=tokenizer.encode("ha "),
        stop_strings=("ha ha",),
        max_new_tokens=100,
        min_new_tokens=0,
        top_logprobs=None,
        includes_stop_text=False,
    )
    opened = OpenedRequest(
        request_id=RequestId("r"), job=job, deadline=None, tokenizer_hash=tokenizer.hash
    )
    ids = tokenizer.encode("ha ha ha ha")
    records = [encode_opened(1, opened), encode_emitted([EmittedRow(1, 0, ids)])]
    async with running_router(tmp_path, {"v": FakeVerifier()}) as router:
        finish = (await router.generate(stopping_request())).finish
    if ended:
        records.append(encode_ended(1, time.time(), finish))
    (tmp_path / "log").write_bytes(encode_file([encode_tick(time.time()), *records]))
    verifier = FakeVerifier()
    async with running_router(tmp_path, {"v": verifier}, journal=tmp_path / "log") as router:
        answer = router.resumables.get_answer(RequestId("r"))
        assert answer is not None
        await until(lambda: answer.over)
        result = answer.result()
        assert (result.text, result.token_ids) == ("", ids[:5])
        assert result.finish.reason is FinishReason.STOP_STRING
        assert result.finish.usage.completion_tokens == 5
        assert not verifier.specs


# ---- min_tokens ------------------------------------------------------------------------------


async def answer_of(router: RouterService, **more: object) -> GenerateResult:
    return await router.generate(stopping_request(**more))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens_per_round", [1, 3, 64])
async def test_min_tokens_holds_back_stop_strings(tmp_path: Path, tokens_per_round: int) -> None:
    verifier = FakeVerifier(tokens_per_round=tokens_per_round)
    async with running_router(tmp_path, {"v": verifier}) as router:
        # "ha" is complete with the ids 2, 5, 8, ...
        for minimum, tokens in ((0, 2), (1, 2), (2, 5), (4, 5), (5, 8), (7, 8)):
            answer = await answer_of(router, stop="ha", min_tokens=minimum)
            assert len(answer.token_ids) == tokens, minimum
            assert answer.text == "ha ha ha ha"[: tokens - 2]
            shown = await answer_of(
                router, stop="ha", min_tokens=minimum, include_stop_str_in_output=True
            )
            assert shown.text == "ha ha ha ha"[:tokens]


async def test_a_stop_string_that_begins_before_min_tokens_and_ends_behind_it_counts(
    router: RouterService,
) -> None:
    answer = await answer_of(router, text="abcd", stop="bcd", min_tokens=3)
    assert (answer.text, len(answer.token_ids)) == ("a", 4)
    answer = await answer_of(router, text="abcd", stop="bcd", min_tokens=4)
    assert (answer.text, len(answer.token_ids)) == ("abcda", 8)


async def test_min_tokens_holds_back_stop_strings_over_http(router: RouterService) -> None:
    body = {"prompt": "abc", "stop": "b", "min_tokens": 4, "max_tokens": 30, "stream": True}
    async with http_client(router) as client:
        answer = await client.post("/v1/completions", json=body)
    parts = chunks(answer.text)
    assert "".join(part["choices"][0]["text"] for part in parts) == "abca"
    assert parts[-1]["choices"][0]["stop_reason"] == "b"


# ---- pure --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))


def cut_by_hand(
    pieces: Sequence[bytes], stops: Sequence[str], minimum: int
) -> tuple[str, int, str | None]:
    """The definition: text, ids and stop string of an answer."""
    for count in range(minimum + 1, len(pieces) + 1):
        before = len(_text(pieces[: count - 1]))
        text = _text(pieces[:count])
        found = [
            (end, -len(stop), stop)
            for stop in stops
            for end in range(before + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if found:
            end, negative, stop = min(found)
            return text[: end + negative], count, stop
    return b"".join(pieces).decode("utf-8", "replace"), len(pieces), None


def _text(pieces: Sequence[bytes]) -> str:
    """What is complete of a text."""
    return b"".join(pieces).decode("utf-8", "ignore")


@given(
    text=st.text(alphabet="ab\u20ac", max_size=16),
    stops=st.lists(st.text(alphabet="ab\u20ac", min_size=1, max_size=4), min_size=1, max_size=3),
    minimum=st.integers(0, 12),
    sizes=st.lists(st.integers(1, 6), min_size=48, max_size=48),
)
def test_ids_in_any_rows_end_where_the_definition_says(
    tokenizer: Tokenizer, text: str, stops: list[str], minimum: int, sizes: list[int]
) -> None:
    ids, rows = list(tokenizer.encode(text)), list[list[int]]()
    for size in sizes:
        rows.append(ids[:size])
        ids = ids[size:]
    checker = StopChecker(OutputAssembler(tokenizer.pieces, stops, min_tokens=minimum))
    kept: list[int] = []
    for row in rows:
        if not checker.is_stopped:
            kept += row[: checker.count_tokens(row)]
    # Whoever writes the text pushes what was kept in rows of its own.
    assembler = OutputAssembler(tokenizer.pieces, stops, min_tokens=minimum)
    middle = sizes[0]
    written = (
        assembler.push_tokens(kept[:middle])
        + assembler.push_tokens(kept[middle:])
        + assembler.flush()
    )
    pieces = [bytes([byte]) for byte in text.encode()]
    assert (written, len(kept), assembler.stop_string) == cut_by_hand(pieces, stops, minimum)
    assert checker.is_stopped is (assembler.stop_string is not None)
