"""Capacity ledger: KV-cache tokens that one router has reserved on each verifier.

A verifier allocates KV cache as a session grows. So admission reserves the length that a session is
expected to reach, estimated from the lengths of recent outputs, and not its maximum length. An
estimate that is too small costs a preemption; one that is too large leaves capacity unused.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from outrider.errors import InvalidRequestError
from outrider.ids import RequestId, VerifierId
from outrider.wire.messages import VerifierInfo
from outrider_router.admission.policy import FULL_BACKOFF_S, AdmissionRequest, VerifierLoad

WINDOW_REQUESTS = 512
"""Number of most recent outputs from which output lengths are estimated."""
MIN_REQUESTS = 8
"""Smallest number of comparable outputs from which a length is estimated."""


class OutputLengthEstimator:
    """Estimates output lengths from the lengths of the most recent outputs."""

    def __init__(self, *, assumed: int, quantile: float) -> None:
        """Create an estimator without measurements.

        `assumed` is the output length in tokens that is expected until enough outputs were
        recorded. `quantile` is the fraction of outputs, in (0, 1], that should be no longer than
        the estimate.
        """
        self._assumed = assumed
        self._quantile = quantile
        self._newest: deque[tuple[int, bool]] = deque()
        self._whole: list[int] = []
        """Lengths in tokens of outputs that ended before their limit, ascending."""
        self._cut: list[int] = []
        """Lengths in tokens of outputs that reached their limit and might have grown longer,
        ascending.
        """

    def add_answer(self, emitted: int, bound: int) -> None:
        """Record an output that ended with `emitted` tokens and was limited to `bound` tokens."""
        if len(self._newest) == WINDOW_REQUESTS:
            length, cut = self._newest.popleft()
            known = self._cut if cut else self._whole
            del known[bisect_right(known, length) - 1]
        entry = emitted, emitted >= bound
        self._newest.append(entry)
        insort(self._cut if entry[1] else self._whole, emitted)

    def expected_len(self, bound: int, emitted: int = 0) -> int:
        """Return the expected final length, in tokens, of an output that is limited to `bound`
        tokens and has `emitted` tokens now.

        Recorded outputs that ended at a limit smaller than `bound` are ignored. If fewer than
        `MIN_REQUESTS` of the others were longer than `emitted`, the expected length is twice
        `emitted` or the assumed length, whichever is larger, but at most `bound`.
        """
        longer = len(self._whole) - bisect_right(self._whole, emitted)
        at_bound = len(self._cut) - bisect_right(self._cut, bound - 1)
        if longer + at_bound < MIN_REQUESTS:
            guess = max(self._assumed, 2 * emitted)
        else:
            index = int(self._quantile * (longer + at_bound))
            first = len(self._whole) - longer
            guess = self._whole[first + index] if index < longer else bound
        return max(1, min(bound, guess))


@dataclass(slots=True, kw_only=True, eq=False)
class CapacityReservation:
    """KV-cache tokens of one verifier that are reserved for one session.

    `AdmissionQueue.release_capacity` ends a reservation.
    """

    admission_request: AdmissionRequest
    verifier_id: VerifierId
    verifier_generation: int
    """Number of times that the verifier had been lost when this reservation was made. The
    reservation becomes void when the verifier is lost again.
    """
    tokens: int
    """KV-cache tokens that the session is expected to hold at its end, rounded up to whole
    blocks.
    """


@dataclass(slots=True, kw_only=True)
class _Budget:
    """KV-cache budget of one verifier."""

    load: VerifierLoad
    verifier_generation: int = 0
    """Number of times that the verifier has been lost."""
    healthy: bool = True
    others_tokens: int = 0
    """KV-cache tokens that sessions of other routers hold, estimated from the verifier's latest
    info.
    """
    reservations: dict[CapacityReservation, None] = field(default_factory=dict)
    """Reservations made since the verifier was last lost."""


class CapacityLedger:
    """KV-cache budgets of all verifiers, and the reservations that count against them."""

    def __init__(
        self,
        lengths: OutputLengthEstimator,
        *,
        overcommit: float,
        emitted: Callable[[RequestId], int],
    ) -> None:
        """Create a ledger without verifiers.

        `lengths` estimates the lengths of outputs. Reservations on a verifier may add up to
        `overcommit` times its KV cache. `emitted` returns the number of tokens that a request has
        emitted so far.
        """
        self._lengths = lengths
        self._overcommit = overcommit
        self._emitted = emitted
        self._budgets: dict[VerifierId, _Budget] = {}

    @property
    def loads(self) -> tuple[VerifierLoad, ...]:
        """Loads of the healthy verifiers."""
        return tuple(budget.load for budget in self._budgets.values() if budget.healthy)

    @property
    def tokens(self) -> int:
        """Number of KV-cache tokens reserved on all verifiers."""
        return sum(budget.load.tokens for budget in self._budgets.values())

    @property
    def sessions(self) -> int:
        """Number of reservations on all verifiers, one for each session."""
        return sum(len(budget.reservations) for budget in self._budgets.values())

    def sessions_on(self, verifier_id: VerifierId) -> int:
        """Return the number of reservations on one verifier, one for each session."""
        budget = self._budgets.get(verifier_id)
        return len(budget.reservations) if budget is not None else 0

    def expected_tokens(self, admission_request: AdmissionRequest) -> int:
        """Return the number of KV-cache tokens that the session of a request is expected to hold at
        its end.
        """
        emitted = self._emitted(admission_request.request_id)
        unused = admission_request.max_new_tokens - self._lengths.expected_len(
            admission_request.max_new_tokens, emitted
        )
        return admission_request.kv_tokens - max(0, unused)

    def update_verifier(self, info: VerifierInfo) -> None:
        """Set the budget of a healthy verifier from its latest info.

        Existing reservations stay valid. If a session is now expected to hold more tokens than
        reserved, its reservation grows to the new estimate.
        """
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
        self._grow_reservations(budget)
        # One report may still count sessions of this router that have just ended. Two reports in a
        # row do not.
        before, budget.others_tokens = budget.others_tokens, self._others(budget, info)
        others = min(before, budget.others_tokens)
        budget.load = replace(budget.load, others_tokens=others)

    def drop_verifier(self, verifier_id: VerifierId) -> None:
        """Mark a verifier as lost and void all reservations on it."""
        budget = self._budgets.get(verifier_id)
        if budget is None:
            return
        budget.verifier_generation += 1
        budget.healthy = False
        budget.reservations.clear()
        budget.load = replace(budget.load, assigned_by_priority={}, not_before=0.0)

    def reserve_capacity(
        self, admission_request: AdmissionRequest, verifier_id: VerifierId
    ) -> CapacityReservation:
        """Reserve capacity on a verifier for the session of a request."""
        budget = self._budgets[verifier_id]
        budget.load = budget.load.with_session(admission_request)
        reservation = CapacityReservation(
            admission_request=admission_request,
            verifier_id=verifier_id,
            verifier_generation=budget.verifier_generation,
            tokens=budget.load.round_to_blocks(admission_request.counted_tokens),
        )
        budget.reservations[reservation] = None
        return reservation

    def release_capacity(
        self, reservation: CapacityReservation, now: float, *, refused: bool
    ) -> None:
        """End a reservation. Has no effect if the verifier was lost after the reservation was made.

        `refused` means that the verifier refused the session because it was full. The router then
        assigns no further session to this verifier for `FULL_BACKOFF_S` seconds after the clock
        time `now`.
        """
        budget = self._budgets[reservation.verifier_id]
        if budget.verifier_generation != reservation.verifier_generation:
            return
        del budget.reservations[reservation]
        budget.load = budget.load.with_change(
            reservation.admission_request.priority, -1, -reservation.tokens
        )
        if refused:
            budget.load = replace(budget.load, not_before=now + FULL_BACKOFF_S)

    def could_fit(self, kv_tokens: int) -> bool:
        """Return whether a healthy verifier could serve a session that may grow to `kv_tokens`."""
        return any(load.could_ever_fit(kv_tokens) for load in self.loads)

    def check_group(self, size: int, queue_limit: int) -> None:
        """Check that `size` requests of one group would fit into the fleet and the queue if there
        were no other requests.

        Raises InvalidRequestError (TOO_MANY_ANSWERS) if they would not. Without healthy verifiers
        the check passes.
        """
        most = sum(load.max_sessions for load in self.loads if not load.is_draining)
        if most and size > most + queue_limit:
            raise InvalidRequestError(
                f"{size} answers cannot be given at once: the fleet serves {most} requests while "
                f"{queue_limit} wait",
                reason="TOO_MANY_ANSWERS",
                param="n",
            )

    def _grow_reservations(self, budget: _Budget) -> None:
        """Raise each reservation to the number of tokens that its session is now expected to
        hold.
        """
        for reservation in budget.reservations:
            more = (
                budget.load.round_to_blocks(self.expected_tokens(reservation.admission_request))
                - reservation.tokens
            )
            if more > 0:
                budget.load = budget.load.with_change(
                    reservation.admission_request.priority, 0, more
                )
                reservation.tokens += more

    def _others(self, budget: _Budget, info: VerifierInfo) -> int:
        """Return the number of KV-cache tokens in use on a verifier beyond those of this router's
        sessions.
        """
        if info.sessions <= len(budget.reservations):
            return 0
        used = (info.kv_total_blocks - info.kv_free_blocks) * info.kv_block_tokens
        return max(0, used - sum(self._held(budget.load, budget.reservations)))

    def _held(
        self, load: VerifierLoad, reservations: Iterable[CapacityReservation]
    ) -> Iterable[int]:
        """Yield, for each reservation, the number of KV-cache tokens that its session holds now."""
        for reservation in reservations:
            admission_request = reservation.admission_request
            yield load.round_to_blocks(
                admission_request.prompt_tokens + self._emitted(admission_request.request_id)
            )
