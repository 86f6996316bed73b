"""Admission: a bounded queue in front of the verifiers' KV budgets.

`plan` decides and knows no clock, no lock and no task; `admission_queue` performs its actions.
Strictly by priority, then first come first served: a session that does not fit is not overtaken,
so a large one cannot starve.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from outrider.errors import UnavailableError
from outrider.ids import RequestId, VerifierId

NO_VERIFIER = "NO_VERIFIER"
"""Reason of errors: no verifier is healthy."""
MIN_RETRY_S = 0.5
MAX_RETRY_S = 30.0
FULL_BACKOFF_S = 0.1
"""Pause after a verifier refused a session that the ledger thought would fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request that waits for a place."""

    request_id: RequestId
    kv_tokens: int
    """Tokens of KV that the session may need."""
    sequence: int
    """Order of arrival; a ticket that is queued again keeps it."""
    priority: int = 0
    """Greater goes first."""
    deadline: float | None = None
    """Clock time after which waiting is pointless, seconds."""
    patient_until: float | None = None
    """Of a request that was placed before: clock time until which it waits for a verifier that
    could serve it, seconds. It is not refused because the queue is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierLoad:
    """A healthy verifier's budget and what the ledger has given away."""

    verifier_id: VerifierId
    total_tokens: int
    """Tokens that its KV cache holds."""
    block_tokens: int = 1
    """Reservations are rounded up to this."""
    reserved_tokens: int = 0
    sessions: int = 0
    max_sessions: int
    not_before: float = 0.0
    """Clock time before which nothing is placed here, seconds."""
    draining: bool = False
    """Whether nothing is placed here any more."""

    def rounded(self, tokens: int) -> int:
        """`tokens` in whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def fits_empty(self, tokens: int) -> bool:
        """Whether a session of this size could ever be served here."""
        fits = self.rounded(tokens) <= self.total_tokens and self.max_sessions > 0
        return fits and not self.draining

    def fits_now(self, tokens: int, now: float) -> bool:
        """Whether a session of this size fits beside those that were placed."""
        return (
            now >= self.not_before
            and not self.draining
            and self.sessions < self.max_sessions
            and self.reserved_tokens + self.rounded(tokens) <= self.total_tokens
        )

    def with_session(self, tokens: int) -> VerifierLoad:
        """The load after a session of this size is placed."""
        return replace(
            self,
            reserved_tokens=self.reserved_tokens + self.rounded(tokens),
            sessions=self.sessions + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What `plan` decides from."""

    queue: tuple[Ticket, ...]
    verifiers: tuple[VerifierLoad, ...]
    """Healthy verifiers only."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Serve the request on this verifier."""

    request_id: RequestId
    verifier_id: VerifierId


@dataclass(frozen=True, slots=True)
class Expire:
    """The request's deadline passed while it waited."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Refuse:
    """No verifier is left to wait for, or none that could serve it."""

    request_id: RequestId


Action = Admit | Expire | Refuse


def plan(state: State, now: float) -> list[Action]:
    """What to do with the waiting requests, in order."""
    actions: list[Action] = []
    loads = {load.verifier_id: load for load in state.verifiers}
    blocked = False
    for ticket in sorted(state.queue, key=lambda t: (-t.priority, t.sequence)):
        if ticket.deadline is not None and now >= ticket.deadline:
            actions.append(Expire(ticket.request_id))
        elif not any(load.fits_empty(ticket.kv_tokens) for load in loads.values()):
            # Whoever waits for a verifier to come back is in nobody's way.
            if ticket.patient_until is None or now >= ticket.patient_until:
                actions.append(Refuse(ticket.request_id))
        elif not blocked:
            chosen = choose_verifier(loads.values(), ticket.kv_tokens, now)
            if chosen is None:
                blocked = True
                continue
            loads[chosen.verifier_id] = chosen.with_session(ticket.kv_tokens)
            actions.append(Admit(ticket.request_id, chosen.verifier_id))
    return actions


def choose_verifier(
    loads: Iterable[VerifierLoad], kv_tokens: int, now: float
) -> VerifierLoad | None:
    """The verifier with the largest free share of its KV; ties by fewest sessions, then by id."""
    fitting = [load for load in loads if load.fits_now(kv_tokens, now)]
    return min(
        fitting,
        key=lambda load: (
            load.reserved_tokens / load.total_tokens,
            load.sessions,
            load.verifier_id,
        ),
        default=None,
    )


def next_wake(state: State, now: float) -> float | None:
    """The next clock time at which `plan` may decide differently by itself, or None."""
    ends = [end for ticket in state.queue for end in (ticket.deadline, ticket.patient_until)]
    times = [end for end in ends if end is not None]
    if state.queue:
        times += [load.not_before for load in state.verifiers]
    return min((time for time in times if time > now), default=None)


def retry_hint_s(waiting: int, running: int, service_s: float) -> float:
    """Seconds after which a refused client may find room: the queue's expected drain time."""
    expected = service_s * (waiting + 1) / max(1, running)
    return min(MAX_RETRY_S, max(MIN_RETRY_S, expected))


def no_verifier() -> UnavailableError:
    """The error of a request while no verifier is healthy."""
    return UnavailableError(
        "no verifier is ready; try again later", reason=NO_VERIFIER, retry_after_s=1.0
    )
