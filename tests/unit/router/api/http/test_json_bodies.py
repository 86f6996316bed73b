"""Bodies are bounded by the values of their JSON, and texts are no values."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from outrider_router.api.http.json_route import LARGE_BYTES, MAX_LEVELS, JsonParser, find_field
from outrider_router.requests.service import RouterService
from starlette.exceptions import HTTPException

from tests.unit.router.api.http.helpers import http_client, set_http_options


@pytest.mark.parametrize(
    ("document", "values"),
    [
        ([], 2),
        ([1], 2),
        ([1] * 9, 10),
        ([[1, 2], {"a": 3}], 6),
        (["a,[{", 'b",[{', "\\", ",,\\"], 5),
        ({"a": 'x\\",,,', "b": [1, "[,{"]}, 5),
    ],
)
async def test_values_are_counted_and_marks_in_texts_are_not(document: object, values: int) -> None:
    body = json.dumps(document).encode()
    assert await JsonParser(values).parse(body) == document
    with pytest.raises(HTTPException, match=f"more than {values - 1} JSON values"):
        await JsonParser(values - 1).parse(body + b" " * values)


async def test_many_texts_with_many_marks_are_refused_without_being_left_out() -> None:
    body = json.dumps([",,"] * 50_000).encode()
    with pytest.raises(HTTPException, match="JSON values"):
        await JsonParser(100_000).parse(body)


async def test_large_bodies_are_parsed_one_at_a_time_with_pauses() -> None:
    parser = JsonParser(1 << 20)
    body = json.dumps([{}] * 200_000).encode()
    assert len(body) > LARGE_BYTES
    gaps = []

    async def tick() -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0)
            gaps.append(time.monotonic() - begun)

    ticking = asyncio.create_task(tick())
    begun = time.monotonic()
    await asyncio.gather(*(parser.parse(body) for _ in range(6)))
    whole = time.monotonic() - begun
    ticking.cancel()
    assert max(gaps) < whole / 2, "the loop ran between any two of them"


async def test_too_many_values_are_a_400_that_says_how_many_may_be(router: RouterService) -> None:
    set_http_options(router, max_json_values=1000)
    async with http_client(router) as client:
        answer = await client.post("/v1/completions", json={"prompt": [1] * 2000})
        assert answer.status_code == 400
        assert "more than 1000 JSON values" in answer.json()["error"]["message"]
        text = {"prompt": "a, b [c] {d}" * 100, "max_tokens": 1}
        assert (await client.post("/v1/completions", json=text)).status_code == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [("chat/completions", "tools"), ("chat/completions", 'a"b'), ("responses", "input")],
)
async def test_a_body_that_is_nested_too_deeply_is_refused_by_field(
    router: RouterService, path: str, field: str
) -> None:
    deep = "[" * (MAX_LEVELS + 10) + "]" * (MAX_LEVELS + 10)
    name = field.replace('"', '\\"')
    body = f'{{"model": [{{"x": ","}}],\n "max_tokens": 1, "{name}": {deep}}}'
    async with http_client(router) as client:
        answer = await client.post(
            f"/v1/{path}", content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == name
    assert f"at most {MAX_LEVELS} levels deep" in error["message"]


@pytest.mark.parametrize(
    ("value", "field"),
    [(r'{"b": "\ud800"}', "a"), (f'{{"b": {"9" * 5000}}}', "a"), ("[1, }", "a"), ("1} x", None)],
)
async def test_what_is_no_json_is_refused_by_field(
    router: RouterService, value: str, field: str | None
) -> None:
    async with http_client(router) as client:
        answer = await client.post(
            "/v1/chat/completions",
            content=f'{{"z": {{"y": 1}}, "a": {value}, "c": 1}}',
            headers={"content-type": "application/json"},
        )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [' + b"[]," * 2_000_000,
        b'{"a": ' + b"\n" * 30_000_000,
        b'{"a": ' + b"1" * 30_000_000,
        b'{"a": "' + b"\\n" * 15_000_000,
    ],
    ids=["marks", "lines", "digits", "escapes"],
)
def test_the_search_for_a_field_is_short(body: bytes) -> None:
    line, column = body.count(b"\n") + 1, len(body) - body.rfind(b"\n")
    begun = time.monotonic()
    assert find_field(body, line=line, column=column) == ""
    assert time.monotonic() - begun < 0.5


def test_a_long_name_of_a_field_is_cut() -> None:
    body = b'{"' + b"a" * 100_000 + b'": x}'
    assert find_field(body, line=1, column=len(body) - 1) == "a" * 64
