"""Typed reads of `config.json` fields; errors name the key and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.errors import InvalidRequestError


def read_size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the field `key`, which must be a positive integer.

    If the key is missing or null, return `default`. Raises InvalidRequestError if the field is
    missing and has no default, or is not a positive integer.
    """
    value = _find(raw, key, default)
    if not _is_number(value) or value < 1 or value != int(value):
        raise _malformed(key, "a positive integer", value)
    return int(value)


def read_positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return the field `key`, which must be a finite positive number. `default` and the errors are
    as in `read_size`."""
    value = _find(raw, key, default)
    if not _is_number(value) or value <= 0:
        raise _malformed(key, "a finite positive number", value)
    return float(value)


def read_mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the field `key`, which must be a JSON object. Return an empty mapping if the key is
    missing or null. Raises InvalidRequestError for any other value."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _malformed(key, "a JSON object", value)
    return value


def read_token_ids(raw: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the field `key`, which is a token id or a list of token ids. Return no ids
    if the key is missing or null.

    Raises InvalidRequestError for ids outside the vocabulary.
    """
    value = raw.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < vocab_size:
            raise _malformed(key, f"of token ids in 0..{vocab_size - 1} (vocab_size)", each)
    return tuple(ids)


def _find(raw: Mapping[str, Any], key: str, default: float | None) -> Any:
    value = raw.get(key)
    if value is not None:
        return value
    if default is None:
        raise InvalidRequestError(f"{key} is missing")
    return default


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _malformed(key: str, allowed: str, value: Any) -> InvalidRequestError:
    shown = repr(value)
    return InvalidRequestError(
        f"{key} must be {allowed}, not {shown if len(shown) <= 80 else shown[:80] + '...'}"
    )
