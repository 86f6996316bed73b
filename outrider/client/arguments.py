"""Validation of client arguments other than the options of a request.

Each check raises InvalidRequestError (INVALID_OPTION) with a message that names the argument and
the allowed values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from outrider.errors import InvalidRequestError
from outrider.ids import RequestId
from outrider.wire.checks import quote_value

ArgumentT = TypeVar("ArgumentT")

MAX_TIMEOUT_S: Final = 365 * 86400.0
"""Maximum timeout of a request, in seconds (one year). The timestamp arithmetic of gRPC overflows
for timeouts of centuries."""


def is_text(value: object) -> bool:
    """Return whether a value is a string that can be encoded in UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def invalid_argument(name: str, wanted: str, value: object) -> InvalidRequestError:
    """Return the error for argument `name` with the wrong type or value. `wanted` describes the
    allowed values."""
    return InvalidRequestError(
        f"{name} must be {wanted}, got {quote_value(value)}", reason="INVALID_OPTION"
    )


def check_address(address: str) -> str:
    """Return the address of a router unchanged. Raises InvalidRequestError if it is not an
    address."""
    if not (is_text(address) and address and address.isprintable()):
        raise invalid_argument("address", "HOST:PORT of a router", address)
    return address


def check_kind(name: str, value: ArgumentT | None, kind: type[ArgumentT]) -> ArgumentT | None:
    """Return an optional argument unchanged. Raises InvalidRequestError if it is neither None nor
    an instance of `kind`."""
    if value is not None and not isinstance(value, kind):
        raise invalid_argument(name, f"a {kind.__name__} or None", value)
    return value


def check_timeout_s(timeout_s: float | None) -> float | None:
    """Return a timeout in seconds, where None means no limit. Raises InvalidRequestError if it is
    invalid."""
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    # The comparison is false for NaN.
    if not (is_number and 0.0 <= timeout_s <= MAX_TIMEOUT_S):
        wanted = f"a number of seconds in [0, {MAX_TIMEOUT_S:.0f}], or None for no bound"
        raise invalid_argument("timeout_s", wanted, timeout_s)
    return timeout_s


def check_request_ids(request_ids: Iterable[str]) -> list[RequestId]:
    """Return the request ids as a list. A single string is refused, because its characters would
    otherwise be taken as ids. Raises InvalidRequestError."""
    wanted = "a sequence of texts"
    if isinstance(request_ids, (str, bytes, Mapping)) or not isinstance(request_ids, Iterable):
        raise invalid_argument("request_ids", wanted, request_ids)
    ids = list(request_ids)
    if not all(map(is_text, ids)):
        raise invalid_argument("request_ids", wanted, ids)
    return [RequestId(request_id) for request_id in ids]
