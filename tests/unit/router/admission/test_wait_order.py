"""The order of the queue, and who makes way."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from outrider_router.admission.policy import AdmissionRequest, admission_order, request_to_displace
from outrider_router.base.tenants import TenantLimits, TenantRegistry

from outrider.ids import TenantId
from tests.unit.router.helpers import ticket

BIG, SMALL = TenantId("big"), TenantId("small")


def names(queue: list[AdmissionRequest], now: float = 0.0, aging_s: float = 0.0) -> list[str]:
    return [each.request_id for each in admission_order(queue, now, aging_s)]


def test_priority_goes_before_turn_and_turn_before_arrival() -> None:
    queue = [
        ticket(1, virtual_start=2.0),
        ticket(2, virtual_start=1.0),
        ticket(3, priority=1),
        ticket(4, virtual_start=1.0),
    ]
    assert names(queue) == ["r3", "r2", "r4", "r1"]


def test_whoever_waited_long_enough_goes_before_a_higher_priority_that_came_later() -> None:
    queue = [ticket(1, priority=0, arrived_at=0.0), ticket(2, priority=2, arrived_at=29.0)]
    assert names(queue, now=29.0, aging_s=10.0) == ["r1", "r2"]
    assert names(queue, now=19.0, aging_s=10.0) == ["r2", "r1"]
    assert names(queue, now=29.0) == ["r2", "r1"]


def test_age_does_not_change_the_fair_order_within_a_priority() -> None:
    flood = [ticket(i, tenant=BIG, virtual_start=float(i), arrived_at=0.0) for i in range(5)]
    queue = [*flood, ticket(9, tenant=SMALL, virtual_start=1.0, arrived_at=100.0)]
    assert names(queue, now=100.0, aging_s=1.0)[:3] == ["r0", "r1", "r9"]


@given(
    queue=st.lists(
        st.builds(
            ticket,
            st.integers(0, 100),
            priority=st.integers(-3, 3),
            virtual_start=st.floats(0, 9),
            arrived_at=st.floats(0, 9),
        ),
        unique_by=lambda t: t.sequence,
    ),
    aging_s=st.sampled_from([0.0, 0.1, 3.0]),
)
def test_everybody_has_one_place_in_the_order(
    queue: list[AdmissionRequest], aging_s: float
) -> None:
    found = names(queue, 10.0, aging_s)
    assert sorted(found) == sorted(each.request_id for each in queue)


def test_nobody_starves_under_endless_higher_priority() -> None:
    queue, now = [ticket(0, priority=-1, arrived_at=0.0)], 0.0
    for number in range(1, 100):
        now += 1.0
        queue.append(ticket(number, priority=3, arrived_at=now))
        served = next(admission_order(queue, now, 10.0))
        queue.remove(served)
        if served.priority == -1:
            assert now <= 41.0
            return
    raise AssertionError("it was never served")


def serve(
    weights: dict[TenantId, float], arrivals: dict[TenantId, int], served: int
) -> Counter[str]:
    """Whom the first `served` places go to, where all have come at once."""
    limits = {name: TenantLimits(weight=weight) for name, weight in weights.items()}
    tenants = TenantRegistry(limits, most=8)
    queue, rng = [], random.Random(0)
    for name, count in arrivals.items():
        for _ in range(count):
            cost = rng.randrange(50, 150)
            start = tenants.record_queued(tenants.get_tenant(name, 0.0), cost)
            queue.append(ticket(len(queue), cost, tenant=name, virtual_start=start))
    tokens: Counter[str] = Counter()
    for each in list(admission_order(queue, 0.0, 10.0))[:served]:
        tenants.advance_time(each.virtual_start)
        tokens[each.tenant] += each.kv_tokens
    return tokens


def test_tenants_of_one_priority_share_by_weight_whatever_they_ask_for() -> None:
    tokens = serve({BIG: 1.0, SMALL: 1.0}, {BIG: 500, SMALL: 60}, 100)
    assert 0.9 < tokens[BIG] / tokens[SMALL] < 1.1
    tokens = serve({BIG: 1.0, SMALL: 3.0}, {BIG: 500, SMALL: 200}, 200)
    assert 2.7 < tokens[SMALL] / tokens[BIG] < 3.3


def test_the_last_of_the_lowest_priority_makes_way_for_a_higher_one() -> None:
    queue = [ticket(1, priority=1), ticket(2, virtual_start=1.0), ticket(3, virtual_start=2.0)]
    found = request_to_displace(queue, ticket(4, priority=1), {})
    assert found is not None and found.request_id == "r3"
    assert request_to_displace(queue, ticket(4, priority=-1), {}) is None
    assert request_to_displace(queue, ticket(4, priority=0), {}) is None


def test_a_tenant_that_fills_the_queue_makes_way_for_another_up_to_its_share() -> None:
    queue = [ticket(i, tenant=BIG, virtual_start=float(i)) for i in range(8)]
    for number in range(8, 20):
        newcomer = ticket(number, tenant=SMALL, virtual_start=float(number))
        gone = request_to_displace(queue, newcomer, {BIG: 1.0, SMALL: 1.0})
        if gone is None:
            break
        queue[queue.index(gone)] = newcomer
    counts = Counter(each.tenant for each in queue)
    assert counts == {BIG: 4, SMALL: 4}
    assert [t.sequence for t in queue if t.tenant == BIG] == [0, 1, 2, 3]


def test_whoever_was_served_before_never_makes_way() -> None:
    queue = [ticket(1, priority=-5, was_assigned=True), ticket(2, priority=0)]
    found = request_to_displace(queue, ticket(3, priority=1), {})
    assert found is not None and found.request_id == "r2"
    assert request_to_displace(queue[:1], ticket(3, priority=9), {}) is None
