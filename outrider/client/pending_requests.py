"""Keeps the resumable requests whose answers a client still waits for.

If the connection of such a request ends, the router keeps the request for a while. The client
therefore tells the router which requests it will not resume.
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
    """Resumable requests of one client that have no complete answer yet. Thread-safe. Requests
    whose streams were garbage-collected are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: WeakKeyDictionary[RequestAttempts, tuple[RequestId, Metadata]] = (
            WeakKeyDictionary()
        )

    def add_request(
        self, attempts: RequestAttempts, request: GenerateRequest, metadata: Metadata
    ) -> None:
        """Add a request that is sent with `metadata`. Requests that are not resumable are ignored,
        because they end when their calls end."""
        if request.resumable and request.request_id is not None:
            with self._lock:
                self._asked[attempts] = (request.request_id, metadata)

    def remove_request(self, attempts: RequestAttempts) -> Mapping[Metadata, list[RequestId]]:
        """Remove a request whose answer is complete or no longer needed. Return a mapping from its
        metadata to a list with its id; the mapping is empty if the request is not pending."""
        with self._lock:
            asked = self._asked.pop(attempts, None)
        return {} if asked is None else {asked[1]: [asked[0]]}

    def take_all(self) -> Mapping[Metadata, list[RequestId]]:
        """Remove all pending requests. Return their ids, grouped by the metadata of the
        requests."""
        left: dict[Metadata, list[RequestId]] = {}
        with self._lock:
            for request_id, metadata in list(self._asked.values()):
                left.setdefault(metadata, []).append(request_id)
            self._asked.clear()
        return left
