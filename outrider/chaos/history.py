"""Client history: the events that one client received, in order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.errors import OutriderError
from outrider.wire.inference import Delta, FinishInfo


class StreamResult(StrEnum):
    """How a client's stream ended."""

    FINISHED = "finished"
    FAILED = "failed"
    """The stream ended with an `OutriderError`."""
    LEFT = "left"
    """The client ended the stream: it was killed, cancelled or out of time."""
    CRASHED = "crashed"
    """The stream ended with an error that is not an `OutriderError`."""
    HUNG = "hung"


@dataclass(slots=True, kw_only=True)
class ReceivedEvent:
    """One event that a client received."""

    at: float
    """Seconds since the start of the run."""
    token_ids: tuple[int, ...]
    text: str


@dataclass(slots=True, kw_only=True)
class ClientHistory:
    """History of one client, from its request to its end."""

    number: int
    """Number of the request."""
    began: float = 0.0
    heard: list[ReceivedEvent] = field(default_factory=list)
    finish: FinishInfo | None = None
    end: StreamResult = StreamResult.HUNG
    error: BaseException | None = None
    ended: float = 0.0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All received token ids, in order."""
        return tuple(token for heard in self.heard for token in heard.token_ids)

    @property
    def text(self) -> str:
        """All received text."""
        return "".join(heard.text for heard in self.heard)

    @property
    def gaps(self) -> list[float]:
        """Seconds between received events. The first value is the wait for the first event."""
        times = [self.began, *(heard.at for heard in self.heard)]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def add_delta(self, delta: Delta, at: float) -> None:
        """Record a delta that was received at time `at`."""
        self.heard.append(ReceivedEvent(at=at, token_ids=delta.token_ids, text=delta.text))

    def finished(self, finish: FinishInfo | None, at: float) -> None:
        """Record that the stream ended normally."""
        self.finish, self.ended, self.end = finish, at, StreamResult.FINISHED

    def failed(self, error: BaseException, at: float) -> None:
        """Record that the stream ended with an error."""
        self.error, self.ended = error, at
        self.end = StreamResult.FAILED if isinstance(error, OutriderError) else StreamResult.CRASHED

    def left(self, at: float) -> None:
        """Record that the client ended the stream."""
        self.ended, self.end = at, StreamResult.LEFT

    def __str__(self) -> str:
        error = "" if self.error is None else f": {type(self.error).__name__}: {self.error}"
        return f"request {self.number} {self.end} after {len(self.token_ids)} tokens{error}"
