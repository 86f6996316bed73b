"""Every typed error has one status."""

from __future__ import annotations

import json

import pytest
from outrider_router.api.http.errors import STATUSES, describe_error
from outrider_router.api.http.unsupported_fields import UnsupportedFieldError

from outrider import errors
from outrider.errors import OutriderError, ResourceExhaustedError

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OutriderError)
]
EXPECTED = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "FAILED_PRECONDITION": 500,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""By gRPC's code."""


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_has_its_status_and_openais_form(kind: type[OutriderError]) -> None:
    told = describe_error(kind("it went wrong", reason="SOME_REASON"))
    assert told.status == EXPECTED[kind.code]
    error = json.loads(told.body)["error"]
    assert error["message"] == "it went wrong" and error["code"] == "some_reason"
    assert set(error) == {"message", "type", "param", "code"}


def test_a_field_that_is_not_supported_is_named() -> None:
    told = describe_error(UnsupportedFieldError("echo is not supported", param="echo"))
    assert (told.status, told.param, told.code) == (400, "echo", "unsupported")


def test_every_code_has_an_entry_of_its_own() -> None:
    assert {kind.code for kind in STATUSES} == {kind.code for kind in CLASSES}


def test_a_bug_is_opaque() -> None:
    told = describe_error(KeyError("a secret"))
    assert told.status == 500 and "secret" not in told.body


@pytest.mark.parametrize(
    ("hint_s", "seconds", "millis"), [(0.05, "1", "50"), (2.0, "2", "2000"), (1.2341, "2", "1235")]
)
def test_the_hint_is_told_in_whole_seconds_and_in_milliseconds(
    hint_s: float, seconds: str, millis: str
) -> None:
    told = describe_error(ResourceExhaustedError("full", reason="QUEUE_FULL", retry_after_s=hint_s))
    assert told.headers == {"retry-after": seconds, "retry-after-ms": millis}


@pytest.mark.parametrize("hint_s", [None, float("inf"), float("nan")])
def test_without_a_hint_there_is_no_header(hint_s: float | None) -> None:
    assert describe_error(ResourceExhaustedError("full", retry_after_s=hint_s)).headers == {}


def test_openais_clients_know_some_reasons_by_another_name() -> None:
    told = describe_error(errors.InvalidRequestError("too long", reason="PROMPT_TOO_LONG"))
    assert json.loads(told.body)["error"]["code"] == "context_length_exceeded"
