"""API keys: the key file, and the caller that a credential identifies.

The file holds only hashes of the keys. A key is 32 random bytes, so a plain SHA-256 hash of it
cannot be reversed, and a lookup takes microseconds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from outrider.config import load_config
from outrider.errors import InvalidRequestError, PermissionDeniedError, UnauthenticatedError
from outrider.wire.limits import MAX_PRIORITY
from outrider_router.base.tenants import MAX_TENANT_CHARS

MAX_KEYS: Final = 4096
MAX_HEADER_CHARS: Final = 1024
"""Maximum length of an `authorization` header in characters; a longer header is refused."""
_HASH_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One API key and its limits; keys of a table `[keys.NAME]`."""

    sha256: str
    """SHA-256 of the key, 64 hexadecimal digits in lower case."""
    tenant: str = ""
    """Tenant of the key's requests, whose limits apply; "" uses the name of the key."""
    requests_per_s: float = 0.0
    """Sustained requests per second; 0 is unlimited."""
    requests_burst: float = 0.0
    """Maximum burst of requests after a pause; 0 means one second's worth, at least one."""
    max_concurrent: int = 0
    """Maximum number of waiting and running requests; one more is refused. 0 is unlimited."""
    max_tokens: int = 0
    """Maximum number of tokens that a request may ask for; 0 is unlimited."""
    max_priority: int = MAX_PRIORITY
    """Maximum priority that a request may ask for. Requests of higher priority go first and preempt
    others."""
    operator: bool = False
    """Whether the key may also add and remove drafters and read metrics."""

    def __post_init__(self) -> None:
        # The message omits the value, because it may be the key itself.
        if len(self.sha256) != _HASH_CHARS or set(self.sha256) - set("0123456789abcdef"):
            raise ValueError("sha256 must be 64 hexadecimal digits in lower case")
        if len(self.tenant) > MAX_TENANT_CHARS:
            raise ValueError(f"tenant must have at most {MAX_TENANT_CHARS} characters")
        for name in ("requests_per_s", "requests_burst"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative")
        if abs(self.max_priority) > MAX_PRIORITY:
            raise ValueError(f"max_priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        for name in ("max_concurrent", "max_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysFile:
    """Contents of an API key file."""

    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    """API keys by name; names appear in logs and metrics, so they are no secrets."""

    def __post_init__(self) -> None:
        if len(self.keys) > MAX_KEYS:
            raise ValueError(f"a key file may hold at most {MAX_KEYS} keys, got {len(self.keys)}")
        for name in self.keys:
            if not name or len(name) > MAX_TENANT_CHARS:
                raise ValueError(
                    f"names of keys must have 1 to {MAX_TENANT_CHARS} characters, got {name!r}"
                )
        if len({key.sha256 for key in self.keys.values()}) != len(self.keys):
            raise ValueError("each key must have one name only: two names have the same sha256")


def read_keys(path: Path) -> Mapping[str, ApiKey]:
    """Read a key file and return its keys by name.

    Raises NotFoundError if the file is missing and InvalidRequestError (INVALID_CONFIG) if it is
    malformed.
    """
    try:
        return load_config(KeysFile, path).keys
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"API key file {path}: {error.message}", reason=error.reason
        ) from error


def find_key(keys: Mapping[str, ApiKey], header: str | None) -> str:
    """Return the name of the API key in an `authorization` header. The header is `Bearer KEY` or,
    for browsers, `Basic` with the key as the password.

    Raises UnauthenticatedError (NO_KEY, WRONG_KEY). The duration depends neither on how similar a
    wrong key is to a valid one nor on which key matches.
    """
    secret = _secret_of(header)
    digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
    found = ""
    for name, key in keys.items():
        if hmac.compare_digest(digest, key.sha256):
            found = name
    if not found:
        raise UnauthenticatedError("the API key is unknown", reason="WRONG_KEY")
    return found


def check_operator(name: str, key: ApiKey) -> None:
    """Raise PermissionDeniedError (NOT_OPERATOR) unless the key has the operator permission."""
    if not key.operator:
        raise PermissionDeniedError(
            f"the API key {name!r} does not have the operator permission", reason="NOT_OPERATOR"
        )


def _secret_of(header: str | None) -> str:
    if not header:
        raise UnauthenticatedError(
            "an API key is required: send the header `authorization: Bearer KEY`", reason="NO_KEY"
        )
    scheme, _, rest = header.strip().partition(" ")
    credential = rest.strip()
    if len(header) <= MAX_HEADER_CHARS and credential:
        match scheme.lower():
            case "bearer":
                return credential
            case "basic":
                return _password_of(credential)
    raise UnauthenticatedError(
        "authorization must be `Bearer KEY`, or `Basic` with the key as password",
        reason="WRONG_KEY",
    )


def _password_of(credential: str) -> str:
    try:
        return base64.b64decode(credential, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
