"""Resumable requests whose answers a client still waits for.

A router keeps an interrupted answer for a while, so it is told of requests that nobody will resume.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from outrider.client.attempts import RequestAttempts
from outrider.client.rpcs import Metadata
from outrider.ids import RequestId
from outrider.wire.inference import GenerateRequest


class PendingRequests:
    """Pending resumable requests of one client. Thread-safe; forgets dropped streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: WeakKeyDictionary[RequestAttempts, tuple[RequestId, Metadata]] = (
            WeakKeyDictionary()
        )

    def add_request(
        self, attempts: RequestAttempts, request: GenerateRequest, metadata: Metadata
    ) -> None:
        """A request is sent, with this metadata; one that is not resumable ends with its call."""
        if request.resumable and request.request_id is not None:
            with self._lock:
                self._asked[attempts] = (request.request_id, metadata)

    def remove_request(self, attempts: RequestAttempts) -> Mapping[Metadata, list[RequestId]]:
        """Its answer is whole, or nobody wants it any more. What `take` would say of it alone."""
        with self._lock:
            asked = self._asked.pop(attempts, None)
        return {} if asked is None else {asked[1]: [asked[0]]}

    def take_all(self) -> Mapping[Metadata, list[RequestId]]:
        """All that are left, by what went with them; none is kept."""
        left: dict[Metadata, list[RequestId]] = {}
        with self._lock:
            for request_id, metadata in list(self._asked.values()):
                left.setdefault(metadata, []).append(request_id)
            self._asked.clear()
        return left
