"""The order of those that wait, and who makes way when too many do. Pure."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from outrider.ids import RequestId, TenantId
from outrider_router.base.tenants import SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request that waits for a place."""

    request_id: RequestId
    kv_tokens: int
    """Tokens of KV that the session may need at most."""
    prompt_tokens: int = 0
    """Those of them that it needs from the beginning."""
    max_new_tokens: int = 0
    """Those of them that it may emit."""
    sequence: int
    """Order of arrival; a ticket that is queued again keeps it."""
    priority: int = 0
    """Greater goes first, and may displace and preempt lesser ones."""
    deadline: float | None = None
    """Clock time after which waiting is pointless, seconds."""
    patient_until: float | None = None
    """Clock time until which it waits although no verifier can ever serve it, seconds: one may
    come back. None: not at all."""
    tenant: TenantId = SHARED
    arrived: float = 0.0
    """Clock time of its arrival, seconds."""
    start: float = 0.0
    """Virtual time of its turn among those of its priority."""
    expected_tokens: int = 0
    """Tokens of KV that it is expected to hold at its end; 0: `kv_tokens`."""
    returns: bool = False
    """Whether its client chose its id, by which it is known when it comes back."""
    served: bool = False
    """Whether it was placed before: it is not refused for want of room in the queue."""

    @property
    def tokens(self) -> int:
        """Tokens of KV that count against a verifier's room."""
        return self.expected_tokens or self.kv_tokens


_turn = attrgetter("start", "sequence")


def in_order(queue: Iterable[Ticket], now: float, aging_s: float) -> Iterator[Ticket]:
    """Those that wait, first to last: by priority, then by turn.

    Of each priority only the next one ages: every `aging_s` that it has waited count as one level
    of priority. So those of a priority keep their fair order, and none of them waits for ever.
    `aging_s` 0: nobody ages.
    """
    classes: dict[int, list[Ticket]] = {}
    for ticket in queue:
        classes.setdefault(ticket.priority, []).append(ticket)

    def claim(ticket: Ticket) -> float:
        aged = (now - ticket.arrived) / aging_s if aging_s else 0.0
        return -(ticket.priority + max(0.0, aged))

    heads = []
    for priority, tickets in classes.items():
        tickets.sort(key=_turn, reverse=True)
        first = tickets.pop()
        heads.append((claim(first), -priority, first.sequence, first, tickets))
    heapq.heapify(heads)
    while heads:
        _, lower, _, first, tickets = heads[0]
        yield first
        if tickets:
            following = tickets.pop()
            entry = claim(following), lower, following.sequence, following, tickets
            heapq.heapreplace(heads, entry)
        else:
            heapq.heappop(heads)


def who_makes_way(
    queue: Sequence[Ticket], newcomer: Ticket, weights: Mapping[TenantId, float]
) -> Ticket | None:
    """Who leaves a full queue for `newcomer`; None: nobody, it is refused itself.

    Of the lowest priority, of the tenant that has most waiting for its weight, the last one. At
    the newcomer's own priority only if its tenant would still have less waiting than that one.
    """
    able = [ticket for ticket in queue if not ticket.served]
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
