"""Tenants: token-bucket limits, and fair queueing between tenants of one priority. Pure.

A request is charged for its prompt and its expected output in tokens when it arrives, and the
charge is corrected when it ends. Tenants are ordered by virtual time (start-time fair queueing): a
tenant's next request starts where its last one ended, and a tenant with twice the weight advances
half as far per token.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.errors import InvalidRequestError
from outrider.ids import TenantId
from outrider_router.base.retry_hints import RetryTimes

TENANT_KEY: Final = "x-outrider-tenant"
AUTHORIZATION_KEY: Final = "authorization"
DEFAULT_TENANT: Final = "default"
"""Name of the table with the limits of tenants that have no table of their own."""
SHARED_TENANT: Final = TenantId("")
"""Tenant of requests that name no tenant, and of requests from tenants beyond the largest number of
tenants.
"""
MAX_TENANT_CHARS = 64
_HASH_CHARS = 16


class TenantSource(StrEnum):
    """Source of a request's tenant name."""

    NONE = "none"
    """All requests belong to one tenant."""
    METADATA = "metadata"
    """The metadata field `x-outrider-tenant`, which a proxy in front of the router sets."""
    AUTHORIZATION = "authorization"
    """The credentials: the first 16 hexadecimal digits of the SHA-256 of `authorization`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits of a tenant; keys of a table `[tenants.NAME]`."""

    weight: float = 1.0
    """Share of the tenant among waiting tenants of one priority, relative to their weights."""
    requests_per_s: float = 0.0
    """Sustained requests per second; 0 is unlimited."""
    requests_burst: float = 0.0
    """Maximum burst of requests after a pause; 0 means one second's worth, at least one."""
    tokens_per_s: float = 0.0
    """Sustained tokens of prompts and answers per second; 0 is unlimited."""
    tokens_burst: float = 0.0
    """Maximum burst of tokens after a pause; 0 means ten seconds' worth."""
    max_running: int = 0
    """Maximum number of running requests; others wait. 0 is unlimited."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0.0):
            raise ValueError(f"weight must be positive, got {self.weight}")
        for name in ("requests_per_s", "requests_burst", "tokens_per_s", "tokens_burst"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative")
        if self.max_running < 0:
            raise ValueError(f"max_running must be >= 0, got {self.max_running}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Identity of a caller: its tenant and API key."""

    tenant: TenantId = SHARED_TENANT
    key_name: str = ""
    """Name of the API key; "" if keys are not required."""


ANONYMOUS: Final = Caller()
"""The caller of every request if callers are not identified."""


class TokenBucket:
    """Rate limiter with bursts. A cost larger than the burst passes when the bucket is full."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        """Create a full bucket. `rate` is in units per second, `burst` is the capacity in units,
        and `now` is the clock time in seconds.
        """
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, now
        self._promises = RetryTimes()

    def shortage(self, cost: float, now: float) -> float:
        """Return the number of units that are missing for `cost`; 0 if `cost` is available."""
        self._level = min(self._burst, self._level + self._rate * max(0.0, now - self._at))
        self._at = max(self._at, now)
        # The tolerance admits a client that waited exactly as long as the hint told it.
        short = min(cost, self._burst) - self._level
        return short if short > 1e-6 * self._burst else 0.0

    def take_tokens(self, cost: float) -> None:
        """Take `cost` units from the bucket; a negative `cost` returns units. The level may become
        negative.
        """
        self._level = min(self._burst, self._level - cost)

    def hint_s(self, cost: float, now: float) -> float:
        """Return the seconds that a caller that is refused now should wait until `cost` is
        available. Callers that were refused before come first.
        """
        first_s = self.shortage(cost, now) / self._rate
        return self._promises.next_retry_s(now, first_s=first_s, each_s=cost / self._rate)


@dataclass(slots=True, kw_only=True, eq=False)
class Tenant:
    """State of one tenant."""

    name: TenantId
    limits: TenantLimits
    requests: TokenBucket | None
    tokens: TokenBucket | None
    virtual_end: float = 0.0
    """Virtual time at which the tenant's last request ends."""
    num_requests: int = 0
    """Number of requests that wait or run."""
    num_running: int = 0
    """Number of requests that run."""


class TenantRegistry:
    """Tenants of one router, at most a fixed number of them."""

    def __init__(self, limits: Mapping[str, TenantLimits], *, most: int) -> None:
        """Create an empty registry. `limits` are the limits of tenants by name; its entry `default`
        applies to all other tenants. `most` is the largest number of tenants.
        """
        self._limits = limits
        self._default = limits.get(DEFAULT_TENANT, TenantLimits())
        self._most = most
        self._known: OrderedDict[TenantId, Tenant] = OrderedDict()
        self._time = 0.0
        """Virtual time: the latest virtual start time of a request that started to run."""

    def __len__(self) -> int:
        return len(self._known)

    def get_tenant(self, name: TenantId, now: float) -> Tenant:
        """Return the tenant of this name; create it if it is new.

        At the largest number of tenants, the tenant that was idle longest is forgotten. If none can
        be forgotten, a new tenant is counted as the shared tenant.
        """
        tenant = self._known.get(name)
        if tenant is not None:
            self._known.move_to_end(name)
            return tenant
        if name != SHARED_TENANT and len(self._known) >= self._most and not self._forget_one():
            return self.get_tenant(SHARED_TENANT, now)
        limits = self._limits.get(name, self._default)
        tenant = self._known[name] = Tenant(
            name=name,
            limits=limits,
            requests=_bucket(limits.requests_per_s, limits.requests_burst, 1.0, now),
            tokens=_bucket(limits.tokens_per_s, limits.tokens_burst, 10.0, now),
        )
        return tenant

    def metrics_label(self, name: TenantId) -> str:
        """Return the label of a tenant in metrics: its name if it has limits of its own, else
        `default`.
        """
        return name if name in self._limits else DEFAULT_TENANT

    def record_queued(self, tenant: Tenant, cost: float) -> float:
        """Record a new request of the given cost in tokens. Return its virtual start time, which
        orders it among requests of the same priority.
        """
        start = max(self._time, tenant.virtual_end)
        tenant.virtual_end = start + cost / tenant.limits.weight
        tenant.num_requests += 1
        return start

    def advance_time(self, start: float) -> None:
        """Advance the virtual time to `start`, the virtual start time of a request that starts to
        run.
        """
        self._time = max(self._time, start)

    def record_withdrawn(self, tenant: Tenant, cost: float) -> None:
        """Record that a request left the queue without running, so that it costs no virtual
        time.
        """
        tenant.virtual_end -= cost / tenant.limits.weight

    def _forget_one(self) -> bool:
        for name, tenant in self._known.items():
            if not tenant.num_requests and name != SHARED_TENANT and name not in self._limits:
                del self._known[name]
                return True
        return False


def tenant_of(source: TenantSource, metadata: Iterable[tuple[str, str | bytes]]) -> TenantId:
    """Return the tenant of a call by its metadata. Raises InvalidRequestError if the tenant name is
    invalid.
    """
    if source is TenantSource.NONE:
        return SHARED_TENANT
    wanted = TENANT_KEY if source is TenantSource.METADATA else AUTHORIZATION_KEY
    value = next((value for key, value in metadata if key == wanted), "")
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if source is TenantSource.AUTHORIZATION:
        digest = hashlib.sha256(value.encode()).hexdigest()[:_HASH_CHARS]
        return TenantId(digest) if value else SHARED_TENANT
    if len(value) > MAX_TENANT_CHARS or not value.isprintable():
        raise InvalidRequestError(
            f"{TENANT_KEY} must be at most {MAX_TENANT_CHARS} printable characters",
            reason="INVALID_TENANT",
        )
    return TenantId(value)


def _bucket(rate: float, burst: float, seconds: float, now: float) -> TokenBucket | None:
    if not rate:
        return None
    return TokenBucket(rate, burst or max(1.0, rate * seconds), now)
