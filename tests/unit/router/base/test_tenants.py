"""Whose a request is, and what it may ask for."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_router.base.tenants import (
    SHARED_TENANT,
    TenantLimits,
    TenantRegistry,
    TenantSource,
    TokenBucket,
    tenant_of,
)

from outrider.errors import InvalidRequestError
from outrider.ids import TenantId

METADATA = (("x-outrider-tenant", "blue"), ("authorization", "Bearer secret"))


def test_a_request_says_whose_it_is_where_the_configuration_looks() -> None:
    digest = hashlib.sha256(b"Bearer secret").hexdigest()[:16]
    assert tenant_of(TenantSource.METADATA, METADATA) == "blue"
    assert tenant_of(TenantSource.AUTHORIZATION, METADATA) == digest
    assert tenant_of(TenantSource.NONE, METADATA) == SHARED_TENANT
    assert tenant_of(TenantSource.METADATA, ()) == SHARED_TENANT
    assert tenant_of(TenantSource.AUTHORIZATION, ()) == SHARED_TENANT


@pytest.mark.parametrize("name", ["x" * 65, "a\nb"])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="printable"):
        tenant_of(TenantSource.METADATA, [("x-outrider-tenant", name)])


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=2.0, burst=4.0, now=0.0)
    taken = 0
    for step in range(101):
        now = step / 10
        while not bucket.shortage(1.0, now):
            bucket.take_tokens(1.0)
            taken += 1
    assert taken == 4 + 20


def test_what_costs_more_than_a_burst_is_let_through_by_a_full_bucket_and_paid_off() -> None:
    bucket = TokenBucket(rate=1.0, burst=10.0, now=0.0)
    assert not bucket.shortage(25.0, 0.0)
    bucket.take_tokens(25.0)
    assert bucket.shortage(1.0, 15.0) and not bucket.shortage(1.0, 16.0)


def test_what_was_not_used_is_given_back() -> None:
    bucket = TokenBucket(rate=1.0, burst=10.0, now=0.0)
    bucket.take_tokens(10.0)
    bucket.take_tokens(-9.0)
    assert not bucket.shortage(9.0, 0.0)


def test_clients_that_come_when_they_were_told_are_let_through() -> None:
    bucket = TokenBucket(rate=2.0, burst=1.0, now=0.0)
    bucket.take_tokens(1.0)
    comes = [(bucket.hint_s(1.0, 0.0), number) for number in range(10)]
    for at, _ in sorted(comes):
        assert bucket.shortage(1.0, at - 0.1), "not before"
        assert not bucket.shortage(1.0, at)
        bucket.take_tokens(1.0)


@given(
    rate=st.floats(0.1, 100),
    burst=st.floats(1, 50),
    asks=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 80)), max_size=50),
)
def test_no_tenant_gets_more_than_its_rate_and_one_request_beyond_its_burst(
    rate: float, burst: float, asks: list[tuple[float, float]]
) -> None:
    bucket, now, taken, largest = TokenBucket(rate, burst, 0.0), 0.0, 0.0, 0.0
    for pause, cost in asks:
        now += pause
        if not bucket.shortage(cost, now):
            bucket.take_tokens(cost)
            taken += cost
            largest = max(largest, cost)
    assert taken <= burst + rate * now + largest + 1e-3


def test_tenants_without_limits_of_their_own_have_the_default_ones_each() -> None:
    limits = {"default": TenantLimits(requests_per_s=1.0), "gold": TenantLimits(weight=4.0)}
    tenants = TenantRegistry(limits, most=8)
    red, blue = tenants.get_tenant(TenantId("red"), 0.0), tenants.get_tenant(TenantId("blue"), 0.0)
    assert red.requests is not None and red.requests is not blue.requests
    gold = tenants.get_tenant(TenantId("gold"), 0.0)
    assert gold.requests is None and gold.limits.weight == 4.0
    assert [tenants.metrics_label(each.name) for each in (red, gold)] == ["default", "gold"]


def test_the_idle_are_forgotten_and_the_busy_are_not() -> None:
    tenants = TenantRegistry({}, most=3)
    busy = tenants.get_tenant(TenantId("busy"), 0.0)
    tenants.record_queued(busy, 1.0)
    for number in range(100):
        tenants.get_tenant(TenantId(f"t{number}"), 0.0)
        assert len(tenants) <= 3
    assert tenants.get_tenant(TenantId("busy"), 0.0) is busy


def test_beyond_the_bound_busy_tenants_share_one() -> None:
    tenants = TenantRegistry({}, most=2)
    for name in ("a", "b"):
        tenants.record_queued(tenants.get_tenant(TenantId(name), 0.0), 1.0)
    assert tenants.get_tenant(TenantId("c"), 0.0).name == SHARED_TENANT
    assert tenants.get_tenant(TenantId("d"), 0.0).name == SHARED_TENANT


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 0.0}, {"requests_per_s": -1.0}, {"max_running": -1}, {"weight": float("nan")}],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        TenantLimits(**wrong)  # type: ignore[arg-type]
