"""Resumable requests whose answers a client still waits for.

After an interruption a router keeps such a request for a while, so the client tells the router to
abort the requests that it will not resume.
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
    """The pending resumable requests of one client. Thread-safe. Requests whose streams were
    garbage-collected are dropped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: WeakKeyDictionary[RequestAttempts, tuple[RequestId, Metadata]] = (
            WeakKeyDictionary()
        )

    def add_request(
        self, attempts: RequestAttempts, request: GenerateRequest, metadata: Metadata
    ) -> None:
        """Add a request that is sent with this metadata. Requests that are not resumable are
        ignored, because they end with their calls."""
        if request.resumable and request.request_id is not None:
            with self._lock:
                self._asked[attempts] = (request.request_id, metadata)

    def remove_request(self, attempts: RequestAttempts) -> Mapping[Metadata, list[RequestId]]:
        """Remove a request whose answer is complete or no longer needed. Returns its id by its
        metadata, or an empty mapping if the request is not pending."""
        with self._lock:
            asked = self._asked.pop(attempts, None)
        return {} if asked is None else {asked[1]: [asked[0]]}

    def take_all(self) -> Mapping[Metadata, list[RequestId]]:
        """Remove all pending requests and return their ids, grouped by their metadata."""
        left: dict[Metadata, list[RequestId]] = {}
        with self._lock:
            for request_id, metadata in list(self._asked.values()):
                left.setdefault(metadata, []).append(request_id)
            self._asked.clear()
        return left
