"""Capacity ledger: KV-cache tokens that one router has reserved on each verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from outrider.errors import InvalidRequestError
from outrider.ids import RequestId, VerifierId
from outrider.wire.messages import VerifierInfo
from outrider_router.admission.length_estimate import OutputLengthEstimator
from outrider_router.admission.policy import FULL_BACKOFF_S, VerifierLoad
from outrider_router.admission.wait_order import AdmissionRequest


@dataclass(slots=True, kw_only=True, eq=False)
class CapacityReservation:
    """Capacity on a verifier; given back with `AdmissionQueue.release_capacity`."""

    admission_request: AdmissionRequest
    verifier_id: VerifierId
    generation: int
    """Start of the verifier that it is valid for; a lost verifier voids its leases."""
    tokens: int
    """Tokens of KV that the session is expected to hold, in whole blocks."""


@dataclass(slots=True, kw_only=True)
class _Budget:
    load: VerifierLoad
    generation: int = 0
    healthy: bool = True
    others_tokens: int = 0
    """Tokens that sessions of other routers seemed to hold at the last look."""
    leases: dict[CapacityReservation, None] = field(default_factory=dict)
    """Those of this generation."""


class CapacityLedger:
    """KV-cache budgets of all verifiers, and the reservations that count against them."""

    def __init__(
        self,
        lengths: OutputLengthEstimator,
        *,
        overcommit: float,
        emitted: Callable[[RequestId], int],
    ) -> None:
        """`emitted` counts the tokens of a request so far."""
        self._lengths = lengths
        self._overcommit = overcommit
        self._emitted = emitted
        self._budgets: dict[VerifierId, _Budget] = {}

    @property
    def loads(self) -> tuple[VerifierLoad, ...]:
        """The healthy verifiers."""
        return tuple(budget.load for budget in self._budgets.values() if budget.healthy)

    @property
    def tokens(self) -> int:
        """KV tokens given away, over all verifiers."""
        return sum(budget.load.tokens for budget in self._budgets.values())

    @property
    def sessions(self) -> int:
        """Sessions placed, over all verifiers."""
        return sum(len(budget.leases) for budget in self._budgets.values())

    def sessions_on(self, verifier_id: VerifierId) -> int:
        """Sessions placed on one verifier."""
        budget = self._budgets.get(verifier_id)
        return len(budget.leases) if budget is not None else 0

    def expected_tokens(self, admission_request: AdmissionRequest) -> int:
        """Tokens of KV that a session is expected to hold at its end."""
        emitted = self._emitted(admission_request.request_id)
        unused = admission_request.max_new_tokens - self._lengths.expected_len(
            admission_request.max_new_tokens, emitted
        )
        return admission_request.kv_tokens - max(0, unused)

    def update_verifier(self, info: VerifierInfo) -> None:
        """A verifier is healthy; its budget counts as it says. What was given away stays, and
        counts with what it has grown to."""
        budget = self._budgets.get(info.verifier_id)
        if budget is None:
            load = VerifierLoad(verifier_id=info.verifier_id, total_tokens=0, max_sessions=0)
            budget = self._budgets[info.verifier_id] = _Budget(load=load)
        block = info.kv_block_tokens
        budget.healthy = True
        budget.load = replace(
            budget.load,
            total_tokens=info.kv_total_blocks * block,
            block_tokens=block,
            overcommit=self._overcommit,
            max_sessions=info.max_sessions,
            waiting=info.waiting_sessions,
            free_tokens=info.kv_free_blocks * block,
            is_draining=info.draining,
        )
        self._regrow(budget)
        # One look may see sessions of this router that have just ended; two in a row do not.
        before, budget.others_tokens = budget.others_tokens, self._others(budget, info)
        others = min(before, budget.others_tokens)
        budget.load = replace(budget.load, others_tokens=others)

    def drop_verifier(self, verifier_id: VerifierId) -> None:
        """A verifier is lost, and with it everything that was placed there."""
        budget = self._budgets.get(verifier_id)
        if budget is None:
            return
        budget.generation += 1
        budget.healthy = False
        budget.leases.clear()
        budget.load = replace(budget.load, assigned_by_priority={}, not_before=0.0)

    def assign_request(
        self, admission_request: AdmissionRequest, verifier_id: VerifierId
    ) -> CapacityReservation:
        """Give a place away."""
        budget = self._budgets[verifier_id]
        budget.load = budget.load.with_session(admission_request)
        lease = CapacityReservation(
            admission_request=admission_request,
            verifier_id=verifier_id,
            generation=budget.generation,
            tokens=budget.load.round_to_blocks(admission_request.counted_tokens),
        )
        budget.leases[lease] = None
        return lease

    def release_capacity(self, lease: CapacityReservation, now: float, *, refused: bool) -> None:
        """Take a place back. `refused`: the verifier had no room although the ledger said so."""
        budget = self._budgets[lease.verifier_id]
        if budget.generation != lease.generation:
            return
        del budget.leases[lease]
        budget.load = budget.load.with_change(lease.admission_request.priority, -1, -lease.tokens)
        if refused:
            budget.load = replace(budget.load, not_before=now + FULL_BACKOFF_S)

    def could_fit(self, kv_tokens: int) -> bool:
        """Whether some healthy verifier could serve a session that may grow to this size."""
        return any(load.could_ever_fit(kv_tokens) for load in self.loads)

    def check_group(self, size: int, queue_limit: int) -> None:
        """Requests that come together must find places or wait: InvalidRequestError where the
        healthy verifiers and the queue are too few for them even when nobody else is there."""
        most = sum(load.max_sessions for load in self.loads if not load.is_draining)
        if most and size > most + queue_limit:
            raise InvalidRequestError(
                f"{size} answers cannot be given at once: the fleet serves {most} requests while "
                f"{queue_limit} wait",
                reason="TOO_MANY_ANSWERS",
                param="n",
            )

    def _regrow(self, budget: _Budget) -> None:
        for lease in budget.leases:
            more = (
                budget.load.round_to_blocks(self.expected_tokens(lease.admission_request))
                - lease.tokens
            )
            if more > 0:
                budget.load = budget.load.with_change(lease.admission_request.priority, 0, more)
                lease.tokens += more

    def _others(self, budget: _Budget, info: VerifierInfo) -> int:
        if info.sessions <= len(budget.leases):
            return 0
        used = (info.kv_total_blocks - info.kv_free_blocks) * info.kv_block_tokens
        return max(0, used - sum(self._held(budget.load, budget.leases)))

    def _held(self, load: VerifierLoad, leases: Iterable[CapacityReservation]) -> Iterable[int]:
        """Tokens that sessions hold now."""
        for lease in leases:
            admission_request = lease.admission_request
            yield load.round_to_blocks(
                admission_request.prompt_tokens + self._emitted(admission_request.request_id)
            )
