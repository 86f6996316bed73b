"""The gate of both fronts: who may come in, and how much each API key may ask for."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from outrider.config import load_config
from outrider.errors import (
    InvalidRequestError,
    OutriderError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from outrider.ids import TenantId
from outrider.wire.inference import GenerateRequest
from outrider_router.config import RouterConfig
from outrider_router.keys import (
    ANYBODY,
    ApiKey,
    Caller,
    KeysFile,
    check_operator,
    find_key,
)
from outrider_router.metrics import RouterMetrics
from outrider_router.tenants import AUTHORIZATION_KEY, TokenBucket, tenant_of

logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Time between two looks whether the file of keys has changed."""
KEY_RATE_LIMITED, KEY_BUSY = "KEY_RATE_LIMITED", "KEY_BUSY"
_BUSY_S = 1.0
"""Hint of a key that has as many requests as it may: one may have ended by then."""


class Gate:
    """Judges callers by their API keys, if there are any; else everybody may come in."""

    def __init__(
        self, config: RouterConfig, metrics: RouterMetrics, *, clock: Callable[[], float]
    ) -> None:
        """`clock` is monotonic, in seconds.

        Raises NotFoundError or InvalidRequestError for a file of keys that is no good.
        """
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._path = config.api_keys
        self._stamp: object = None
        self._keys: Mapping[str, ApiKey] = {}
        self._buckets: dict[str, tuple[ApiKey, TokenBucket]] = {}
        self._held: dict[str, int] = {}
        """Requests that wait or are served, by key."""
        self._look_at = clock() + LOOK_S
        if self._path is not None:
            self._keys, self._stamp = _read(self._path), _stamp_of(self._path)

    @property
    def closed(self) -> bool:
        """Whether API keys are asked for."""
        return self._path is not None

    def authorize(self, header: str | None) -> Caller:
        """Who sends this `authorization` header; anybody where no keys are asked for.

        Raises UnauthenticatedError, which is counted. Never logs what it is given.
        """
        if not self.closed:
            return ANYBODY
        name, key = self._find(header)
        return Caller(tenant=TenantId(key.tenant or name), key=name)

    def authorize_operator(self, header: str | None) -> None:
        """Like `authorize`; also PermissionDeniedError for a key that is not an operator's."""
        if self.closed:
            name, key = self._find(header)
            try:
                check_operator(name, key)
            except OutriderError as error:
                self.refused(error.reason)
                raise

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Who makes a call with this metadata (keys in lower case): by API key where they are
        asked for, else by what `overload.tenant_from` says. Raises UnauthenticatedError,
        InvalidRequestError."""
        if self.closed:
            return self.authorize(header_of(metadata))
        return Caller(tenant=tenant_of(self._config.overload.tenant_from, metadata))

    def refused(self, reason: str) -> None:
        """Count somebody who was turned away."""
        self._metrics.access_refusals.labels(reason).inc()

    def enter(self, caller: Caller, request: GenerateRequest) -> GenerateRequest:
        """Take a request in, and `leave` when it is over; the request as its key allows it.

        Raises ResourceExhaustedError (KEY_BUSY, KEY_RATE_LIMITED), InvalidRequestError
        (KEY_MAX_TOKENS, KEY_PRIORITY).
        """
        key = self._keys.get(caller.key)
        if key is None:
            # No key, or one that was taken away since its call was let in.
            self._hold(caller, 1)
            return request
        allowed = _cut(request, key, self._config.default_max_tokens)
        if key.max_concurrent and self._held.get(caller.key, 0) >= key.max_concurrent:
            self._metrics.refusals.labels(KEY_BUSY).inc()
            raise ResourceExhaustedError(
                f"the API key {caller.key!r} may have {key.max_concurrent} requests at once",
                reason=KEY_BUSY,
                retry_after_s=_BUSY_S,
            )
        self._take(caller.key, key)
        self._hold(caller, 1)
        return allowed

    def leave(self, caller: Caller) -> None:
        """A request that entered is over."""
        self._hold(caller, -1)

    def reload(self) -> None:
        """Read the file of keys again; one that is no good changes nothing."""
        if self._path is None:
            return
        try:
            stamp = _stamp_of(self._path)
            self._keys = _read(self._path)
        except OutriderError as error:
            self._metrics.keys_failing.set(1)
            logger.error("the API keys are kept", extra={"reason": error.message})
            return
        self._stamp = stamp
        self._metrics.keys_failing.set(0)
        logger.info("the API keys were read again", extra={"keys": len(self._keys)})

    def _find(self, header: str | None) -> tuple[str, ApiKey]:
        self._look()
        # The threads of the metrics port ask, too: the keys may be read again meanwhile.
        keys = self._keys
        try:
            name = find_key(keys, header)
            return name, keys[name]
        except UnauthenticatedError as error:
            self.refused(error.reason)
            raise

    def _look(self) -> None:
        now = self._clock()
        if now >= self._look_at and self._path is not None:
            self._look_at = now + LOOK_S
            if _stamp_of(self._path) != self._stamp:
                self.reload()

    def _take(self, name: str, key: ApiKey) -> None:
        if not key.requests_per_s:
            return
        now = self._clock()
        of, bucket = self._buckets.get(name, (None, None))
        if bucket is None or of != key:
            burst = key.requests_burst or max(1.0, key.requests_per_s)
            bucket = TokenBucket(key.requests_per_s, burst, now)
            self._buckets[name] = (key, bucket)
        if bucket.missing(1.0, now):
            self._metrics.refusals.labels(KEY_RATE_LIMITED).inc()
            raise ResourceExhaustedError(
                f"the API key {name!r} may send {key.requests_per_s:g} requests a second",
                reason=KEY_RATE_LIMITED,
                retry_after_s=bucket.hint_s(1.0, now),
            )
        bucket.take(1.0)

    def _hold(self, caller: Caller, change: int) -> None:
        if not caller.key:
            return
        held = self._held.get(caller.key, 0) + change
        if held > 0:
            self._held[caller.key] = held
        else:
            self._held.pop(caller.key, None)


def header_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The `authorization` field of a call's metadata."""
    value = next((value for key, value in metadata if key == AUTHORIZATION_KEY), None)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _cut(request: GenerateRequest, key: ApiKey, default_max_tokens: int) -> GenerateRequest:
    """The request within a key's bounds. Raises InvalidRequestError."""
    if request.priority > key.max_priority:
        raise InvalidRequestError(
            f"priority must be at most {key.max_priority} with this API key, "
            f"got {request.priority}",
            reason="KEY_PRIORITY",
        )
    if not key.max_tokens:
        return request
    asked = request.stopping.max_tokens
    if asked is not None and asked > key.max_tokens:
        raise InvalidRequestError(
            f"max_tokens must be at most {key.max_tokens} with this API key, got {asked}",
            reason="KEY_MAX_TOKENS",
        )
    most = min(default_max_tokens, key.max_tokens) if asked is None else asked
    stopping = dataclasses.replace(request.stopping, max_tokens=most)
    return dataclasses.replace(request, stopping=stopping)


def _read(path: Path) -> Mapping[str, ApiKey]:
    return load_config(KeysFile, path).keys


def _stamp_of(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)
