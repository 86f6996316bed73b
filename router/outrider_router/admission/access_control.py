"""Access control of the gRPC and HTTP APIs: authentication, and the limits of each API key."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from outrider.errors import (
    InvalidRequestError,
    OutriderError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from outrider.ids import TenantId
from outrider.wire.inference import GenerateRequest
from outrider_router.base.api_keys import ApiKey, check_operator, find_key, read_keys
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.tenants import (
    ANONYMOUS,
    AUTHORIZATION_KEY,
    Caller,
    TokenBucket,
    tenant_of,
)
from outrider_router.config import RouterConfig

logger = logging.getLogger(__name__)

RELOAD_INTERVAL_S: Final = 1.0
"""Time in seconds between two checks of whether the key file has changed."""
KEY_RATE_LIMITED, KEY_BUSY, KEY_TOO_MANY = "KEY_RATE_LIMITED", "KEY_BUSY", "KEY_TOO_MANY"
_BUSY_S = 1.0
"""Retry hint in seconds for an API key that has reached its limit of concurrent requests."""


class AccessGrant:
    """Permission for one admitted request. The owner must release it when the request ends, whether
    it succeeded or not.
    """

    __slots__ = ("_left", "request")

    def __init__(self, request: GenerateRequest, left: Callable[[], None]) -> None:
        self.request = request
        """The request, limited to what its API key allows."""
        self._left: Callable[[], None] | None = left

    def release(self) -> None:
        """Release the grant. Idempotent."""
        left, self._left = self._left, None
        if left is not None:
            left()


class AccessControl:
    """Authenticates callers and enforces the limits of their API keys. If no key file is
    configured, every caller is allowed.
    """

    def __init__(
        self, config: RouterConfig, metrics: RouterMetrics, *, clock: Callable[[], float]
    ) -> None:
        """Load the API keys of `config`, if a key file is configured.

        `clock` returns monotonic seconds. Raises NotFoundError if the key file is missing and
        InvalidRequestError if it is invalid.
        """
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._path = config.api_keys
        self._stamp: object = None
        self._problem = ""
        """Error message of the last attempt to reload the key file; empty if it succeeded."""
        self._keys: Mapping[str, ApiKey] = {}
        self._buckets: dict[str, tuple[ApiKey, TokenBucket]] = {}
        self._held: dict[str, int] = {}
        """Number of waiting and running requests of each API key, by the key's name."""
        self._look_at = clock() + RELOAD_INTERVAL_S
        if self._path is not None:
            self._keys, self._stamp = read_keys(self._path), _stamp_of(self._path)

    @property
    def requires_keys(self) -> bool:
        """Whether callers must send an API key."""
        return self._path is not None

    def authorize(self, header: str | None) -> Caller:
        """Return the caller whose API key is in an `authorization` header. Without a key file the
        caller is anonymous.

        Raises UnauthenticatedError and counts the refusal if the key is missing or unknown. Never
        logs the header.
        """
        if not self.requires_keys:
            return ANONYMOUS
        name, key = self._find(header)
        return Caller(tenant=TenantId(key.tenant or name), key_name=name)

    def authorize_call(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Return the caller whose API key is in the metadata of a call. The names of metadata
        fields must be in lower case. Raises UnauthenticatedError as `authorize` does.
        """
        return self.authorize(authorization_of(metadata))

    def authorize_operator(self, header: str | None) -> None:
        """Check that the API key in an `authorization` header has the operator permission. If no
        key file is configured, every caller is accepted.

        Raises UnauthenticatedError if the key is missing or unknown, and PermissionDeniedError if
        it does not have the permission.
        """
        if self.requires_keys:
            name, key = self._find(header)
            try:
                check_operator(name, key)
            except OutriderError as error:
                self.count_refusal(error.reason)
                raise

    def identify_caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Return the caller of a call, from the call's metadata. The caller is identified by its
        API key if a key file is configured, otherwise by the source that `overload.tenant_from`
        names.

        The names of metadata fields must be in lower case. Raises UnauthenticatedError for a wrong
        key and InvalidRequestError for an invalid tenant name.
        """
        if self.requires_keys:
            return self.authorize_call(metadata)
        return Caller(tenant=tenant_of(self._config.overload.tenant_from, metadata))

    def count_refusal(self, reason: str) -> None:
        """Count a refused call in the router's metrics. `reason` is the reason of its error."""
        self._metrics.access_refusals.labels(reason).inc()

    def enter_requests(
        self, caller: Caller, requests: Sequence[GenerateRequest]
    ) -> tuple[AccessGrant, ...]:
        """Admit the requests of one call, all of them or none, and return a grant for each.

        Raises ResourceExhaustedError (KEY_BUSY, KEY_RATE_LIMITED) if the key is at a limit now, and
        InvalidRequestError (KEY_MAX_TOKENS, KEY_PRIORITY, KEY_TOO_MANY) if the key can never send
        these requests.
        """
        # None if no keys are required, or if the key was removed after its call was authorized.
        key = self._keys.get(caller.key_name)
        if key is not None:
            most = self._config.default_max_tokens
            requests = [_cut(request, key, most) for request in requests]
        self._admit(caller, key, len(requests))
        return tuple(AccessGrant(request, lambda: self._hold(caller, -1)) for request in requests)

    @contextmanager
    def limit_call(self, caller: Caller) -> Generator[None]:
        """Count a call as one request of its API key, for the duration of a `with` block. This is
        for calls that generate no tokens but cost work, such as tokenization.

        Raises ResourceExhaustedError as `enter_requests` does.
        """
        self._admit(caller, self._keys.get(caller.key_name), 1)
        try:
            yield
        finally:
            self._hold(caller, -1)

    def reload_keys(self) -> None:
        """Reload the key file. If the file is invalid, the error is logged and the previous keys
        stay valid.
        """
        self._problem = ""
        if self._path is not None:
            self._reload(self._path)

    def _reload(self, path: Path) -> None:
        """Reload the key file. An error with the same message as the last one is not logged
        again.
        """
        try:
            stamp = _stamp_of(path)
            self._keys = read_keys(path)
        except OutriderError as error:
            self._metrics.keys_failing.set(1)
            if error.message != self._problem:
                self._problem = error.message
                logger.error(
                    "API key file rejected; previous keys kept", extra={"reason": error.message}
                )
            return
        self._stamp, self._problem = stamp, ""
        self._metrics.keys_failing.set(0)
        logger.info("API keys reloaded", extra={"keys": len(self._keys)})

    def _find(self, header: str | None) -> tuple[str, ApiKey]:
        self._look()
        # Threads of the metrics port call this too, so another thread may replace `_keys`
        # meanwhile.
        keys = self._keys
        try:
            name = find_key(keys, header)
            return name, keys[name]
        except UnauthenticatedError as error:
            self.count_refusal(error.reason)
            raise

    def _look(self) -> None:
        now = self._clock()
        if now >= self._look_at and self._path is not None:
            self._look_at = now + RELOAD_INTERVAL_S
            # An invalid file is read again at each check: a change of its permissions does not
            # change the stamp.
            if _stamp_of(self._path) != self._stamp or self._problem:
                self._reload(self._path)

    def _admit(self, caller: Caller, key: ApiKey | None, count: int) -> None:
        """Count `count` more requests of a caller. Raises as `enter_requests` does if the key's
        limits do not allow them.
        """
        if key is not None:
            self._check_capacity(caller.key_name, key, count)
            self._take(caller.key_name, key, count)
        self._hold(caller, count)

    def _check_capacity(self, name: str, key: ApiKey, count: int) -> None:
        if not key.max_concurrent:
            return
        if count > key.max_concurrent:
            raise _too_many(
                f"the API key {name!r} may have at most {key.max_concurrent} requests in progress",
                count,
            )
        if self._held.get(name, 0) + count > key.max_concurrent:
            self._metrics.refusals.labels(KEY_BUSY).inc()
            raise ResourceExhaustedError(
                f"the API key {name!r} may have at most {key.max_concurrent} requests in progress",
                reason=KEY_BUSY,
                retry_after_s=_BUSY_S,
            )

    def _take(self, name: str, key: ApiKey, count: int) -> None:
        if not key.requests_per_s:
            return
        now = self._clock()
        burst = key.requests_burst or max(1.0, key.requests_per_s)
        # A single request passes whenever the bucket is full, however small the bucket is.
        if count > max(1.0, burst):
            raise _too_many(
                f"the API key {name!r} may send at most {burst:g} requests at once", count
            )
        of, bucket = self._buckets.get(name, (None, None))
        if bucket is None or of != key:
            bucket = TokenBucket(key.requests_per_s, burst, now)
            self._buckets[name] = (key, bucket)
        if bucket.shortage(count, now):
            self._metrics.refusals.labels(KEY_RATE_LIMITED).inc()
            raise ResourceExhaustedError(
                f"the API key {name!r} may send at most {key.requests_per_s:g} requests per second",
                reason=KEY_RATE_LIMITED,
                retry_after_s=bucket.hint_s(count, now),
            )
        bucket.take_tokens(count)

    def _hold(self, caller: Caller, change: int) -> None:
        if not caller.key_name:
            return
        held = self._held.get(caller.key_name, 0) + change
        if held > 0:
            self._held[caller.key_name] = held
        else:
            self._held.pop(caller.key_name, None)


def authorization_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the value of `authorization` in a call's metadata, or None if it is absent."""
    value = next((value for key, value in metadata if key == AUTHORIZATION_KEY), None)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _cut(request: GenerateRequest, key: ApiKey, default_max_tokens: int) -> GenerateRequest:
    """Return the request with its default length limited to what the key allows. Raises
    InvalidRequestError if the request asks for more than the key allows.
    """
    if request.priority > key.max_priority:
        raise InvalidRequestError(
            f"priority must be at most {key.max_priority} with this API key, "
            f"got {request.priority}",
            reason="KEY_PRIORITY",
            param="priority",
        )
    if not key.max_tokens:
        return request
    stopping = request.stopping
    for name in ("max_tokens", "min_tokens"):
        asked = getattr(stopping, name)
        if asked is not None and asked > key.max_tokens:
            raise InvalidRequestError(
                f"{name} must be at most {key.max_tokens} with this API key, got {asked}",
                reason="KEY_MAX_TOKENS",
                param="max_tokens",
            )
    if stopping.max_tokens is not None:
        return request
    default = stopping.default_max_tokens
    most = min(default_max_tokens if default is None else default, key.max_tokens)
    stopping = dataclasses.replace(stopping, default_max_tokens=most)
    return dataclasses.replace(request, stopping=stopping)


def _too_many(bound: str, count: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{bound}, and this request counts as {count}, because each choice counts as one",
        reason=KEY_TOO_MANY,
        param="n",
    )


def _stamp_of(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)
