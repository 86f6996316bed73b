"""Validation of client arguments other than the options of a request.

Each check raises InvalidRequestError (INVALID_OPTION), which names the argument and what is
allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from outrider.errors import InvalidRequestError
from outrider.ids import RequestId
from outrider.wire.checks import quote_value

ArgumentT = TypeVar("ArgumentT")

MAX_TIMEOUT_S: Final = 365 * 86400.0
"""Longest timeout of a request, one year; gRPC's arithmetic overflows for timeouts of centuries."""


def is_text(value: object) -> bool:
    """Return whether a value is a string that UTF-8 can encode."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def invalid_argument(name: str, wanted: str, value: object) -> InvalidRequestError:
    """Return the error of an argument with a wrong type or value."""
    return InvalidRequestError(
        f"{name} must be {wanted}, got {quote_value(value)}", reason="INVALID_OPTION"
    )


def check_address(address: str) -> str:
    """Check the address of a router. Raises InvalidRequestError."""
    if not (is_text(address) and address and address.isprintable()):
        raise invalid_argument("address", "HOST:PORT of a router", address)
    return address


def check_kind(name: str, value: ArgumentT | None, kind: type[ArgumentT]) -> ArgumentT | None:
    """Check that an optional argument is of one class. Raises InvalidRequestError."""
    if value is not None and not isinstance(value, kind):
        raise invalid_argument(name, f"a {kind.__name__} or None", value)
    return value


def check_timeout_s(timeout_s: float | None) -> float | None:
    """Check a timeout in seconds; None is no limit. Raises InvalidRequestError."""
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    # The comparison is false for NaN.
    if not (is_number and 0.0 <= timeout_s <= MAX_TIMEOUT_S):
        wanted = f"a number of seconds in [0, {MAX_TIMEOUT_S:.0f}], or None for no bound"
        raise invalid_argument("timeout_s", wanted, timeout_s)
    return timeout_s


def check_request_ids(request_ids: Iterable[str]) -> list[RequestId]:
    """Check a sequence of request ids. A single string is refused, because its characters would be
    taken for ids. Raises InvalidRequestError."""
    wanted = "a sequence of texts"
    if isinstance(request_ids, (str, bytes, Mapping)) or not isinstance(request_ids, Iterable):
        raise invalid_argument("request_ids", wanted, request_ids)
    ids = list(request_ids)
    if not all(map(is_text, ids)):
        raise invalid_argument("request_ids", wanted, ids)
    return [RequestId(request_id) for request_id in ids]
