"""Request group: requests of one call that are admitted to the queue together or not at all."""

from __future__ import annotations

import asyncio

from outrider.errors import CancelledRequestError, OutriderError
from outrider_router.admission.policy import AdmissionRequest


class RequestGroup:
    """The requests of one call, admitted together or not at all. Use from one event loop."""

    def __init__(self, size: int) -> None:
        """`size`: of them."""
        self._size = size
        self._admission_requests: list[AdmissionRequest] = []
        self._loop = asyncio.get_running_loop()
        self._entered: asyncio.Future[None] = self._loop.create_future()
        self.inside = self.refused = False
        """What was decided, if anything was."""

    def add_request(self, admission_request: AdmissionRequest) -> tuple[AdmissionRequest, ...]:
        """Add one request; return all of them once the group is complete, until then none.

        A refused group returns none.
        """
        self._admission_requests.append(admission_request)
        complete = len(self._admission_requests) == self._size and not self.refused
        return tuple(self._admission_requests) if complete else ()

    def admit(self) -> None:
        """Mark the whole group as admitted."""
        self.inside = True
        # The last one waits like the others: they go on in the order in which they came.
        self._loop.call_soon(self._entered.set_result, None)

    def fail_group(self, error: OutriderError) -> None:
        """Refuse the whole group; has no effect once the group was admitted or refused."""
        if not self.inside and not self.refused:
            self.refused = True
            self._entered.set_exception(error)
            # Perhaps nobody waits for it.
            self._entered.exception()

    def remove_request(self) -> None:
        """Remove a request that ended: later ones must not wait for it, nor be admitted with it."""
        self.fail_group(CancelledRequestError("another request of the same call ended"))

    async def wait_admitted(self) -> None:
        """Wait until the group is admitted. Raises the error with which it was refused."""
        try:
            # Whoever leaves does not take it from the others.
            await asyncio.shield(self._entered)
        except OutriderError as error:
            raise error.copy() from None
