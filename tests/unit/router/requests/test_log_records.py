"""The journal's records: what is written is read, and damage costs what was damaged."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outrider_router.requests.request import ValidatedRequest
from outrider_router.requests.resumption.log_records import (
    HEADER,
    RECORD_MARK,
    EmittedRow,
    LogContents,
    OpenedRequest,
    decode_log,
    encode_emitted,
    encode_ended,
    encode_file,
    encode_opened,
    encode_tick,
)

from outrider.config import from_plain
from outrider.errors import InvalidRequestError
from outrider.ids import RequestId, TenantId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.thinking_budget import ThinkingBudget
from outrider.spec.token_limits import TokenLimits
from outrider.spec.tools import OutputParsing
from outrider.wire.inference import FinishInfo, Usage
from outrider.wire.messages import FinishReason, SpecStats

JOB = ValidatedRequest(
    prompt_ids=(5, 0, 2**24 - 1),
    sampling=SamplingParams(
        temperature=0.1 + 0.2,
        seed=2**64 - 1,
        rule=Rule.REJECTION,
        banned_ids=(3, 4),
        logit_bias=((7, -0.1), (8, 100.0)),
    ),
    plan=SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=5, top_k=2),
    stop_ids=(2, 9),
    stop_strings=("\n\n", "\u20ac"),
    max_new_tokens=100,
    min_new_tokens=3,
    kv_tokens=200,
    priority=-7,
    tenant=TenantId("t"),
    structured_output=StructuredOutput(StructuredKind.JSON_OBJECT),
    token_limits=TokenLimits(allowed_ids=(5, 6), bad_words=((5, 6), (6,))),
    thinking_budget=ThinkingBudget(max_tokens=4, close_tag="</think>", close_ids=(7, 8)),
    includes_stop_text=True,
    special_tokens=True,
    is_client_named=True,
    model="m",
    # As a request is resumed, its answer is parsed as before, and its calls have the same ids.
    parsing=OutputParsing(
        tool_format="llama3_json", tool_names=("f", "g"), call_id_seed=2**63 - 1, parallel=False
    ),
)
OPENED = OpenedRequest(
    request_id=RequestId("r-1"), job=JOB, deadline=1234.5678, tokenizer_hash="hash"
)
FINISH = FinishInfo(
    reason=FinishReason.STOP_STRING,
    usage=Usage(prompt_tokens=3, completion_tokens=4),
    stats=SpecStats(rounds=3, emitted=4, accepted_per_depth=(2, 1)),
    stop_string="\u20ac",
)
RECORDS = [
    encode_opened(1, OPENED),
    encode_emitted([EmittedRow(1, 0, [10, 11])]),
    encode_opened(2, OPENED),
    encode_emitted([EmittedRow(1, 2, [12]), EmittedRow(2, 0, [20, 21, 22])]),
    encode_tick(100.0),
    encode_ended(1, 101.0, FINISH),
    encode_emitted([EmittedRow(2, 3, [23])]),
]


def emitted(contents: LogContents) -> dict[int, list[int]]:
    return {number: logged.emitted for number, logged in contents.requests.items()}


def test_what_is_written_is_read() -> None:
    contents = decode_log(encode_file(RECORDS))
    assert emitted(contents) == {1: [10, 11, 12], 2: [20, 21, 22, 23]}
    assert contents.requests[1].opened == OPENED
    assert contents.requests[1].finish == FINISH and contents.requests[2].finish is None
    assert (contents.last_number, contents.alive_at) == (2, 101.0)
    assert not contents.is_torn and contents.num_damaged == 0


def test_a_request_that_ended_without_a_finish_is_gone() -> None:
    assert emitted(decode_log(encode_file([*RECORDS, encode_ended(2, 102.0, None)]))) == {
        1: [10, 11, 12]
    }


def test_ids_that_are_written_twice_are_there_once_and_ids_behind_a_gap_not_at_all() -> None:
    records = [encode_opened(1, OPENED), encode_emitted([EmittedRow(1, 0, [1, 2, 3])])]
    again = encode_emitted([EmittedRow(1, 1, [2, 3, 4])])
    gap = encode_emitted([EmittedRow(1, 9, [10])])
    assert emitted(decode_log(encode_file([*records, again, gap]))) == {1: [1, 2, 3, 4]}


def test_the_number_of_cached_tokens_is_that_of_the_first_ids() -> None:
    rows = [EmittedRow(1, 0, [1, 2], (), 3), EmittedRow(2, 0, [3])]
    records = [encode_opened(1, OPENED), encode_opened(2, OPENED), encode_emitted(rows)]
    contents = decode_log(encode_file([*records, encode_emitted([EmittedRow(1, 2, [4])])]))
    assert {n: logged.cached_tokens for n, logged in contents.requests.items()} == {1: 3, 2: 0}
    assert emitted(contents) == {1: [1, 2, 4], 2: [3]} and contents.num_damaged == 0


def test_more_cached_tokens_than_the_prompt_has_are_damage() -> None:
    row = EmittedRow(1, 0, [1], (), len(JOB.prompt_ids) + 1)
    contents = decode_log(encode_file([encode_opened(1, OPENED), encode_emitted([row])]))
    assert contents.requests[1].cached_tokens == 0 and contents.num_damaged == 1
    assert emitted(contents) == {1: [1]}


@given(st.data())
@settings(max_examples=200)
def test_a_file_cut_anywhere_is_what_was_written_before(data: st.DataObject) -> None:
    whole = encode_file(RECORDS)
    cut = data.draw(st.integers(len(HEADER), len(whole)))
    sizes = [len(HEADER)]
    for record in RECORDS:
        sizes.append(sizes[-1] + len(record))
    complete = sum(size <= cut for size in sizes) - 1
    found = decode_log(whole[:cut])
    expected = decode_log(encode_file(RECORDS[:complete]))
    assert found.requests == expected.requests and found.num_damaged == 0
    assert found.is_torn == (cut not in sizes)


@given(st.data())
@settings(max_examples=300)
def test_a_damaged_record_costs_itself_and_is_told(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(RECORDS) - 2))
    record = bytearray(RECORDS[index])
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    found = decode_log(encode_file([*RECORDS[:index], bytes(record), *RECORDS[index + 1 :]]))
    expected = decode_log(encode_file([*RECORDS[:index], *RECORDS[index + 1 :]]))
    assert found.requests == expected.requests
    assert found.num_damaged >= 1 and not found.is_torn


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=200)
def test_no_bytes_make_reading_fail(noise: bytes, marked: bool) -> None:
    decode_log(HEADER + (RECORD_MARK if marked else b"") + noise)
    found = decode_log(encode_file([*RECORDS[:2], noise, *RECORDS[2:]]))
    assert emitted(found) == {1: [10, 11, 12], 2: [20, 21, 22, 23]}


def test_a_record_of_another_version_of_a_request_is_skipped_and_told() -> None:
    strange = encode_opened(3, OPENED).replace(b'"model":"m"', b'"modem":"m"')
    body = strange[13:]
    # The checksum is right, the content is not.
    kind = strange[12:13]
    head = struct.pack("<4sII", RECORD_MARK, len(body), zlib.crc32(kind + body))
    contents = decode_log(encode_file([*RECORDS, head + kind + body]))
    assert set(contents.requests) == {1, 2} and contents.num_damaged == 1
    with pytest.raises(InvalidRequestError, match="unknown"):
        from_plain(Usage, {"tokens": 1})
