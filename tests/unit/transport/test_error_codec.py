from __future__ import annotations

import logging

import pytest

from outrider import errors
from outrider.errors import InternalError, OutriderError
from outrider.transport.error_codec import ErrorStatus, from_status, to_status

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OutriderError) and kind is not OutriderError
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_type_and_content(kind: type[OutriderError]) -> None:
    error = kind("what was wrong", reason="WHY", retry_after_s=2.5)
    for twin in (from_status(to_status(error)), error.copy()):
        assert type(twin) is kind and twin is not error
        assert (twin.message, twin.reason, twin.retry_after_s) == ("what was wrong", "WHY", 2.5)


def test_a_bug_is_logged_here_and_opaque_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status = to_status(KeyError("secret"))
    assert "secret" in caplog.text
    assert "secret" not in status.message
    assert type(from_status(status)) is InternalError


def test_unknown_kinds_fall_back_on_the_code_and_unknown_codes_on_internal() -> None:
    newer = ErrorStatus(code="NOT_FOUND", kind="BrandNewError", message="x")
    assert type(from_status(newer)) is errors.NotFoundError
    assert type(from_status(ErrorStatus(code="DATA_LOSS", kind="", message="x"))) is InternalError


def test_long_messages_are_cut() -> None:
    assert len(to_status(errors.NotFoundError("x" * 100_000)).message) == 2048
