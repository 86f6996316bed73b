"""Request group: requests of one call that are admitted to the queue together or not at all."""

from __future__ import annotations

import asyncio

from outrider.errors import CancelledRequestError, OutriderError
from outrider_router.admission.policy import AdmissionRequest


class RequestGroup:
    """The requests of one call, admitted together or not at all. Use from one event loop."""

    def __init__(self, size: int) -> None:
        """Create an incomplete group that will have `size` requests."""
        self._size = size
        self._admission_requests: list[AdmissionRequest] = []
        self._loop = asyncio.get_running_loop()
        self._entered: asyncio.Future[None] = self._loop.create_future()
        self.inside = self.refused = False
        """Whether the group was admitted (`inside`), and whether it was refused."""

    def add_request(self, admission_request: AdmissionRequest) -> tuple[AdmissionRequest, ...]:
        """Add one request. Return all requests of the group once it is complete, and an empty tuple
        before that or if the group was refused.
        """
        self._admission_requests.append(admission_request)
        complete = len(self._admission_requests) == self._size and not self.refused
        return tuple(self._admission_requests) if complete else ()

    def admit(self) -> None:
        """Mark the whole group as admitted."""
        self.inside = True
        # The last request waits like the others, so that all continue in the order of arrival.
        self._loop.call_soon(self._entered.set_result, None)

    def fail_group(self, error: OutriderError) -> None:
        """Refuse the whole group with an error; has no effect once the group was admitted or
        refused.
        """
        if not self.inside and not self.refused:
            self.refused = True
            self._entered.set_exception(error)
            # Marks the exception as retrieved, because no request may be waiting.
            self._entered.exception()

    def remove_request(self) -> None:
        """Refuse the group because one of its requests ended; has no effect once the group was
        admitted.
        """
        self.fail_group(CancelledRequestError("another request of the same call ended"))

    async def wait_admitted(self) -> None:
        """Wait until the group is admitted. Raises the error for which the group was refused."""
        try:
            # Shielded, so that cancelling one request does not cancel the future of the others.
            await asyncio.shield(self._entered)
        except OutriderError as error:
            raise error.copy() from None
