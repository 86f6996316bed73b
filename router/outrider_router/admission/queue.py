"""The requests of one router that wait or are placed; performs what `admission.plan` decides."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.errors import DeadlineExceededError, OutriderError, ResourceExhaustedError
from outrider.ids import RequestId, VerifierId
from outrider.wire.messages import VerifierInfo
from outrider_router.admission.capacity_ledger import Lease, Ledger
from outrider_router.admission.guest import Guest
from outrider_router.admission.length_estimate import Lengths
from outrider_router.admission.policy import (
    Action,
    Admit,
    Expire,
    Refuse,
    State,
    next_wake,
    no_verifier,
    plan,
)
from outrider_router.admission.request_group import Party
from outrider_router.admission.wait_order import Ticket, who_makes_way
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.retry_hints import REFUSALS, Places
from outrider_router.base.tenants import Tenant, Tenants
from outrider_router.config import RouterConfig


class AdmissionQueue:
    """The queue and the ledger of one router. Use from one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: RouterMetrics,
        *,
        clock: Callable[[], float],
        emitted: Callable[[RequestId], int],
    ) -> None:
        """`clock` is monotonic, in seconds; `emitted` counts the tokens of a request so far."""
        self.queue_limit = config.queue_limit
        self.lengths = Lengths(
            assumed=config.overload.assumed_tokens, quantile=config.overload.length_quantile
        )
        self._ledger = Ledger(
            self.lengths, overcommit=config.overload.kv_overcommit, emitted=emitted
        )
        self.tenants = Tenants(config.tenants, most=config.overload.max_tenants)
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._emitted = emitted
        self._guests: dict[RequestId, Guest] = {}
        self._waiting: dict[RequestId, Guest] = {}
        self._joining: dict[RequestId, Party] = {}
        """Requests that wait for those that they come with."""
        self._timer: asyncio.TimerHandle | None = None
        self._service_s = 1.0
        self._places = Places(config.queue_limit)
        self._depths: Counter[int] = Counter()

    @property
    def guests(self) -> int:
        """Requests that came and have not left."""
        return len(self._guests)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def reserved_tokens(self) -> int:
        """KV tokens given away, over all verifiers."""
        return self._ledger.tokens

    @property
    def running(self) -> int:
        """Sessions placed, over all verifiers."""
        return self._ledger.sessions

    def saw_verifier(self, info: VerifierInfo) -> None:
        """A verifier is healthy, and says what it has."""
        self._ledger.saw(info)
        self._pump()

    def drop_verifier(self, verifier_id: VerifierId) -> None:
        """A verifier is lost, and with it all that was placed there."""
        self._ledger.drop(verifier_id)
        self._pump()

    async def acquire(self, ticket: Ticket, party: Party | None = None) -> Lease:
        """Wait for a place. `party`: whom it comes with.

        The first call for a request charges its tenant; more may follow until `leave`, none of
        which is refused for want of room in the queue. Raises ResourceExhaustedError when the
        tenant's rate is exceeded or the queue is full, UnavailableError without a healthy
        verifier, DeadlineExceededError. Cancelling the wait leaves the queue.
        """
        guest = self._guests.get(ticket.request_id)
        if guest is not None:
            self._line_up([self._enter_again(guest, ticket)])
        elif party is None or party.inside:
            self._line_up(self._enter((ticket,)))
        else:
            await self._come_with(party, ticket)
        guest = self._guests[ticket.request_id]
        future = guest.place
        assert future is not None, "it waits"
        try:
            return await future
        except asyncio.CancelledError:
            # A cancel may arrive after the place was given but before it was taken.
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise
        finally:
            self._remove(guest)
            if not guest.leases:
                self.leave(ticket.request_id)

    def fail(self, request_id: RequestId, error: OutriderError) -> None:
        """End a request's wait with an error; nothing happens if it does not wait."""
        if (party := self._joining.get(request_id)) is not None:
            party.refuse(error)
        guest = self._waiting.get(request_id)
        if guest is not None and guest.place is not None and guest.pending:
            guest.place.set_exception(error)

    def release(self, lease: Lease, *, refused: bool = False) -> None:
        """Give a place back. `refused`: the verifier had no room although the ledger said so."""
        self._take_back(lease, refused=refused)
        self._pump()

    def leave(self, request_id: RequestId) -> None:
        """A request is over and holds no place; idempotent. Its tenant pays for what it was."""
        guest = self._guests.pop(request_id, None)
        if guest is None:
            return
        ticket, tenant, used = guest.ticket, guest.tenant, 0
        tenant.held -= 1
        if guest.placed_at is None:
            self.tenants.withdrawn(tenant, guest.charged)
        else:
            emitted = self._emitted(request_id)
            used = ticket.prompt_tokens + emitted
            self._service_s += 0.2 * (self._clock() - guest.placed_at - self._service_s)
            if emitted:
                self.lengths.add(emitted, ticket.max_new_tokens)
        if tenant.tokens is not None:
            tenant.tokens.take(used - guest.charged)
        self._metrics.tenant_tokens.labels(self.tenants.label(tenant.name)).inc(used)

    def sessions_on(self, verifier_id: VerifierId) -> int:
        """Sessions placed on one verifier."""
        return self._ledger.sessions_on(verifier_id)

    def could_fit(self, kv_tokens: int) -> bool:
        """Whether some healthy verifier could serve a session that may grow to this size."""
        return self._ledger.could_fit(kv_tokens)

    async def _come_with(self, party: Party, ticket: Ticket) -> None:
        """Line up once all of a party are there. Raises what keeps one of them out."""
        self._joining[ticket.request_id] = party
        try:
            if tickets := party.join(ticket):
                self._line_up_all(party, tickets)
            await party.wait()
        except asyncio.CancelledError:
            party.leave()
            if (guest := self._guests.get(ticket.request_id)) is not None:
                self._dismiss([guest])
            raise
        finally:
            self._joining.pop(ticket.request_id, None)

    def _line_up_all(self, party: Party, tickets: Sequence[Ticket]) -> None:
        """Let all of a party in, or none of them."""
        try:
            self._ledger.check_party(len(tickets), self.queue_limit)
            self._line_up(guests := self._enter(tickets))
        except OutriderError as error:
            party.refuse(error)
            return
        problems = [problem for guest in guests if (problem := guest.problem) is not None]
        if problems:
            party.refuse(problems[0])
            self._dismiss(guests)
            return
        party.let_in()
        for guest in guests:
            if guest.leases:
                self.tenants.reached(guest.ticket.start)

    def _dismiss(self, guests: Sequence[Guest]) -> None:
        """They leave before anybody could take a place: it is as if they had not come."""
        for guest in guests:
            self._unqueue(guest)
            for lease in tuple(guest.leases):
                self._take_back(lease)
            if guest.place is not None:
                guest.place.cancel()
            guest.placed_at = None
            self.leave(guest.ticket.request_id)
        self._pump()

    def _enter(self, tickets: Sequence[Ticket]) -> list[Guest]:
        """Charge the tenant of requests that come together; ResourceExhaustedError if that is
        beyond its rate."""
        now = self._clock()
        tenant = self.tenants.get(tickets[0].tenant, now)
        expected = [self._ledger.expected(ticket) for ticket in tickets]
        # The slack is nothing that the tenant uses.
        costs = [
            min(tokens, ticket.prompt_tokens + ticket.max_new_tokens)
            for tokens, ticket in zip(expected, tickets, strict=True)
        ]
        if not self._emitted(tickets[0].request_id):
            self._check_rates(tenant, len(tickets), sum(costs), now)
        return [
            self._charge(tenant, replace(ticket, arrived=now, expected_tokens=tokens), cost)
            for ticket, tokens, cost in zip(tickets, expected, costs, strict=True)
        ]

    def _charge(self, tenant: Tenant, ticket: Ticket, cost: int) -> Guest:
        if tenant.requests is not None:
            tenant.requests.take(1.0)
        if tenant.tokens is not None:
            tenant.tokens.take(cost)
        ticket = replace(
            ticket,
            tenant=tenant.name,
            start=self.tenants.queued(tenant, cost),
            served=self._emitted(ticket.request_id) > 0,
        )
        self._metrics.tenant_requests.labels(self.tenants.label(tenant.name)).inc()
        guest = self._guests[ticket.request_id] = Guest(ticket=ticket, tenant=tenant, charged=cost)
        return guest

    def _enter_again(self, guest: Guest, ticket: Ticket) -> Guest:
        """A request needs another place; it keeps its turn."""
        before = guest.ticket
        guest.ticket = replace(
            ticket,
            tenant=before.tenant,
            arrived=before.arrived,
            start=before.start,
            expected_tokens=self._ledger.expected(ticket),
            served=True,
        )
        return guest

    def _line_up(self, guests: Sequence[Guest]) -> None:
        """Have guests wait for places; who gets none in the queue has an error at once."""
        for guest in guests:
            guest.place = asyncio.get_running_loop().create_future()
            self._waiting[guest.ticket.request_id] = guest
            self._count(guest, 1)
        self._pump()
        self._bound(guests)

    def _check_rates(self, tenant: Tenant, count: int, cost: int, now: float) -> None:
        bounds = (tenant.requests, count, "requests"), (tenant.tokens, cost, "tokens")
        for bucket, units, what in bounds:
            if bucket is not None and bucket.missing(units, now):
                self._metrics.refusals.labels("RATE_LIMITED").inc()
                raise ResourceExhaustedError(
                    f"the tenant has used up its rate of {what}; try again later",
                    reason="RATE_LIMITED",
                    retry_after_s=bucket.hint_s(units, now),
                )

    def _bound(self, guests: Sequence[Guest]) -> None:
        """Keep the queue within its limit: others make way for newcomers, or one is refused."""
        newcomers = [guest for guest in guests if guest.pending and not guest.ticket.served]
        if not newcomers:
            return
        now = self._clock()
        # The queue moves on with every request that ends.
        each_s = self._service_s / max(1, self.running)
        queue = [g for g in self._waiting.values() if g.pending and g not in newcomers]
        victims: list[Ticket] = []
        for newcomer in newcomers:
            ticket = newcomer.ticket
            others = [guest.ticket for guest in queue]
            queue.append(newcomer)
            due = self._places.is_due(ticket.request_id, now)
            if len(queue) + (0 if due else self._places.kept(now)) <= self.queue_limit:
                self._places.taken(ticket.request_id)
                continue
            weights = {guest.tenant.name: guest.tenant.limits.weight for guest in queue}
            victim = who_makes_way(others, ticket, weights)
            if victim is None:
                self._refuse(ticket, "QUEUE_FULL", each_s)
                return
            if len(queue) > self.queue_limit:
                victims.append(victim)
                queue = [guest for guest in queue if guest.ticket is not victim]
        for victim in victims:
            self._refuse(victim, "DISPLACED", each_s)

    def _refuse(self, ticket: Ticket, reason: str, each_s: float) -> None:
        known = ticket.request_id if ticket.returns else None
        hint_s = self._places.hint_s(known, self._clock(), each_s)
        what = REFUSALS[reason].format(limit=self.queue_limit)
        self._metrics.refusals.labels(reason).inc()
        error = ResourceExhaustedError(what, reason=reason, retry_after_s=hint_s)
        self.fail(ticket.request_id, error)

    def _state(self) -> State:
        pending = [guest for guest in self._waiting.values() if guest.pending]
        room = {
            guest.tenant.name: guest.tenant.limits.max_running - guest.tenant.running
            for guest in pending
            if guest.tenant.limits.max_running
        }
        return State(
            queue=tuple(guest.ticket for guest in pending),
            verifiers=self._ledger.loads,
            room=room,
            aging_s=self._config.overload.aging_s,
        )

    def _pump(self) -> None:
        now = self._clock()
        if self._waiting:
            self._perform(plan(self._state(), now))
        self._metrics.requests_running.set(self.running)
        self._metrics.kv_reserved_tokens.set(self.reserved_tokens)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = next_wake(self._state(), now) if self._waiting else None
        if wake is not None:
            self._timer = asyncio.get_running_loop().call_later(wake - now, self._pump)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Admit():
                    self._admit(action)
                case Expire(request_id=request_id):
                    self.fail(
                        request_id,
                        DeadlineExceededError(
                            "the deadline passed while the request was queued",
                            reason="DEADLINE_IN_QUEUE",
                        ),
                    )
                case Refuse(request_id=request_id):
                    self.fail(request_id, no_verifier())

    def _admit(self, action: Admit) -> None:
        guest = self._waiting[action.request_id]
        assert guest.place is not None, "it waits"
        lease = self._ledger.place(guest.ticket, action.verifier_id)
        guest.leases.append(lease)
        if guest.placed_at is None:
            guest.placed_at = self._clock()
            self._places.taken(action.request_id)
        guest.tenant.running += 1
        party = self._joining.get(action.request_id)
        if party is None or party.inside:
            self.tenants.reached(guest.ticket.start)
        if action.preempts:
            self._metrics.preempting_placements.inc()
        self._remove(guest)
        guest.place.set_result(lease)

    def _take_back(self, lease: Lease, *, refused: bool = False) -> None:
        guest = self._guests.get(lease.ticket.request_id)
        if guest is not None and lease in guest.leases:
            guest.leases.remove(lease)
            guest.tenant.running -= 1
        self._ledger.release(lease, self._clock(), refused=refused)

    def _remove(self, guest: Guest) -> None:
        if self._unqueue(guest) and (guest.place is None or guest.place.done()):
            self._pump()

    def _unqueue(self, guest: Guest) -> bool:
        """Take a guest out of the queue; whether it was there."""
        if self._waiting.pop(guest.ticket.request_id, None) is None:
            return False
        self._count(guest, -1)
        return True

    def _count(self, guest: Guest, more: int) -> None:
        priority = guest.ticket.priority
        self._depths[priority] += more
        self._metrics.queue_depth.labels(str(priority)).set(self._depths[priority])
