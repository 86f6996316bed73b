"""Readiness of a router: whether it can serve requests, and the listeners of changes."""

from __future__ import annotations

from collections.abc import Callable


class Readiness:
    """Whether a router can serve requests, and the listeners of changes. A router is ready while a
    verifier is healthy and no drain has begun.
    """

    def __init__(self) -> None:
        self._is_ready = False
        self._listeners: list[Callable[[bool], None]] = []

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served."""
        return self._is_ready

    def subscribe(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` with the new state at each later change."""
        self._listeners.append(listener)

    def update(self, is_ready: bool) -> None:
        """Set the state and notify the listeners if it changed."""
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            for listener in self._listeners:
                listener(is_ready)
