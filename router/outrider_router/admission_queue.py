"""The waiting requests and the KV ledger of one router; performs what `admission.plan` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.errors import DeadlineExceededError, OutriderError, ResourceExhaustedError
from outrider.ids import RequestId, VerifierId
from outrider_router.admission import (
    FULL_BACKOFF_S,
    Action,
    Admit,
    Expire,
    Refuse,
    State,
    Ticket,
    VerifierLoad,
    next_wake,
    no_verifier,
    plan,
    retry_hint_s,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A place on a verifier; given back with `AdmissionQueue.release`."""

    ticket: Ticket
    verifier_id: VerifierId
    generation: int
    """Start of the verifier that it is valid for; a lost verifier voids its leases."""
    reserved_tokens: int


@dataclass(slots=True, kw_only=True)
class _Budget:
    load: VerifierLoad
    generation: int = 0
    healthy: bool = True


class AdmissionQueue:
    """The queue and the ledger of one router. Use from one event loop."""

    def __init__(
        self,
        *,
        queue_limit: int,
        clock: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`clock` is monotonic, in seconds; `on_change` is called when queue or ledger changed."""
        self.queue_limit = queue_limit
        self._clock = clock
        self._on_change = on_change
        self._waiting: dict[RequestId, tuple[Ticket, asyncio.Future[Lease]]] = {}
        self._budgets: dict[VerifierId, _Budget] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._service_s = 1.0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def reserved_tokens(self) -> int:
        """KV tokens given away, over all verifiers."""
        return sum(budget.load.reserved_tokens for budget in self._budgets.values())

    @property
    def running(self) -> int:
        """Sessions placed, over all verifiers."""
        return sum(budget.load.sessions for budget in self._budgets.values())

    def set_verifier(self, load: VerifierLoad) -> None:
        """A verifier is healthy; its budget counts from now on. Keeps what was given away."""
        known = self._budgets.get(load.verifier_id)
        if known is None:
            self._budgets[load.verifier_id] = _Budget(load=load)
        else:
            known.healthy = True
            known.load = replace(
                known.load,
                total_tokens=load.total_tokens,
                block_tokens=load.block_tokens,
                max_sessions=load.max_sessions,
                draining=load.draining,
            )
        self._pump()

    def drop_verifier(self, verifier_id: VerifierId) -> None:
        """A verifier is lost, and with it everything that was placed there."""
        budget = self._budgets.get(verifier_id)
        if budget is None:
            return
        budget.generation += 1
        budget.healthy = False
        budget.load = replace(budget.load, reserved_tokens=0, sessions=0, not_before=0.0)
        self._pump()

    async def acquire(self, ticket: Ticket) -> Lease:
        """Wait for a place.

        Raises ResourceExhaustedError when the queue is full, UnavailableError without a healthy
        verifier, DeadlineExceededError. Cancelling the wait leaves the queue.
        """
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting[ticket.request_id] = (ticket, future)
        self._pump()
        crowded = ticket.patient_until is None and len(self._waiting) > self.queue_limit
        if crowded and not future.done():
            self._remove(ticket.request_id)
            raise ResourceExhaustedError(
                f"{self.queue_limit} requests are waiting already; try again later",
                reason="QUEUE_FULL",
                retry_after_s=retry_hint_s(self.waiting, self.running, self._service_s),
            )
        try:
            return await future
        except asyncio.CancelledError:
            # A cancel may arrive after the place was given but before it was taken.
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise
        finally:
            self._remove(ticket.request_id)

    def fail(self, request_id: RequestId, error: OutriderError) -> None:
        """End a request's wait with an error; nothing happens if it does not wait."""
        entry = self._waiting.get(request_id)
        if entry is not None and not entry[1].done():
            entry[1].set_exception(error)

    def release(
        self, lease: Lease, *, refused: bool = False, service_s: float | None = None
    ) -> None:
        """Give a place back. `refused`: the verifier had no room although the ledger said so."""
        budget = self._budgets[lease.verifier_id]
        if budget.generation == lease.generation:
            budget.load = replace(
                budget.load,
                reserved_tokens=budget.load.reserved_tokens - lease.reserved_tokens,
                sessions=budget.load.sessions - 1,
                not_before=self._clock() + FULL_BACKOFF_S if refused else budget.load.not_before,
            )
        if service_s is not None:
            self._service_s += 0.2 * (service_s - self._service_s)
        self._pump()

    def sessions_on(self, verifier_id: VerifierId) -> int:
        """Sessions placed on one verifier."""
        budget = self._budgets.get(verifier_id)
        return budget.load.sessions if budget is not None else 0

    def could_fit(self, kv_tokens: int) -> bool:
        """Whether some healthy verifier could serve a session of this size when empty."""
        return any(load.fits_empty(kv_tokens) for load in self._state().verifiers)

    def _state(self) -> State:
        pending = [ticket for ticket, future in self._waiting.values() if not future.done()]
        healthy = [budget.load for budget in self._budgets.values() if budget.healthy]
        return State(queue=tuple(pending), verifiers=tuple(healthy))

    def _pump(self) -> None:
        now = self._clock()
        self._perform(plan(self._state(), now))
        self._on_change()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake = next_wake(self._state(), now)
        if wake is not None:
            self._timer = asyncio.get_running_loop().call_later(wake - now, self._pump)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Admit(request_id=request_id, verifier_id=verifier_id):
                    self._admit(request_id, verifier_id)
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

    def _admit(self, request_id: RequestId, verifier_id: VerifierId) -> None:
        ticket, future = self._waiting.pop(request_id)
        budget = self._budgets[verifier_id]
        budget.load = budget.load.with_session(ticket.kv_tokens)
        future.set_result(
            Lease(
                ticket=ticket,
                verifier_id=verifier_id,
                generation=budget.generation,
                reserved_tokens=budget.load.rounded(ticket.kv_tokens),
            )
        )

    def _remove(self, request_id: RequestId) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self._pump()
