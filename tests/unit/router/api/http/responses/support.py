"""Responses in tests: what OpenAI's package takes, streams that are put together, and scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import httpx
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from outrider_router.requests.service import RouterService
from pydantic import TypeAdapter

from tests.fakes.tokenizer import EOS_ID
from tests.fakes.verifier import FakeVerifier, Script

EVENT: Final[TypeAdapter[Any]] = TypeAdapter(ResponseStreamEvent)
ITEM: Final[TypeAdapter[Any]] = TypeAdapter(ResponseItem)
URL: Final = "/v1/responses"
CALL: Final = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "name": "f",
    "description": "A function.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}


def check_response(body: dict[str, Any]) -> dict[str, Any]:
    """A response that OpenAI's package takes."""
    assert Response.model_validate(body, strict=True).id.startswith("resp_")
    for item in body["output"]:
        ITEM.validate_python(item, strict=True)
    return body


def read_stream(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each as OpenAI sends it and as OpenAI's package takes it."""
    events = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return check_events(events)


def check_events(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events in the order of their numbers, each of which OpenAI's package takes."""
    for number, event in enumerate(events):
        assert EVENT.validate_python(event, strict=True).type == event["type"]
        assert event["sequence_number"] == number
        if "response" in event:
            check_response(event["response"])
    return list(events)


def join_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items that a client puts together from the deltas of a stream. Checks that items,
    parts and texts begin and end in order."""
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
        if "output_index" in event:
            assert event["output_index"] == len(done)
        match kind:
            case "output_item.added":
                assert len(items) == len(done)
                items.append(json.loads(json.dumps(event["item"])))
            case "content_part.added":
                assert event["content_index"] == len(items[-1]["content"]) == 0
                items[-1]["content"].append(dict(event["part"]))
            case "output_text.delta" | "reasoning_text.delta":
                items[-1]["content"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == items[-1]["arguments"]
            case "content_part.done":
                assert event["part"] == items[-1]["content"][0]
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert event["item"] == items[-1]
                done.append(items[-1])
    return items


def script(router: RouterService, *answers: str) -> Script:
    """A script by which sessions answer with these texts, one after another; the last repeats."""
    texts = list(answers)

    def answer(spec: Any) -> list[int]:
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        return [*router.tokenizer.encode(text), EOS_ID]

    return answer


def prompt(router: RouterService, verifier: FakeVerifier) -> str:
    """The text of the newest prompt."""
    spec = verifier.specs[-1]
    return router.tokenizer.decode(spec.token_ids[: spec.prompt_len], with_special=True)


def turn(role: str, text: str) -> str:
    """A message as the tests' chat template renders it."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


async def create(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """Create a response; it must be one."""
    answer = await client.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    return check_response(answer.json())


async def refusal(client: httpx.AsyncClient, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error for a body."""
    answer = await client.post(URL, json=body)
    assert answer.status_code == status, answer.text
    return dict(answer.json()["error"])
