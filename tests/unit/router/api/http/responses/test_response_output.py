"""Deltas become output items and events, the same ones however the answer is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_router.api.http.errors import HttpError, describe_error
from outrider_router.api.http.responses.events import ResponseOutput, write_events
from outrider_router.api.http.responses.request_models import CreateResponseRequest
from outrider_router.api.http.responses.translation import response_members

from outrider.errors import (
    InternalError,
    InvalidRequestError,
    OutriderError,
    ResourceExhaustedError,
)
from outrider.spec.tools import ToolCallDelta
from outrider.wire.inference import Delta, FinishInfo, Usage
from outrider.wire.messages import FinishReason, SpecStats
from tests.unit.router.api.http.responses.support import (
    check_events,
    check_response,
    join_events,
    read_stream,
)

BODY = CreateResponseRequest.model_validate({"input": "a"})
MEMBERS = response_members(BODY, response_id="resp_1", model="m", created_at=5, is_stored=True)
STAGES = {"reasoning": 0, "text": 1, "call": 2}

Part = tuple[str, str]
"""What is written, and in which kind of item."""


def finish(reason: FinishReason = FinishReason.STOP_TOKEN) -> FinishInfo:
    usage = Usage(prompt_tokens=3, completion_tokens=7, reasoning_tokens=2, cached_tokens=1)
    return FinishInfo(reason=reason, usage=usage, stats=SpecStats())


def delta(text: str = "", reasoning: str = "", calls: tuple[ToolCallDelta, ...] = ()) -> Delta:
    return Delta(text=text, reasoning=reasoning, tool_calls=calls, token_ids=())


def deltas_of(parts: list[Part], cuts: list[int]) -> list[Delta]:
    """Parts in the order of an answer, cut into deltas of so many characters in turn."""
    deltas: list[Delta] = []
    call_index, sizes = -1, iter(cuts * 100)
    for kind, text in parts:
        first = True
        if kind == "call":
            call_index += 1
        while first or text:
            size = next(sizes)
            head, text = text[:size], text[size:]
            if kind == "call":
                call = ToolCallDelta(
                    index=call_index,
                    call_id=f"call_{call_index}" if first else "",
                    name="f" if first else "",
                    arguments=head,
                )
                deltas.append(delta(calls=(call,)))
            else:
                deltas.append(delta(head) if kind == "text" else delta(reasoning=head))
            first = False
    return deltas


def merged(deltas: list[Delta]) -> list[Delta]:
    """The deltas in as few as keep their order: reasoning, text and calls of one delta follow each
    other."""
    found: list[Delta] = []
    for each in deltas:
        last = found[-1] if found else None
        later = bool(each.reasoning and last and (last.text or last.tool_calls)) or bool(
            each.text and last and last.tool_calls
        )
        if last is None or later:
            found.append(each)
            continue
        found[-1] = delta(
            last.text + each.text,
            last.reasoning + each.reasoning,
            last.tool_calls + each.tool_calls,
        )
    return found


def run(deltas: list[Delta], reason: FinishReason) -> tuple[ResponseOutput, list[dict[str, Any]]]:
    output = ResponseOutput(MEMBERS)
    events = [event for each in deltas for event in output.push_delta(each)]
    return output, events + output.finish(finish(reason), completed_at=9)


parts = st.lists(
    st.tuples(st.sampled_from(sorted(STAGES)), st.text('ab\n\u00e9\U0001f600"', max_size=9)),
    max_size=6,
)


@given(parts, st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from(FinishReason))
def test_a_stream_adds_up_to_the_whole_response(
    written: list[Part], cuts: list[int], reason: FinishReason
) -> None:
    deltas = deltas_of(written, cuts)
    output, events = run(deltas, reason)
    check_events(events)
    response = events[-1]["response"]
    assert response == output.response
    assert join_events(events) == response["output"] == list(output.items)
    whole, _ = run(merged(deltas), reason)
    assert whole.response == output.response
    ids = [item["id"] for item in output.items]
    assert len(set(ids)) == len(ids)
    # Every event arrives as it was made.
    assert read_stream(write_events(events)) == events
    for kind in STAGES:
        said = "".join(text for name, text in written if name == kind)
        assert said == "".join(map(_text, (i for i in output.items if _kind(i) == kind)))
    calls = [item for item in output.items if item["type"] == "function_call"]
    assert [call["call_id"] for call in calls] == [f"call_{n}" for n in range(len(calls))]


def _kind(item: dict[str, Any]) -> str:
    return {"message": "text", "function_call": "call"}.get(item["type"], str(item["type"]))


def _text(item: dict[str, Any]) -> str:
    return str(item.get("arguments", "") if "arguments" in item else item["content"][0]["text"])


def test_the_events_come_in_openais_order() -> None:
    deltas = [
        delta(reasoning="Hm."),
        delta("Yes"),
        delta(calls=(ToolCallDelta(index=0, call_id="call_1", name="f", arguments="{}"),)),
    ]
    _, events = run(deltas, FinishReason.STOP_TOKEN)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    response = events[-1]["response"]
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 10,
    }
    assert (response["status"], response["completed_at"]) == ("completed", 9)
    assert events[0]["response"]["status"] == "in_progress"


def test_an_answer_that_is_cut_is_incomplete() -> None:
    output, events = run([delta(reasoning="a"), delta("b")], FinishReason.LENGTH)
    assert events[-1]["type"] == "response.incomplete"
    assert output.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in output.items] == ["completed", "incomplete"]


def test_an_answer_without_text_has_all_events_of_the_response() -> None:
    output, events = run([delta()], FinishReason.STOP_TOKEN)
    types = [event["type"] for event in check_events(events)]
    assert types == ["response.created", "response.in_progress", "response.completed"]
    assert output.response["output"] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("no", reason="INVALID_REQUEST", param="input"), "invalid_prompt"),
        (ResourceExhaustedError("full", reason="QUEUE_FULL"), "rate_limit_exceeded"),
        (InternalError("oh", reason="INTERNAL"), "server_error"),
    ],
)
def test_an_error_is_an_event_and_the_end_of_the_response(error: OutriderError, code: str) -> None:
    output = ResponseOutput(MEMBERS)
    events = output.push_delta(delta("half"))
    described: HttpError = describe_error(error)
    events += output.fail(described)
    *_, told, last = check_events(events)
    assert (told["type"], told["message"], told["param"]) == (
        "error",
        error.message,
        error.param or None,
    )
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": code, "message": error.message}
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
    assert output.status == "failed" and output.has_ended


def test_a_response_is_queued_in_progress_and_cancelled() -> None:
    output = ResponseOutput(MEMBERS)
    assert check_response(output.response)["status"] == "queued"
    output.start()
    assert check_response(output.response)["status"] == "in_progress" and not output.has_ended
    output.push_delta(delta("half"))
    assert output.items == ()
    output.cancel()
    assert check_response(output.response)["status"] == "cancelled" and output.has_ended
    assert [item["content"][0]["text"] for item in output.items] == ["half"]
