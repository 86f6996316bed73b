"""Queues of one router: one in which requests arrive, and one in which they wait for a verifier.

`ArrivalQueue` spreads a burst of requests over iterations of the event loop. `AdmissionQueue`
tracks requests while they wait for a verifier or run on one; it performs the actions that
`admission.policy.plan_admission` decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.errors import DeadlineExceededError, OutriderError, ResourceExhaustedError
from outrider.ids import RequestId, VerifierId
from outrider.wire.messages import VerifierInfo
from outrider_router.admission.capacity_ledger import (
    CapacityLedger,
    CapacityReservation,
    OutputLengthEstimator,
)
from outrider_router.admission.policy import (
    AdmissionAction,
    AdmissionRequest,
    AdmissionState,
    AdmitRequest,
    ExpireRequest,
    RefuseRequest,
    next_change_at,
    no_verifier_error,
    plan_admission,
    request_to_displace,
)
from outrider_router.admission.request_group import RequestGroup
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.retry_hints import REFUSALS, HeldQueuePositions
from outrider_router.base.tenants import Tenant, TenantRegistry
from outrider_router.config import RouterConfig


class ArrivalQueue:
    """Admits one request per iteration of the event loop, first come, first served.

    Reading, checking and refusing a request takes a millisecond or more. Two thousand requests that
    arrive together would block running streams and health checks for seconds. So requests wait
    here, and the event loop handles other work between two of them. Use from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_free = True
        """Whether no request has entered in this iteration of the event loop."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait_turn(self) -> None:
        """Wait until it is this request's turn. Returns at once if no other request has entered in
        this iteration of the event loop.
        """
        loop = asyncio.get_running_loop()
        if self._is_free:
            self._is_free = False
            loop.call_soon(self._pass_on)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            # The future is cancelled if the client has left.
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._is_free = True


@dataclass(slots=True, kw_only=True, eq=False)
class QueueEntry:
    """State of a request in the admission queue, from its arrival until
    `AdmissionQueue.remove_request`.
    """

    admission_request: AdmissionRequest
    tenant: Tenant
    charged: int
    """Number of tokens that the tenant was charged for the request."""
    reservation_future: asyncio.Future[CapacityReservation] | None = None
    """Future of the reservation for which the request waits; None before its first wait."""
    reservations: list[CapacityReservation] = field(default_factory=list)
    """Reservations of the request: normally one, and two while its session moves to another
    verifier.
    """
    placed_at: float | None = None
    """Clock time of the first reservation in seconds; None before it."""

    @property
    def is_pending(self) -> bool:
        """Whether the request waits: it was not yet admitted, refused or cancelled."""
        return self.reservation_future is not None and not self.reservation_future.done()

    @property
    def error(self) -> OutriderError | None:
        """The error that ended the wait of the request without a reservation; None otherwise."""
        if (
            self.reservation_future is None
            or not self.reservation_future.done()
            or self.reservation_future.cancelled()
        ):
            return None
        found = self.reservation_future.exception()
        return found if isinstance(found, OutriderError) else None


class AdmissionQueue:
    """The queue and the capacity ledger of one router. Use from one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        *,
        clock: Callable[[], float],
        emitted: Callable[[RequestId], int],
    ) -> None:
        """Create an empty queue. `clock` returns monotonic seconds, and `emitted` returns the
        number of tokens that a request has emitted so far.
        """
        self.queue_limit = config.queue_limit
        self.lengths = OutputLengthEstimator(
            assumed=config.overload.prior_answer_tokens, quantile=config.overload.length_quantile
        )
        self._capacity_ledger = CapacityLedger(
            self.lengths, overcommit=config.overload.kv_overcommit, emitted=emitted
        )
        self.tenants = TenantRegistry(config.tenants, most=config.overload.max_tenants)
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._emitted = emitted
        self._guests: dict[RequestId, QueueEntry] = {}
        self._waiting: dict[RequestId, QueueEntry] = {}
        self._joining: dict[RequestId, RequestGroup] = {}
        """Groups of the requests that wait until their group is complete, by request id."""
        self._timer: asyncio.TimerHandle | None = None
        self._service_s = 1.0
        self._places = HeldQueuePositions(config.queue_limit)
        self._depths: Counter[int] = Counter()

    @property
    def num_entries(self) -> int:
        """Number of requests that have arrived and were not removed by `remove_request`."""
        return len(self._guests)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait in the queue."""
        return len(self._waiting)

    @property
    def reserved_tokens(self) -> int:
        """Number of KV-cache tokens reserved on all verifiers."""
        return self._capacity_ledger.tokens

    @property
    def num_running(self) -> int:
        """Number of reservations on all verifiers, one for each session."""
        return self._capacity_ledger.sessions

    def update_verifier(self, info: VerifierInfo) -> None:
        """Set the budget of a healthy verifier from its latest info."""
        self._capacity_ledger.update_verifier(info)
        self._pump()

    def drop_verifier(self, verifier_id: VerifierId) -> None:
        """Mark a verifier as lost and void all reservations on it."""
        self._capacity_ledger.drop_verifier(verifier_id)
        self._pump()

    async def reserve_capacity(
        self, admission_request: AdmissionRequest, group: RequestGroup | None = None
    ) -> CapacityReservation:
        """Wait until a verifier has capacity for a request, and return the reservation on it.
        `group` is the request group of the request, if it belongs to one.

        The first call for a request charges its tenant. Further calls for the same request, for
        instance after a failover, are never refused for a full queue. Raises ResourceExhaustedError
        if the tenant's rate is exceeded or the queue is full, UnavailableError if no healthy
        verifier can serve the request, and DeadlineExceededError. Cancelling the wait removes the
        request from the queue.
        """
        queue_entry = self._guests.get(admission_request.request_id)
        if queue_entry is not None:
            self._line_up([self._enter_again(queue_entry, admission_request)])
        elif group is None or group.inside:
            self._line_up(self._enter((admission_request,)))
        else:
            await self._come_with(group, admission_request)
        queue_entry = self._guests[admission_request.request_id]
        future = queue_entry.reservation_future
        assert future is not None, "it waits"
        try:
            return await future
        except asyncio.CancelledError:
            # The wait may be cancelled after the reservation was made but before it was returned.
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release_capacity(future.result())
            raise
        finally:
            self._remove(queue_entry)
            if not queue_entry.reservations:
                self.remove_request(admission_request.request_id)

    def fail_request(self, request_id: RequestId, error: OutriderError) -> None:
        """End the wait of a request with an error; has no effect if the request does not wait."""
        if (group := self._joining.get(request_id)) is not None:
            group.fail_group(error)
        queue_entry = self._waiting.get(request_id)
        if (
            queue_entry is not None
            and queue_entry.reservation_future is not None
            and queue_entry.is_pending
        ):
            queue_entry.reservation_future.set_exception(error)

    def release_capacity(self, reservation: CapacityReservation, *, refused: bool = False) -> None:
        """End a reservation. With `refused`, the verifier refused the session because it was
        full.
        """
        self._take_back(reservation, refused=refused)
        self._pump()

    def remove_request(self, request_id: RequestId) -> None:
        """Remove a request that has ended and holds no reservation. Idempotent.

        The tenant was charged for the expected number of tokens. The charge is corrected to the
        number of tokens that the request used.
        """
        queue_entry = self._guests.pop(request_id, None)
        if queue_entry is None:
            return
        admission_request, tenant, used = queue_entry.admission_request, queue_entry.tenant, 0
        tenant.num_requests -= 1
        if queue_entry.placed_at is None:
            self.tenants.record_withdrawn(tenant, queue_entry.charged)
        else:
            emitted = self._emitted(request_id)
            used = admission_request.prompt_tokens + emitted
            self._service_s += 0.2 * (self._clock() - queue_entry.placed_at - self._service_s)
            if emitted:
                self.lengths.add_answer(emitted, admission_request.max_new_tokens)
        if tenant.tokens is not None:
            tenant.tokens.take_tokens(used - queue_entry.charged)
        self._metrics.tenant_tokens.labels(self.tenants.metrics_label(tenant.name)).inc(used)

    def sessions_on(self, verifier_id: VerifierId) -> int:
        """Return the number of reservations on one verifier, one for each session."""
        return self._capacity_ledger.sessions_on(verifier_id)

    def could_fit(self, kv_tokens: int) -> bool:
        """Return whether a healthy verifier could serve a session that may grow to `kv_tokens`."""
        return self._capacity_ledger.could_fit(kv_tokens)

    async def _come_with(self, group: RequestGroup, admission_request: AdmissionRequest) -> None:
        """Add a request to its group, and queue the whole group once it is complete. Raises the
        error for which the group is refused.
        """
        self._joining[admission_request.request_id] = group
        try:
            if admission_requests := group.add_request(admission_request):
                self._line_up_all(group, admission_requests)
            await group.wait_admitted()
        except asyncio.CancelledError:
            group.remove_request()
            if (queue_entry := self._guests.get(admission_request.request_id)) is not None:
                self._dismiss([queue_entry])
            raise
        finally:
            self._joining.pop(admission_request.request_id, None)

    def _line_up_all(
        self, group: RequestGroup, admission_requests: Sequence[AdmissionRequest]
    ) -> None:
        """Queue all requests of a group, or refuse the whole group."""
        try:
            self._capacity_ledger.check_group(len(admission_requests), self.queue_limit)
            self._line_up(guests := self._enter(admission_requests))
        except OutriderError as error:
            group.fail_group(error)
            return
        problems = [problem for queue_entry in guests if (problem := queue_entry.error) is not None]
        if problems:
            group.fail_group(problems[0])
            self._dismiss(guests)
            return
        group.admit()
        for queue_entry in guests:
            if queue_entry.reservations:
                self.tenants.advance_time(queue_entry.admission_request.virtual_start)

    def _dismiss(self, guests: Sequence[QueueEntry]) -> None:
        """Remove entries before their reservations are used, as if their requests had never
        arrived.
        """
        for queue_entry in guests:
            self._unqueue(queue_entry)
            for reservation in tuple(queue_entry.reservations):
                self._take_back(reservation)
            if queue_entry.reservation_future is not None:
                queue_entry.reservation_future.cancel()
            queue_entry.placed_at = None
            self.remove_request(queue_entry.admission_request.request_id)
        self._pump()

    def _enter(self, admission_requests: Sequence[AdmissionRequest]) -> list[QueueEntry]:
        """Charge the tenant for requests that arrive together and return their queue entries.
        Raises ResourceExhaustedError if they exceed the tenant's rate.
        """
        now = self._clock()
        tenant = self.tenants.get_tenant(admission_requests[0].tenant, now)
        expected = [self._capacity_ledger.expected_tokens(ticket) for ticket in admission_requests]
        # The tenant does not pay for `session_slack_tokens`, which `kv_tokens` includes.
        costs = [
            min(tokens, ticket.prompt_tokens + ticket.max_new_tokens)
            for tokens, ticket in zip(expected, admission_requests, strict=True)
        ]
        if not self._emitted(admission_requests[0].request_id):
            self._check_rates(tenant, len(admission_requests), sum(costs), now)
        return [
            self._charge(tenant, replace(ticket, arrived_at=now, expected_tokens=tokens), cost)
            for ticket, tokens, cost in zip(admission_requests, expected, costs, strict=True)
        ]

    def _charge(self, tenant: Tenant, admission_request: AdmissionRequest, cost: int) -> QueueEntry:
        if tenant.requests is not None:
            tenant.requests.take_tokens(1.0)
        if tenant.tokens is not None:
            tenant.tokens.take_tokens(cost)
        admission_request = replace(
            admission_request,
            tenant=tenant.name,
            virtual_start=self.tenants.record_queued(tenant, cost),
            was_assigned=self._emitted(admission_request.request_id) > 0,
        )
        self._metrics.tenant_requests.labels(self.tenants.metrics_label(tenant.name)).inc()
        queue_entry = self._guests[admission_request.request_id] = QueueEntry(
            admission_request=admission_request, tenant=tenant, charged=cost
        )
        return queue_entry

    def _enter_again(
        self, queue_entry: QueueEntry, admission_request: AdmissionRequest
    ) -> QueueEntry:
        """Prepare the entry of a request that needs another reservation; the entry keeps its place
        in the order.
        """
        before = queue_entry.admission_request
        queue_entry.admission_request = replace(
            admission_request,
            tenant=before.tenant,
            arrived_at=before.arrived_at,
            virtual_start=before.virtual_start,
            expected_tokens=self._capacity_ledger.expected_tokens(admission_request),
            was_assigned=True,
        )
        return queue_entry

    def _line_up(self, guests: Sequence[QueueEntry]) -> None:
        """Queue entries for reservations. The entries that the full queue refuses fail at once."""
        for queue_entry in guests:
            queue_entry.reservation_future = asyncio.get_running_loop().create_future()
            self._waiting[queue_entry.admission_request.request_id] = queue_entry
            self._count(queue_entry, 1)
        self._pump()
        self._bound(guests)

    def _check_rates(self, tenant: Tenant, count: int, cost: int, now: float) -> None:
        bounds = (tenant.requests, count, "requests"), (tenant.tokens, cost, "tokens")
        for bucket, units, what in bounds:
            if bucket is not None and bucket.shortage(units, now):
                self._metrics.refusals.labels("RATE_LIMITED").inc()
                raise ResourceExhaustedError(
                    f"the tenant exceeded its rate limit of {what}; try again later",
                    reason="RATE_LIMITED",
                    retry_after_s=bucket.hint_s(units, now),
                )

    def _bound(self, guests: Sequence[QueueEntry]) -> None:
        """Keep the queue within its limit: refuse newcomers, or displace waiting requests in favour
        of newcomers.
        """
        newcomers = [
            guest
            for guest in guests
            if guest.is_pending and not guest.admission_request.was_assigned
        ]
        if not newcomers:
            return
        now = self._clock()
        # A queue position becomes free with every request that ends.
        each_s = self._service_s / max(1, self.num_running)
        queue = [g for g in self._waiting.values() if g.is_pending and g not in newcomers]
        victims: list[AdmissionRequest] = []
        for newcomer in newcomers:
            admission_request = newcomer.admission_request
            others = [guest.admission_request for guest in queue]
            queue.append(newcomer)
            due = self._places.is_due(admission_request.request_id, now)
            if len(queue) + (0 if due else self._places.num_held(now)) <= self.queue_limit:
                self._places.forget_request(admission_request.request_id)
                continue
            weights = {guest.tenant.name: guest.tenant.limits.weight for guest in queue}
            victim = request_to_displace(others, admission_request, weights)
            if victim is None:
                self._refuse(admission_request, "QUEUE_FULL", each_s)
                return
            if len(queue) > self.queue_limit:
                victims.append(victim)
                queue = [guest for guest in queue if guest.admission_request is not victim]
        for victim in victims:
            self._refuse(victim, "DISPLACED", each_s)

    def _refuse(self, admission_request: AdmissionRequest, reason: str, each_s: float) -> None:
        known = admission_request.request_id if admission_request.is_client_named else None
        hint_s = self._places.next_retry_s(known, self._clock(), each_s)
        what = REFUSALS[reason].format(limit=self.queue_limit)
        self._metrics.refusals.labels(reason).inc()
        error = ResourceExhaustedError(what, reason=reason, retry_after_s=hint_s)
        self.fail_request(admission_request.request_id, error)

    def _state(self) -> AdmissionState:
        pending = [guest for guest in self._waiting.values() if guest.is_pending]
        room = {
            guest.tenant.name: guest.tenant.limits.max_running - guest.tenant.num_running
            for guest in pending
            if guest.tenant.limits.max_running
        }
        return AdmissionState(
            queue=tuple(guest.admission_request for guest in pending),
            verifiers=self._capacity_ledger.loads,
            tenant_room=room,
            aging_s=self._config.overload.priority_aging_s,
        )

    def _pump(self) -> None:
        now = self._clock()
        if self._waiting:
            self._perform(plan_admission(self._state(), now))
        self._metrics.requests_running.set(self.num_running)
        self._metrics.kv_reserved_tokens.set(self.reserved_tokens)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = next_change_at(self._state(), now) if self._waiting else None
        if wake is not None:
            self._timer = asyncio.get_running_loop().call_later(wake - now, self._pump)

    def _perform(self, actions: Sequence[AdmissionAction]) -> None:
        for action in actions:
            match action:
                case AdmitRequest():
                    self._admit(action)
                case ExpireRequest(request_id=request_id):
                    self.fail_request(
                        request_id,
                        DeadlineExceededError(
                            "the deadline of the request passed while it was queued",
                            reason="DEADLINE_IN_QUEUE",
                        ),
                    )
                case RefuseRequest(request_id=request_id):
                    self.fail_request(request_id, no_verifier_error())

    def _admit(self, action: AdmitRequest) -> None:
        queue_entry = self._waiting[action.request_id]
        assert queue_entry.reservation_future is not None, "it waits"
        reservation = self._capacity_ledger.reserve_capacity(
            queue_entry.admission_request, action.verifier_id
        )
        queue_entry.reservations.append(reservation)
        if queue_entry.placed_at is None:
            queue_entry.placed_at = self._clock()
            self._places.forget_request(action.request_id)
        queue_entry.tenant.num_running += 1
        group = self._joining.get(action.request_id)
        if group is None or group.inside:
            self.tenants.advance_time(queue_entry.admission_request.virtual_start)
        if action.needs_preemption:
            self._metrics.preempting_placements.inc()
        self._remove(queue_entry)
        queue_entry.reservation_future.set_result(reservation)

    def _take_back(self, reservation: CapacityReservation, *, refused: bool = False) -> None:
        queue_entry = self._guests.get(reservation.admission_request.request_id)
        if queue_entry is not None and reservation in queue_entry.reservations:
            queue_entry.reservations.remove(reservation)
            queue_entry.tenant.num_running -= 1
        self._capacity_ledger.release_capacity(reservation, self._clock(), refused=refused)

    def _remove(self, queue_entry: QueueEntry) -> None:
        if self._unqueue(queue_entry) and (
            queue_entry.reservation_future is None or queue_entry.reservation_future.done()
        ):
            self._pump()

    def _unqueue(self, queue_entry: QueueEntry) -> bool:
        """Remove an entry from the queue, and return whether it was there."""
        if self._waiting.pop(queue_entry.admission_request.request_id, None) is None:
            return False
        self._count(queue_entry, -1)
        return True

    def _count(self, queue_entry: QueueEntry, more: int) -> None:
        priority = queue_entry.admission_request.priority
        self._depths[priority] += more
        self._metrics.queue_depth.labels(str(priority)).set(self._depths[priority])
