"""A request in the router's queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from outrider.errors import OutriderError
from outrider_router.admission.capacity_ledger import CapacityReservation
from outrider_router.admission.wait_order import AdmissionRequest
from outrider_router.base.tenants import Tenant


@dataclass(slots=True, kw_only=True, eq=False)
class QueueEntry:
    """A request between its arrival and `leave`."""

    admission_request: AdmissionRequest
    tenant: Tenant
    charged: int
    """Tokens that its tenant was charged."""
    lease_future: asyncio.Future[CapacityReservation] | None = None
    """While it waits."""
    leases: list[CapacityReservation] = field(default_factory=list)
    """Its places: one, or two while it leaves one for the other."""
    placed_at: float | None = None
    """Clock time at which it was placed first, seconds."""

    @property
    def is_pending(self) -> bool:
        """Whether it waits and nothing was decided."""
        return self.lease_future is not None and not self.lease_future.done()

    @property
    def error(self) -> OutriderError | None:
        """Why it gets no place, where that was decided."""
        if (
            self.lease_future is None
            or not self.lease_future.done()
            or self.lease_future.cancelled()
        ):
            return None
        found = self.lease_future.exception()
        return found if isinstance(found, OutriderError) else None
