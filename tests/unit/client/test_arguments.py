"""Values that the SDK cannot send raise its typed errors, which name the option."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.client import AsyncClient, Client, RetryPolicy, sync_client
from outrider.client.options import GenerateOptions, make_request, user
from outrider.errors import InvalidRequestError, OutriderError
from outrider.wire.inference import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from outrider.wire.inference_codec import request_to_pb

ODD: list[Any] = [
    5, -1, 2**70, 1.5, math.nan, True, "x", "", b"x", [], [None], ["a", 5], [1.5], [object()], {},
    {"a": 1}, {1: "a"}, {"a": {1}}, {1: object()}, {"a": math.nan}, object(), (1,), "\ud800",
    ["\ud800"], [[1]],
]  # fmt: skip
ADDRESS = "127.0.0.1:1"


@pytest.mark.parametrize("name", sorted(GenerateOptions.__annotations__))
@pytest.mark.filterwarnings("ignore:.*got a boolean:DeprecationWarning")
def test_no_value_of_an_option_raises_pythons_own_errors(name: str) -> None:
    for value in ODD:
        options: Any = {name: value}
        try:
            request_to_pb(make_request("a", options))
        except InvalidRequestError as error:
            assert name in error.message and len(error.message) < 250, error.message


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"regex": 5}, r"^regex must be a text, got 5$"),
        ({"grammar": b"a"}, r"^grammar must be a text, got b'a'$"),
        ({"json_schema": 5}, r"^json_schema must be a JSON schema, as a mapping .* got 5$"),
        ({"json_schema": {"enum": [object]}}, r"^json_schema must be a JSON schema"),
        ({"json_object": "yes"}, r"^json_object must be true or false, got 'yes'$"),
        ({"speculate": 2**70}, r"^speculate must be true or false"),
        ({"resume": "no"}, r"^resume must be true or false, got 'no'$"),
        ({"ignore_eos": 2**70}, r"^ignore_eos must be true or false"),
        ({"rule": 5}, r"^rule must be one of greedy, coupled, .* got 5$"),
        ({"drafter": "magic"}, r"^drafter must be one of none, eagle3, .* got 'magic'$"),
    ],
)
def test_an_option_says_what_is_allowed(options: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        request_to_pb(make_request("a", options))


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt(5),  # type: ignore[arg-type]
        TextPrompt("\ud800"),
        TokenPrompt("ab"),  # type: ignore[arg-type]
        TokenPrompt((True,)),
        ChatPrompt("ab"),  # type: ignore[arg-type]
        ChatPrompt((1,)),  # type: ignore[arg-type]
        [user(5)],  # type: ignore[arg-type]
        [user(None)],  # type: ignore[arg-type]
        [ChatMessage(role=5, content="a")],  # type: ignore[arg-type]
        [user("\ud800")],
        "\ud800",
    ],
)
def test_a_prompt_of_other_values_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt must be") as raised:
        make_request(prompt, {})
    assert raised.value.reason == "INVALID_PROMPT"


def test_true_and_false_are_schemas() -> None:
    structured = make_request("a", {"json_schema": True}).structured_output  # type: ignore[typeddict-item]
    assert structured is not None and structured.text == "true"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"address": 5}, r"^address must be HOST:PORT of a router, got 5$"),
        ({"address": ""}, r"^address must be"),
        ({"timeout_s": "x"}, r"^timeout_s must be a number of seconds in \[0, 31536000\], .*'x'$"),
        ({"timeout_s": math.nan}, r"^timeout_s must be"),
        ({"timeout_s": math.inf}, r"^timeout_s must be .* None for no bound"),
        ({"timeout_s": -1.0}, r"^timeout_s must be"),
        ({"timeout_s": True}, r"^timeout_s must be"),
        ({"retry": 5}, r"^retry must be a RetryPolicy or None, got 5$"),
        ({"tls": "ca.pem"}, r"^tls must be a TlsConfig or None, got 'ca.pem'$"),
        ({"api_key": 5}, r"^api_key must be a non-empty string of printable ASCII"),
        ({"api_key": []}, r"^api_key must be a non-empty string of printable ASCII"),
        ({"tenant": 5}, r"^tenant must be a non-empty string of printable ASCII"),
        ({"metadata": 5}, r"^metadata must be a sequence of pairs .* type int$"),
        ({"metadata": None}, r"^metadata must be a sequence of pairs"),
        ({"metadata": "ab"}, r"^metadata must be a sequence of pairs"),
        ({"metadata": {"a": "b"}}, r"^metadata must be a sequence of pairs"),
        ({"metadata": ["ab"]}, r"^metadata must be a sequence of pairs"),
        ({"metadata": [("a",)]}, r"^metadata must be a sequence of pairs"),
        ({"metadata": [(1, "a")]}, r"^a metadata key must consist of lower-case"),
        ({"metadata": [("a", 1)]}, r"^metadata a must be a non-empty string of printable ASCII"),
    ],
)
async def test_an_argument_of_a_client_is_named(
    kind: type[Client] | type[AsyncClient], arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        kind(**{"address": ADDRESS, **arguments})


@pytest.mark.parametrize(("name", "value"), [("timeout_s", "x"), ("metadata", 5)])
async def test_an_argument_of_a_call_is_named(name: str, value: object) -> None:
    arguments: Any = {name: value}
    with Client(ADDRESS) as client:
        with pytest.raises(InvalidRequestError, match=f"^{name} must be"):
            client.generate("a", **arguments)
        with pytest.raises(InvalidRequestError, match=f"^{name} must be"):
            client.stream("a", **arguments)
    async with AsyncClient(ADDRESS) as asynchronous:
        with pytest.raises(InvalidRequestError, match=f"^{name} must be"):
            await asynchronous.generate("a", **arguments)


@pytest.mark.parametrize("ids", ["req-1", b"r", 5, None, [5], ["\ud800"], {"a": 1}])
async def test_ids_to_abort_are_a_sequence_of_texts(ids: Any) -> None:
    with Client(ADDRESS) as client, pytest.raises(InvalidRequestError, match="^request_ids must"):
        client.abort(ids)
    async with AsyncClient(ADDRESS) as asynchronous:
        with pytest.raises(InvalidRequestError, match="^request_ids must"):
            await asynchronous.abort(ids)


def test_metadata_of_a_generator_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def record(metadata: Any) -> Any:
        sent.append(metadata)
        return metadata

    monkeypatch.setattr(sync_client, "add_trace_metadata", record)
    pairs: Any = ((key, "v") for key in ("a", "b"))
    with Client(ADDRESS, metadata=pairs, api_key="", retry=RetryPolicy(max_attempts=1)) as client:
        for _ in range(2):
            with pytest.raises(OutriderError):
                client.generate("a")
    assert sent == [(("a", "v"), ("b", "v"))] * 2


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_attempts": 0}, r"^max_attempts must be an integer >= 1, got 0$"),
        ({"max_attempts": "x"}, r"^max_attempts must be an integer >= 1"),
        ({"max_attempts": 1.5}, r"^max_attempts must be an integer >= 1"),
        ({"first_delay_s": "x"}, r"^first_delay_s must be a number >= 0, got 'x'$"),
        ({"first_delay_s": 9.0}, r"^first_delay_s must be at most max_delay_s \(8.0\), got 9.0$"),
        ({"max_hint_s": None}, r"^max_hint_s must be a number >= 0"),
        ({"resume_s": math.nan}, r"^resume_s must be a number >= 0"),
        ({"jitter": 1.5}, r"^jitter must be in \[0, 1\], got 1.5$"),
    ],
)
def test_a_retry_policy_names_what_it_cannot_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        RetryPolicy(**values)
