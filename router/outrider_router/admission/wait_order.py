"""Order of the waiting requests, and the choice of one to displace from a full queue. Pure."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from outrider.ids import RequestId, TenantId
from outrider_router.base.tenants import SHARED_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """A request that waits for capacity on a verifier."""

    request_id: RequestId
    kv_tokens: int
    """Tokens of KV that the session may need at most."""
    prompt_tokens: int = 0
    """Those of them that it needs from the beginning."""
    max_new_tokens: int = 0
    """Those of them that it may emit."""
    sequence: int
    """Order of arrival; a admission request that is queued again keeps it."""
    priority: int = 0
    """Greater goes first, and may displace and preempt lesser ones."""
    deadline: float | None = None
    """Clock time after which waiting is pointless, seconds."""
    waits_until: float | None = None
    """Clock time until which it waits although no verifier can ever serve it, seconds: one may
    come back. None: not at all."""
    tenant: TenantId = SHARED_TENANT
    arrived_at: float = 0.0
    """Clock time of its arrival, seconds."""
    virtual_start: float = 0.0
    """Virtual time of its turn among those of its priority."""
    expected_tokens: int = 0
    """Tokens of KV that it is expected to hold at its end; 0: `kv_tokens`."""
    is_client_named: bool = False
    """Whether its client chose its id, by which it is known when it comes back."""
    was_assigned: bool = False
    """Whether it was placed before: it is not refused for want of room in the queue."""

    @property
    def counted_tokens(self) -> int:
        """Tokens of KV that count against a verifier's room."""
        return self.expected_tokens or self.kv_tokens


_turn = attrgetter("virtual_start", "sequence")


def admission_order(
    queue: Iterable[AdmissionRequest], now: float, aging_s: float
) -> Iterator[AdmissionRequest]:
    """Those that wait, first to last: by priority, then by turn.

    Of each priority only the next one ages: every `priority_aging_s` that it has waited count as
    one level of priority. So those of a priority keep their fair order, and none of them waits for
    ever. `priority_aging_s` 0: nobody ages.
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
    """Who leaves a full queue for `newcomer`; None: nobody, it is refused itself.

    Of the lowest priority, of the tenant that has most waiting for its weight, the last one. At
    the newcomer's own priority only if its tenant would still have less waiting than that one.
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
