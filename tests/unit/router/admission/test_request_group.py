"""Answers that come together are let into the queue together, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from outrider_router.admission.capacity_ledger import CapacityReservation
from outrider_router.admission.policy import AdmissionRequest
from outrider_router.admission.request_group import RequestGroup
from outrider_router.base.tenants import TenantLimits

from outrider.errors import CancelledRequestError, InvalidRequestError, OutriderError
from outrider.ids import RequestId
from tests.unit.router.admission.test_queue import Bench, bench
from tests.unit.router.helpers import ticket

Tasks = list[asyncio.Task[CapacityReservation]]


async def together(made: Bench, admission_requests: Sequence[AdmissionRequest]) -> Tasks:
    """Requests of one party, which wait by now, have places, or were refused."""
    group = RequestGroup(len(admission_requests))
    tasks = [
        asyncio.create_task(made.queue.reserve_capacity(each, group)) for each in admission_requests
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


def reasons(tasks: Tasks) -> list[str]:
    """What became of requests that were all refused."""
    errors = [task.exception() for task in tasks]
    assert len(set(map(id, errors))) == len(errors), "an error that is raised twice chains traces"
    return [error.reason for error in errors if isinstance(error, OutriderError)]


def assert_nobody(made: Bench) -> None:
    assert made.queue.num_entries == made.queue.num_waiting == made.queue.num_running == 0
    assert made.queue.reserved_tokens == 0


async def test_a_rate_counts_all_of_them_before_any_has_a_place() -> None:
    made = bench(tenants={"default": TenantLimits(requests_per_s=1.0, requests_burst=4.0)})
    made.look()
    reservations = [task.result() for task in await together(made, [ticket(n) for n in range(3)])]
    for reservation in reservations:
        made.end(reservation, 1)
    refused = await together(made, [ticket(n) for n in range(3, 6)])
    assert reasons(refused) == ["RATE_LIMITED"] * 3
    assert_nobody(made)
    made.end(await made.place(ticket(6)), 1)
    # One is left over, two come in time.
    made.now = 3.0
    assert all(task.result() for task in await together(made, [ticket(n) for n in (7, 8, 9)]))


async def test_tokens_of_all_of_them_count_and_are_given_back_with_a_refusal() -> None:
    made = bench(tenants={"default": TenantLimits(tokens_per_s=1.0, tokens_burst=100.0)})
    made.look()
    size = {"prompt_tokens": 10, "max_new_tokens": 20}
    wanted = [ticket(n, 30, **size) for n in range(3)]
    tasks = await together(made, wanted)
    assert all(task.result() for task in tasks)
    assert reasons(await together(made, [ticket(n, 30, **size) for n in (3, 4)])) == (
        ["RATE_LIMITED"] * 2
    )
    # What is left is nobody's yet.
    await made.place(ticket(5, 10, prompt_tokens=5, max_new_tokens=5))


async def test_a_full_queue_takes_all_of_them_or_none() -> None:
    made = bench(limit=4)
    made.look(max_sessions=1)
    first = await made.place(ticket(0))
    waits = await together(made, [ticket(n) for n in (1, 2)])
    refused = await together(made, [ticket(n) for n in (3, 4, 5)])
    assert reasons(refused) == ["QUEUE_FULL"] * 3
    assert made.queue.num_waiting == 2 and made.queue.num_entries == 3
    more = await together(made, [ticket(n) for n in (6, 7)])
    assert made.queue.num_waiting == 4 and not any(task.done() for task in [*waits, *more])
    made.end(first, 1)
    for task in [*waits, *more]:
        made.end(await asyncio.wait_for(task, 30.0), 1)
    assert_nobody(made)


async def test_more_than_could_ever_be_there_at_once_are_told_so() -> None:
    made = bench(limit=2)
    # Before a verifier is seen nobody knows how many that are.
    refused = await together(made, [ticket(n) for n in range(6)])
    assert reasons(refused) == ["NO_VERIFIER"] * 6
    made.look(max_sessions=3)
    refused = await together(made, [ticket(n) for n in range(10, 16)])
    (error, *_) = (task.exception() for task in refused)
    assert isinstance(error, InvalidRequestError) and error.reason == "TOO_MANY_ANSWERS"
    assert "6 answers" in error.message and "serves 3 requests while 2 wait" in error.message
    assert_nobody(made)
    as_many = await together(made, [ticket(n) for n in range(20, 25)])
    assert [task.done() for task in as_many] == [True] * 3 + [False] * 2


async def test_those_with_places_give_them_back_where_one_of_them_has_none() -> None:
    made = bench(limit=1)
    made.look(kv_total_blocks=20)
    # Two have places, one waits, and for the last one there is no room.
    refused = await together(made, [ticket(n) for n in range(4)])
    assert reasons(refused) == ["QUEUE_FULL"] * 4
    assert_nobody(made)
    tasks = await together(made, [ticket(n) for n in (4, 5, 6)])
    assert [task.done() for task in tasks] == [True, True, False]


async def test_nobody_makes_way_for_a_party_that_is_refused() -> None:
    made = bench(limit=2)
    made.look(max_sessions=1)
    running = await made.place(ticket(0, priority=1))
    waits = await made.wait(ticket(1))
    stays = await made.wait(ticket(2, priority=1))
    refused = await together(made, [ticket(n, priority=1) for n in (3, 4)])
    assert reasons(refused) == ["QUEUE_FULL"] * 2 and not waits.done()
    (displacing,) = await together(made, [ticket(5, priority=1)])
    assert reasons([waits]) == ["DISPLACED"] and not displacing.done() and not stays.done()
    made.end(running, 1)


async def test_one_that_is_ended_while_others_are_awaited_ends_them_all() -> None:
    made, group = bench(), RequestGroup(3)
    made.look()
    tasks = [asyncio.create_task(made.queue.reserve_capacity(ticket(n), group)) for n in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in tasks) and made.queue.num_entries == 0
    made.queue.fail_request(
        RequestId("r0"), CancelledRequestError("it was aborted", reason="ABORTED")
    )
    # The last one comes too late for anything.
    tasks.append(asyncio.create_task(made.queue.reserve_capacity(ticket(2), group)))
    await asyncio.wait(tasks, timeout=30.0)
    assert reasons(tasks) == ["ABORTED"] * 3
    assert_nobody(made)


@pytest.mark.parametrize("size", [2, 3])
async def test_who_leaves_leaves_nothing(size: int) -> None:
    made = bench()
    made.look()
    group = RequestGroup(size)
    tasks = [asyncio.create_task(made.queue.reserve_capacity(ticket(n), group)) for n in range(2)]
    for _ in range(size):
        # With two of two the places are given, and not taken yet, at some of these turns.
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    for reservation in found:
        if isinstance(reservation, CapacityReservation):
            made.end(reservation, 0)
    assert_nobody(made)


async def test_nobody_waits_for_one_who_has_left() -> None:
    made, group = bench(), RequestGroup(2)
    made.look()
    gone = asyncio.create_task(made.queue.reserve_capacity(ticket(0), group))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone], timeout=30.0)
    late = asyncio.create_task(made.queue.reserve_capacity(ticket(1), group))
    await asyncio.wait([late], timeout=30.0)
    assert isinstance(late.exception(), CancelledRequestError)
    assert_nobody(made)


async def test_a_party_that_is_refused_takes_no_turn_from_anybody() -> None:
    made = bench(limit=1)
    made.look(kv_total_blocks=90)
    size = {"prompt_tokens": 10, "max_new_tokens": 20}
    for first in range(0, 24, 6):
        refused = await together(made, [ticket(first + n, 30, **size) for n in range(6)])
        assert reasons(refused) == ["QUEUE_FULL"] * 6
        assert_nobody(made)
    # As if nobody had come: virtual time stands where it stood.
    tenant = made.queue.tenants.get_tenant(ticket(0).tenant, made.now)
    assert made.queue.tenants.record_queued(tenant, 1.0) == 0.0


async def test_a_party_of_one_verifiers_places_is_served_one_after_the_other() -> None:
    made = bench()
    made.look(max_sessions=1)
    tasks = await together(made, [ticket(n) for n in range(3)])
    for task in tasks:
        made.end(await asyncio.wait_for(task, 30.0), 1)
    assert_nobody(made)


async def test_all_of_a_party_go_on_in_the_order_in_which_they_came() -> None:
    made, order = bench(), list[int]()
    made.look()
    group = RequestGroup(4)

    async def come(number: int) -> None:
        await made.queue.reserve_capacity(ticket(number), group)
        order.append(number)

    await asyncio.gather(*map(come, range(4)))
    assert order == [0, 1, 2, 3]
