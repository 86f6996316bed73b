"""Admission policy: selects the waiting requests to admit, and a verifier for each. Pure.

`admission_order` sorts the waiting requests, and `request_to_displace` chooses the request that
leaves a full queue. `plan_admission` decides which requests to admit, and `AdmissionQueue` performs
its decisions.

Capacity is assigned in the order of `admission_order`. Requests never overtake a request that does
not fit yet, so a large request cannot starve. Only requests of tenants at their limit of running
requests are skipped.

A verifier allocates KV cache as its sessions grow, and preempts sessions when the cache is full. So
capacity is reserved for the length that sessions are expected to reach. A session may exceed the
free capacity if sessions of lower priority can be preempted for it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from outrider.errors import UnavailableError
from outrider.ids import RequestId, TenantId, VerifierId
from outrider.wire.limits import MAX_PRIORITY
from outrider_router.base.tenants import SHARED_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """A request that waits for capacity on a verifier."""

    request_id: RequestId
    kv_tokens: int
    """Largest number of KV-cache tokens that the session may need."""
    prompt_tokens: int = 0
    """Number of KV-cache tokens that the session needs from the start."""
    max_new_tokens: int = 0
    """Largest number of tokens that the session may emit."""
    sequence: int
    """Arrival number of the request. A request that is queued again keeps its number."""
    priority: int = 0
    """Priority of the request. Requests of higher priority are served first, and may displace
    waiting requests and preempt sessions of lower priority.
    """
    deadline: float | None = None
    """Clock time in seconds after which the request must not wait any longer, or None."""
    waits_until: float | None = None
    """Clock time in seconds until which the request waits if no verifier exists that could serve
    it. None means that the request is then refused at once."""
    tenant: TenantId = SHARED_TENANT
    arrived_at: float = 0.0
    """Clock time of the arrival, in seconds."""
    virtual_start: float = 0.0
    """Virtual start time of fair queueing, see `TenantRegistry`. Among requests of one priority,
    the one with the smallest time is served first.
    """
    expected_tokens: int = 0
    """Number of KV-cache tokens that the session is expected to hold at its end; 0 means
    `kv_tokens`.
    """
    is_client_named: bool = False
    """Whether the client chose the request id, so that the request is recognized when the client
    retries.
    """
    was_assigned: bool = False
    """Whether the request was assigned to a verifier before. A full queue never refuses such a
    request.
    """

    @property
    def counted_tokens(self) -> int:
        """Number of KV-cache tokens that the session counts against a verifier's capacity."""
        return self.expected_tokens or self.kv_tokens


_turn = attrgetter("virtual_start", "sequence")


def admission_order(
    queue: Iterable[AdmissionRequest], now: float, aging_s: float
) -> Iterator[AdmissionRequest]:
    """Yield the waiting requests by priority, then by virtual start time.

    Only the first request of each priority ages: each `aging_s` seconds of waiting raise it by one
    priority level. Thus requests of one priority keep their fair order, and no request waits
    forever. With `aging_s` 0 no request ages.
    """
    classes: dict[int, list[AdmissionRequest]] = {}
    for admission_request in queue:
        classes.setdefault(admission_request.priority, []).append(admission_request)

    def claim(admission_request: AdmissionRequest) -> float:
        aged = (now - admission_request.arrived_at) / aging_s if aging_s else 0.0
        return -(admission_request.priority + max(0.0, aged))

    heads = []
    for priority, admission_requests in classes.items():
        admission_requests.sort(key=_turn, reverse=True)
        first = admission_requests.pop()
        heads.append((claim(first), -priority, first.sequence, first, admission_requests))
    heapq.heapify(heads)
    while heads:
        _, lower, _, first, admission_requests = heads[0]
        yield first
        if admission_requests:
            following = admission_requests.pop()
            entry = claim(following), lower, following.sequence, following, admission_requests
            heapq.heapreplace(heads, entry)
        else:
            heapq.heappop(heads)


def request_to_displace(
    queue: Sequence[AdmissionRequest], newcomer: AdmissionRequest, weights: Mapping[TenantId, float]
) -> AdmissionRequest | None:
    """Return the waiting request that leaves a full queue for `newcomer`, or None if the newcomer
    is refused.

    Only requests that were never assigned to a verifier can leave, and of these only those of the
    lowest priority. The last request of the tenant with the most such requests, relative to its
    weight, leaves. The newcomer is refused if its own priority is lower. With equal priority it is
    also refused unless its tenant, including the newcomer, has fewer such requests relative to its
    weight. `weights` has the weight of each tenant; the default is 1.
    """
    able = [ticket for ticket in queue if not ticket.was_assigned]
    lowest = min((ticket.priority for ticket in able), default=math.inf)
    if lowest > newcomer.priority:
        return None
    able = [ticket for ticket in able if ticket.priority == lowest]
    counts = Counter(ticket.tenant for ticket in able)

    def load(tenant: TenantId, more: int = 0) -> float:
        return (counts[tenant] + more) / weights.get(tenant, 1.0)

    heaviest = max(counts, key=lambda tenant: (load(tenant), tenant))
    if lowest == newcomer.priority and load(newcomer.tenant, 1) >= load(heaviest):
        return None
    return max((ticket for ticket in able if ticket.tenant == heaviest), key=_turn)


NO_VERIFIER = "NO_VERIFIER"
"""Reason of the error that is raised while no verifier is healthy."""
MIN_PRIORITY = -MAX_PRIORITY
MAX_EXCESS_SESSIONS = 32
"""Largest number of sessions that a verifier gets in addition to `max_sessions` if it can preempt
sessions of lower priority for them. The preempted sessions then wait in the verifier, which by
default lets 64 sessions wait."""
FULL_BACKOFF_S = 0.1
"""Time in seconds for which a verifier gets no sessions after it refused one that was expected to
fit.
"""


@dataclass(frozen=True, slots=True)
class AssignedLoad:
    """Number of sessions on a verifier, of one priority or of several, and the KV-cache tokens that
    are reserved for them.
    """

    sessions: int = 0
    tokens: int = 0
    """Number of KV-cache tokens that the sessions are expected to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierLoad:
    """KV cache capacity of a healthy verifier and the reservations against it."""

    verifier_id: VerifierId
    total_tokens: int
    """KV-cache size in tokens."""
    block_tokens: int = 1
    """KV-cache block size in tokens; sessions occupy whole blocks."""
    overcommit: float = 1.0
    """Factor by which reservations may exceed the KV cache."""
    assigned_by_priority: Mapping[int, AssignedLoad] = field(default_factory=dict)
    """Sessions that this router assigned to the verifier. The keys are priorities."""
    max_sessions: int
    others_tokens: int = 0
    """Number of KV-cache tokens that sessions of other routers held at the last poll."""
    waiting: int = 0
    """Number of sessions that waited for KV cache at the last poll."""
    free_tokens: int = 0
    """Number of KV-cache tokens that were free at the last poll, minus the prompts assigned
    since.
    """
    is_draining: bool = False
    """Whether the verifier takes no new sessions."""
    not_before: float = 0.0
    """Clock time before which the verifier gets no sessions, in seconds."""

    @property
    def sessions(self) -> int:
        """Number of sessions that this router assigned to the verifier."""
        return sum(placed.sessions for placed in self.assigned_by_priority.values())

    @property
    def tokens(self) -> int:
        """Number of KV-cache tokens reserved on the verifier."""
        return sum(placed.tokens for placed in self.assigned_by_priority.values())

    def round_to_blocks(self, tokens: int) -> int:
        """Round `tokens` up to whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def could_ever_fit(self, tokens: int) -> bool:
        """Return whether the verifier could ever serve a session that may grow to `tokens`."""
        fits = self.round_to_blocks(tokens) <= self.total_tokens and self.max_sessions > 0
        return fits and not self.is_draining

    def fits_now(self, admission_request: AdmissionRequest, now: float) -> bool:
        """Return whether the verifier can take the session of a request now without preempting
        another session. `now` is the clock time in seconds.
        """
        if (
            self.sessions
            and self.waiting
            and self.free_tokens < self.round_to_blocks(admission_request.prompt_tokens)
        ):
            # Sessions already hold more KV cache than expected; the sessions waiting there go
            # first.
            return False
        return self._takes(admission_request, now, self.sessions, self.tokens)

    def fits_by_preempting(self, admission_request: AdmissionRequest, now: float) -> bool:
        """Return whether the verifier can take the session of a request now by preempting sessions
        of lower priority. `now` is the clock time in seconds.

        At most `MAX_EXCESS_SESSIONS` sessions are assigned beyond `max_sessions`, because a
        verifier lets only a limited number of sessions wait.
        """
        above = self.from_priority(admission_request.priority)
        most = self.max_sessions + MAX_EXCESS_SESSIONS
        if above.sessions == self.sessions or self.sessions >= most:
            return False
        return self._takes(admission_request, now, above.sessions, above.tokens)

    def from_priority(self, priority: int) -> AssignedLoad:
        """Return the load of the sessions whose priority is `priority` or higher."""
        above = [placed for level, placed in self.assigned_by_priority.items() if level >= priority]
        return AssignedLoad(
            sum(each.sessions for each in above), sum(each.tokens for each in above)
        )

    def with_session(self, admission_request: AdmissionRequest) -> VerifierLoad:
        """Return the verifier's load after the session of a request was assigned to it."""
        load = self.with_change(
            admission_request.priority, 1, self.round_to_blocks(admission_request.counted_tokens)
        )
        used = self.round_to_blocks(admission_request.prompt_tokens)
        return replace(load, free_tokens=max(0, self.free_tokens - used))

    def with_change(self, priority: int, sessions: int, tokens: int) -> VerifierLoad:
        """Return the load with `sessions` more sessions and `tokens` more reserved tokens of this
        priority. Both numbers may be negative.
        """
        before = self.assigned_by_priority.get(priority, AssignedLoad())
        after = AssignedLoad(before.sessions + sessions, before.tokens + tokens)
        placed = {**self.assigned_by_priority, priority: after}
        if not after.sessions:
            del placed[priority]
        return replace(self, assigned_by_priority=placed)

    def _takes(
        self, admission_request: AdmissionRequest, now: float, sessions: int, tokens: int
    ) -> bool:
        room = self.overcommit * self.total_tokens - self.others_tokens
        fits = (
            not sessions or tokens + self.round_to_blocks(admission_request.counted_tokens) <= room
        )
        return (
            now >= self.not_before
            and sessions < self.max_sessions
            and self.could_ever_fit(admission_request.kv_tokens)
            and fits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """Input of `plan_admission`: waiting requests, verifier loads and tenant limits."""

    queue: tuple[AdmissionRequest, ...]
    verifiers: tuple[VerifierLoad, ...]
    """Loads of the healthy verifiers."""
    tenant_room: Mapping[TenantId, int] = field(default_factory=dict)
    """Number of further requests that may run for each tenant. Tenants without a limit are not
    included.
    """
    aging_s: float = 0.0
    """Waiting time in seconds that raises a request by one priority level; 0 disables aging."""


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """Decision to admit a request to a verifier."""

    request_id: RequestId
    verifier_id: VerifierId
    needs_preemption: bool = False
    """Whether sessions of lower priority must be preempted for the request."""


@dataclass(frozen=True, slots=True)
class ExpireRequest:
    """Decision to end a request whose deadline passed while it waited."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Decision to refuse a request because no verifier could ever serve it."""

    request_id: RequestId


AdmissionAction = AdmitRequest | ExpireRequest | RefuseRequest


def plan_admission(state: AdmissionState, now: float) -> list[AdmissionAction]:
    """Return the decisions about the waiting requests, in the order in which they must be
    performed.
    """
    actions: list[AdmissionAction] = []
    loads = {load.verifier_id: load for load in state.verifiers}
    room = dict(state.tenant_room)
    blocked = False
    for admission_request in admission_order(state.queue, now, state.aging_s):
        if admission_request.deadline is not None and now >= admission_request.deadline:
            actions.append(ExpireRequest(admission_request.request_id))
        elif not any(load.could_ever_fit(admission_request.kv_tokens) for load in loads.values()):
            # A verifier that can serve it may return; meanwhile it does not block other requests.
            if admission_request.waits_until is None or now >= admission_request.waits_until:
                actions.append(RefuseRequest(admission_request.request_id))
        elif not blocked and room.get(admission_request.tenant, 1) > 0:
            chosen = choose_verifier(loads.values(), admission_request, now)
            if chosen is None:
                blocked = True
                continue
            action, load = chosen
            loads[load.verifier_id] = load
            if admission_request.tenant in room:
                room[admission_request.tenant] -= 1
            actions.append(action)
    return actions


def choose_verifier(
    loads: Collection[VerifierLoad], admission_request: AdmissionRequest, now: float
) -> tuple[AdmitRequest, VerifierLoad] | None:
    """Choose the verifier for the session of a request. Return the decision and the load that the
    verifier then has, or None if the session fits on no verifier.

    The chosen verifier has the smallest fraction of its KV cache reserved; ties are broken by
    fewest sessions, then by id. If the session fits only by preemption, sessions of lower priority
    do not count as reserved.
    """
    able = [load for load in loads if load.fits_now(admission_request, now)]
    priority, preempts = MIN_PRIORITY, not able
    if preempts:
        able = [load for load in loads if load.fits_by_preempting(admission_request, now)]
        priority = admission_request.priority

    def share(load: VerifierLoad) -> tuple[float, int, VerifierId]:
        held = load.from_priority(priority).tokens + load.others_tokens
        return held / load.total_tokens, load.sessions, load.verifier_id

    chosen = min(able, key=share, default=None)
    if chosen is None:
        return None
    admit = AdmitRequest(admission_request.request_id, chosen.verifier_id, preempts)
    return admit, chosen.with_session(admission_request)


def next_change_at(state: AdmissionState, now: float) -> float | None:
    """Return the clock time in seconds at which `plan_admission` must run again even if nothing
    else happens, or None if there is no such time. It is the next deadline, the next end of a
    waiting time, or the next time at which a verifier gets sessions again.
    """
    ends = [end for ticket in state.queue for end in (ticket.deadline, ticket.waits_until)]
    times = [end for end in ends if end is not None]
    if state.queue:
        times += [load.not_before for load in state.verifiers]
    return min((time for time in times if time > now), default=None)


def no_verifier_error() -> UnavailableError:
    """Return the error for a request that arrives while no verifier is healthy."""
    return UnavailableError(
        "no verifier is ready; try again later", reason=NO_VERIFIER, retry_after_s=1.0
    )
