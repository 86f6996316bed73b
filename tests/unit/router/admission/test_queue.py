"""The queue with a clock of its own: places, refusals, and hints that come true."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from outrider_router.admission.capacity_ledger import CapacityReservation
from outrider_router.admission.policy import AdmissionRequest
from outrider_router.admission.queue import AdmissionQueue
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.tenants import TenantLimits
from outrider_router.config import OverloadConfig, RouterConfig

from outrider.errors import ResourceExhaustedError
from outrider.ids import TenantId, VerifierId
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import ticket
from tests.waiting import soon


@dataclass
class Bench:
    """A queue whose time stands still until it is moved."""

    queue: AdmissionQueue
    metrics: RouterMetrics
    emitted: dict[str, int] = field(default_factory=dict)
    now: float = 0.0

    async def place(self, wanted: AdmissionRequest) -> CapacityReservation:
        """A reservation that must be free at once."""
        return await soon(self.queue.reserve_capacity(wanted))

    async def wait(self, wanted: AdmissionRequest) -> asyncio.Task[CapacityReservation]:
        """A request that waits by now, or was refused."""
        task = asyncio.create_task(self.queue.reserve_capacity(wanted))
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    def end(self, reservation: CapacityReservation, emitted: int) -> None:
        """A request has ended with so many tokens."""
        self.emitted[reservation.admission_request.request_id] = emitted
        self.queue.release_capacity(reservation)
        self.queue.remove_request(reservation.admission_request.request_id)

    def look(self, *, used: int = 0, **changes: object) -> None:
        """The verifier says that so many of its blocks are used."""
        values: dict[str, object] = {"kv_block_tokens": 1, "max_sessions": 1000} | changes
        total = values.setdefault("kv_total_blocks", 10_000)
        assert isinstance(total, int)
        info = FakeVerifier.describe(kv_free_blocks=total - used, **values)
        self.queue.update_verifier(info)


def bench(
    *, tenants: dict[str, TenantLimits] | None = None, limit: int = 64, **more: object
) -> Bench:
    emitted: dict[str, int] = {}
    config = RouterConfig(
        model=Path(),
        verifiers=("v",),
        queue_limit=limit,
        tenants=tenants or {},
        overload=OverloadConfig(**more),  # type: ignore[arg-type]
    )
    metrics = RouterMetrics()
    made: list[Bench] = []
    queue = AdmissionQueue(
        config,
        metrics,
        clock=lambda: made[0].now if made else 0.0,
        emitted=lambda request_id: emitted.get(request_id, 0),
    )
    made.append(Bench(queue, metrics, emitted))
    return made[0]


def request(
    number: int, *, prompt: int = 100, bound: int = 2048, **more: object
) -> AdmissionRequest:
    size = {"kv_tokens": prompt + bound, "prompt_tokens": prompt, "max_new_tokens": bound}
    return ticket(number, **(size | more))  # type: ignore[arg-type]


@asynccontextmanager
async def held(tasks: list[asyncio.Task[CapacityReservation]]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_four_times_as_many_are_served_at_once_as_if_max_tokens_were_reserved() -> None:
    bed, rng = bench(limit=1000), random.Random(0)
    bed.look(kv_total_blocks=40_960)
    assert bed.queue.num_running == 0
    for number in range(64):
        bed.end(await bed.place(request(number)), rng.randrange(100, 200))
    tasks = [await bed.wait(request(number)) for number in range(100, 400)]
    async with held(tasks):
        by_reservation = 40_960 // (100 + 2048)
        assert bed.queue.num_running >= 4 * by_reservation
        assert bed.queue.reserved_tokens <= 40_960


async def test_the_ledger_grows_with_sessions_that_outgrow_what_was_expected() -> None:
    bed = bench(prior_answer_tokens=100)
    bed.look(kv_total_blocks=2000)
    reservation = await bed.place(request(1, bound=1000))
    assert bed.queue.reserved_tokens == 200
    bed.emitted["r1"] = 300
    bed.look(kv_total_blocks=2000)
    assert bed.queue.reserved_tokens == 700
    bed.end(reservation, 300)
    assert bed.queue.reserved_tokens == 0


async def test_what_others_hold_counts_when_two_looks_have_seen_it() -> None:
    bed = bench()
    bed.look(used=9_900, sessions=3)
    bed.end(await bed.place(request(1, bound=10)), 10)
    bed.look(used=9_900, sessions=3)
    await bed.place(request(2, bound=10))
    task = await bed.wait(request(3, bound=10))
    async with held([task]):
        assert not task.done()
        bed.look(used=300, sessions=1)
        assert await soon(task)


async def test_a_lost_verifier_voids_its_places() -> None:
    bed = bench()
    bed.look()
    reservation = await bed.place(request(1))
    bed.queue.drop_verifier(VerifierId("v0"))
    bed.look()
    assert bed.queue.num_running == 0
    again = await bed.place(request(1))
    bed.queue.release_capacity(reservation)
    assert bed.queue.num_running == 1
    bed.end(again, 5)
    assert bed.queue.num_entries == bed.queue.num_running == 0


async def test_a_request_may_hold_two_places_while_it_moves() -> None:
    bed = bench()
    bed.look()
    first, second = await bed.place(request(1)), await bed.place(request(1))
    bed.queue.release_capacity(first)
    assert bed.queue.num_entries == bed.queue.num_running == 1
    bed.end(second, 3)
    assert bed.queue.num_entries == bed.queue.num_running == 0


async def test_a_full_queue_gives_the_place_of_the_least_to_a_higher_priority() -> None:
    bed = bench(limit=2)
    bed.look(max_sessions=1)
    tasks = [await bed.wait(request(number, priority=5)) for number in range(1)]
    tasks += [await bed.wait(request(1)), await bed.wait(request(2, priority=1))]
    async with held(tasks):
        tasks.append(await bed.wait(request(3, priority=2)))
        assert [task.done() for task in tasks] == [True, True, False, False]
        error = tasks[1].exception()
        assert isinstance(error, ResourceExhaustedError) and error.reason == "DISPLACED"
        assert error.retry_after_s is not None and error.retry_after_s > 0
        tasks.append(await bed.wait(request(4, priority=0)))
        refused = tasks[-1].exception()
        assert isinstance(refused, ResourceExhaustedError) and refused.reason == "QUEUE_FULL"
        sampled = bed.metrics.registry.get_sample_value
        assert sampled("outrider_refusals_total", {"reason": "DISPLACED"}) == 1
        assert sampled("outrider_queue_depth", {"priority": "2"}) == 1


async def test_a_request_that_needs_another_place_is_not_refused_by_a_full_queue() -> None:
    bed = bench(limit=1)
    bed.look(max_sessions=1)
    moved = await bed.place(request(1))
    waiting = await bed.wait(request(2))
    bed.queue.release_capacity(moved, refused=True)
    again = await bed.wait(request(1))
    async with held([waiting, again]):
        assert not again.done() and not waiting.done()
        bed.now += 1.0
        bed.look(max_sessions=1)
        assert await soon(again), "it keeps its turn"
        assert not waiting.done()


async def test_a_tenant_beyond_its_rate_is_told_when_to_come_back() -> None:
    limits = TenantLimits(requests_per_s=2.0, requests_burst=1.0)
    bed = bench(tenants={"default": limits})
    bed.look()
    mine, other = TenantId("mine"), TenantId("other")
    await bed.place(request(1, tenant=mine))
    with pytest.raises(ResourceExhaustedError) as refused:
        await bed.place(request(2, tenant=mine))
    assert refused.value.reason == "RATE_LIMITED"
    hint_s = refused.value.retry_after_s
    assert hint_s == pytest.approx(0.5)
    await bed.place(request(3, tenant=other))
    bed.now += hint_s
    await bed.place(request(2, tenant=mine))


async def test_a_tenant_pays_for_what_its_requests_were() -> None:
    limits = TenantLimits(tokens_per_s=100.0, tokens_burst=500.0)
    bed = bench(tenants={"default": limits}, prior_answer_tokens=256)
    bed.look()
    bed.end(await bed.place(request(1)), 20)
    bed.end(await bed.place(request(2)), 20)
    with pytest.raises(ResourceExhaustedError, match="tokens"):
        await bed.place(request(3))
    assert (
        bed.metrics.registry.get_sample_value("outrider_tenant_tokens_total", {"tenant": "default"})
        == 240
    )


async def test_a_request_that_leaves_the_queue_unserved_costs_its_tenant_no_tokens() -> None:
    bed = bench(tenants={"default": TenantLimits(tokens_per_s=1.0, tokens_burst=400.0)})
    bed.look(max_sessions=0)
    for number in range(1, 10):
        task = await bed.wait(request(number, waits_until=9.0))
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert bed.queue.num_entries == 0


async def test_a_tenant_has_at_most_so_many_running() -> None:
    mine, other = TenantId("mine"), TenantId("other")
    bed = bench(tenants={"mine": TenantLimits(max_running=1)})
    bed.look()
    first = await bed.place(request(1, tenant=mine))
    task = await bed.wait(request(2, tenant=mine))
    async with held([task]):
        await bed.place(request(3, tenant=other))
        assert not task.done()
        bed.end(first, 1)
        assert await soon(task)


SLOTS, QUEUE, SERVICE_S = 4, 8, 1.0


async def come_back(clients: int, *, returns: bool = True, early: float = 1.0) -> list[bool]:
    """Whether clients that were refused by a full queue were let in when they came back.

    A closed loop: each of `clients` asks again a while after its answer, or as it was told to, or
    `early` of that time.
    """
    bed, rng = bench(limit=QUEUE), random.Random(clients)
    bed.look(max_sessions=SLOTS)
    numbers = iter(range(1, 1_000_000))
    events: list[tuple[float, int, str, int, int]] = []
    tasks: dict[int, asyncio.Task[CapacityReservation]] = {}
    outcomes: list[bool] = []

    def schedule(at: float, what: str, client: int, told: int = 0) -> None:
        heapq.heappush(events, (at, next(numbers), what, client, told))

    for client in range(clients):
        schedule(rng.random() * 5, "ask", client)
    serving: dict[int, CapacityReservation] = {}
    while events and bed.now < 150.0:
        bed.now, number, what, client, told = heapq.heappop(events)
        if what == "end":
            bed.end(serving.pop(client), 10)
            schedule(bed.now + rng.expovariate(1.0), "ask", client)
        else:
            name = told or number
            task = await bed.wait(request(name, is_client_named=returns))
            if told and bed.now > 20.0:
                outcomes.append(not (task.done() and task.exception()))
            if task.done() and (error := task.exception()) is not None:
                assert isinstance(error, ResourceExhaustedError) and error.retry_after_s
                schedule(bed.now + early * error.retry_after_s, "ask", client, name)
            else:
                tasks[client] = task
        await asyncio.sleep(0)
        for name, task in list(tasks.items()):
            if task.done():
                serving[name] = tasks.pop(name).result()
                schedule(bed.now + SERVICE_S * rng.uniform(0.8, 1.2), "end", name)
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    return outcomes


@pytest.mark.parametrize("clients", [24, 60])
async def test_most_clients_that_come_back_when_told_are_let_in_and_few_before(
    clients: int,
) -> None:
    outcomes = await come_back(clients)
    assert len(outcomes) > 100
    assert sum(outcomes) / len(outcomes) > 0.8
    early = await come_back(clients, early=0.3)
    assert sum(early) / len(early) < 0.4


async def test_clients_that_are_not_known_again_are_let_in_more_often_than_not() -> None:
    outcomes = await come_back(60, returns=False)
    assert sum(outcomes) / len(outcomes) > 0.5
