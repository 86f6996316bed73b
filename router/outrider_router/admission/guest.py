"""A request in the router's queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from outrider.errors import OutriderError
from outrider_router.admission.capacity_ledger import Lease
from outrider_router.admission.wait_order import Ticket
from outrider_router.base.tenants import Tenant


@dataclass(slots=True, kw_only=True, eq=False)
class Guest:
    """A request between its arrival and `leave`."""

    ticket: Ticket
    tenant: Tenant
    charged: int
    """Tokens that its tenant was charged."""
    place: asyncio.Future[Lease] | None = None
    """While it waits."""
    leases: list[Lease] = field(default_factory=list)
    """Its places: one, or two while it leaves one for the other."""
    placed_at: float | None = None
    """Clock time at which it was placed first, seconds."""

    @property
    def pending(self) -> bool:
        """Whether it waits and nothing was decided."""
        return self.place is not None and not self.place.done()

    @property
    def problem(self) -> OutriderError | None:
        """Why it gets no place, where that was decided."""
        if self.place is None or not self.place.done() or self.place.cancelled():
            return None
        found = self.place.exception()
        return found if isinstance(found, OutriderError) else None
