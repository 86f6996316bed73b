"""Validation helpers of the codecs; each raises InvalidMessageError with the allowed values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Generator, Sized
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from google.protobuf.message import DecodeError, Message

from outrider.errors import InvalidMessageError, InvalidRequestError
from outrider.wire.limits import (
    LOWEST_LOGPROB,
    MAX_MESSAGE_BYTES,
    MAX_NAME_BYTES,
    MAX_VOCAB_SIZE,
)

MessageT = TypeVar("MessageT", bound=Message)

_MAX_QUOTED = 80
"""Largest number of characters of a value that an error message quotes."""
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def quote_value(value: object) -> str:
    """Return the beginning of a value's repr for an error message."""
    return repr(value)[:_MAX_QUOTED]


def raise_invalid(message: str) -> NoReturn:
    """Raise InvalidMessageError with this message."""
    raise InvalidMessageError(message, reason="INVALID_MESSAGE")


@contextmanager
def convert_validation_errors(what: str) -> Generator[None]:
    """Convert an InvalidRequestError of the code within the context into an InvalidMessageError
    whose message begins with `what`.
    """
    try:
        yield
    except InvalidMessageError:
        raise
    except InvalidRequestError as error:
        raise InvalidMessageError(f"{what}: {error.message}", reason=error.reason) from error


def parse_message(kind: type[MessageT], data: bytes | memoryview) -> MessageT:
    """Parse protobuf bytes. Raises InvalidMessageError if the bytes are invalid or too many."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise_invalid(
            f"{kind.__name__} of {len(data)} bytes, at most {MAX_MESSAGE_BYTES} are allowed"
        )
    try:
        return kind.FromString(data)  # type: ignore[arg-type]
    except DecodeError as error:
        raise InvalidMessageError(
            f"{len(data)} bytes are not a {kind.__name__}", reason="INVALID_MESSAGE"
        ) from error


def check_text(value: str, name: str, *, limit: int = MAX_NAME_BYTES, empty: bool = False) -> str:
    """Return `value` if it has at most `limit` bytes and, unless `empty` is true, is not empty.
    Raises InvalidMessageError otherwise.
    """
    if not value and not empty:
        raise_invalid(f"{name} must not be empty")
    if len(value) > limit or (not value.isascii() and len(value.encode()) > limit):
        raise_invalid(f"{name} must be at most {limit} bytes, got {len(value)} characters")
    return value


def check_traceparent(value: str) -> str:
    """Return `value` if it is "" or a W3C Trace Context of version 00. Raises InvalidMessageError
    otherwise.
    """
    if value and not _TRACEPARENT.fullmatch(value):
        raise_invalid(
            f"traceparent must be 00-TRACE-SPAN-FLAGS in lower-case hex, got {value[:64]!r}"
        )
    return value


def check_number(value: int, name: str, *, low: int = 0, high: int) -> int:
    """Return `value` if it is in [low, high]. Raises InvalidMessageError otherwise."""
    if not low <= value <= high:
        raise_invalid(f"{name} must be in [{low}, {high}], got {value}")
    return value


def check_finite(value: float, name: str) -> float:
    """Return `value`, such as a time or rate, if it is finite and not negative. Raises
    InvalidMessageError otherwise.
    """
    if not (math.isfinite(value) and value >= 0.0):
        raise_invalid(f"{name} must be finite and >= 0, got {value}")
    return value


def check_logprob(value: float, name: str) -> float:
    """Return `value` if it is a valid log-probability, in [LOWEST_LOGPROB, 0]. Raises
    InvalidMessageError otherwise.
    """
    if not LOWEST_LOGPROB <= value <= 0.0:
        raise_invalid(f"{name} must be in [{LOWEST_LOGPROB}, 0], got {value}")
    return value


def check_count(values: Sized, name: str, *, high: int) -> None:
    """Raise InvalidMessageError if a repeated field has more than `high` elements."""
    length = len(values)
    if length > high:
        raise_invalid(f"{name} must have at most {high} entries, got {length}")


def check_token_ids(values: Collection[int], name: str, *, high: int) -> tuple[int, ...]:
    """Return the token ids `values` as a tuple. Raises InvalidMessageError if there are more than
    `high` or one is not below MAX_VOCAB_SIZE. The receiver must still check them against its
    vocabulary.
    """
    check_count(values, name, high=high)
    ids = tuple(values)
    if ids and max(ids) >= MAX_VOCAB_SIZE:
        raise_invalid(f"{name} must be below {MAX_VOCAB_SIZE}, got {max(ids)}")
    return ids
