"""Effects: messages from the engine thread to the asyncio thread; a round's verdicts come first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.logprobs import PathLogprobs
from outrider.errors import OutriderError
from outrider.ids import DrafterId
from outrider.wire.messages import EncodedMessage, VerifierMessage


class SessionEventRow(NamedTuple):
    """Event of one session. Its tokens are in `EventBatch.tokens`."""

    ticket: int
    round_id: int
    num_tokens: int
    reason: int
    """Number of the finish reason as in `REASON_CODES`; 0 if the session continues."""
    flags: int
    """Bitwise or of DRAFTER_ATTACHED, FALLBACK, TARGET_ONLY, LOOKED_AHEAD, HIT and the bits of
    PLANNED."""
    proposed: int
    accepted: int


EVENT_FIELDS: Final = len(SessionEventRow._fields)


@dataclass(slots=True, eq=False)
class EventBatch:
    """Session events that are collected until they are passed to the asyncio thread together."""

    tokens: list[int] = field(default_factory=list)
    """Tokens of all events, concatenated in the order of the events."""
    logprobs: dict[int, PathLogprobs] = field(default_factory=dict)
    """Log-probabilities by index of the event. Sessions that do not request any have no entry."""
    cached_tokens: dict[int, int] = field(default_factory=dict)
    """Numbers of cached prompt tokens (`Session.cached_tokens`) by index of the event. Only first
    events of sessions have an entry, and none if the number is 0."""
    _words: list[int] = field(default_factory=list)
    """Fields of the newest `SessionEventRow`s, concatenated in a flat list. Such a list converts to
    an array faster than a list of tuples."""
    _before: list[NDArray[np.int64]] = field(default_factory=list)
    """Arrays of shape [number of events, fields of `SessionEventRow`], with the events before those
    in `_words`."""

    def __len__(self) -> int:
        return sum(map(len, self._before)) + len(self._words) // EVENT_FIELDS

    def add_event(
        self,
        event: Iterable[int],
        tokens: Sequence[int],
        logprobs: PathLogprobs | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """Add the event of one session. `event` contains the fields of a `SessionEventRow`.

        `logprobs` may cover more tokens than `tokens`; only the entries of `tokens` are kept.
        `cached_tokens` is 0 unless this is the session's first event.
        """
        if logprobs is not None:
            self.logprobs[len(self)] = logprobs.first_tokens(len(tokens))
        if cached_tokens:
            self.cached_tokens[len(self)] = cached_tokens
        self._words.extend(event)
        self.tokens.extend(tokens)

    def add_events(self, events: NDArray[np.int64], tokens: Sequence[int]) -> None:
        """Add n events without log-probabilities, none of which is the first of its session.
        `events` has shape [fields of `SessionEventRow`, n].

        `tokens` contains the tokens of all these events, concatenated in the order of the events.
        """
        self._seal()
        self._before.append(events.T)
        self.tokens.extend(tokens)

    def columns(self) -> NDArray[np.int64]:
        """Return all n events as an array of shape [fields of `SessionEventRow`, n]."""
        self._seal()
        if len(self._before) != 1:
            self._before = [np.concatenate([np.empty((0, EVENT_FIELDS), np.int64), *self._before])]
        return self._before[0].T

    @property
    def tickets(self) -> NDArray[np.int64]:
        """Ticket of each event's session, int64 [n]."""
        tickets: NDArray[np.int64] = self.columns()[0]
        return tickets

    @property
    def reasons(self) -> NDArray[np.int64]:
        """Number of the finish reason of each event as in `REASON_CODES`, int64 [n]; 0 if the
        session continues."""
        reasons: NDArray[np.int64] = self.columns()[3]
        return reasons

    def _seal(self) -> None:
        if self._words:
            self._before.append(np.array(self._words, np.int64).reshape(-1, EVENT_FIELDS))
            self._words = []

    def iter_events(self) -> list[SessionEventRow]:
        """Return all events as a list of rows."""
        return list(map(SessionEventRow._make, self.columns().T.tolist()))


@dataclass(frozen=True, slots=True)
class FailSession:
    """Effect that reports to a session's router that the session was ended by an error."""

    ticket: int
    error: OutriderError


@dataclass(frozen=True, slots=True)
class DrafterChanged:
    """Effect that reports to a session's router which drafter the session has after a
    `SetDrafter`."""

    ticket: int
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Effect that sends a message to the drafter on an exchange link."""

    link_id: int
    message: VerifierMessage

    def owned(self) -> SendMessage:
        """Return a copy with memory of its own, which another thread can send after later rounds
        have overwritten the original."""
        message = self.message
        return (
            SendMessage(self.link_id, message.copy_owned())
            if isinstance(message, EncodedMessage)
            else self
        )


@dataclass(frozen=True, slots=True)
class DisconnectDrafter:
    """Effect that ends an exchange link whose drafter sends far more than was requested."""

    link_id: int


@dataclass(frozen=True, slots=True)
class CompleteCommand:
    """Effect that completes the future of a command: with `error`, or with success if `error` is
    None."""

    future: asyncio.Future[None]
    error: OutriderError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """Durations (in seconds) and sizes of one round."""

    total_s: float
    forward_s: float
    accept_s: float
    project_s: float
    """Time of the feature projection (the draft head's `fc`)."""
    draft_s: float = 0.0
    """Time of the in-process drafter."""
    waited_s: float
    """Idle time before the round while a session waited for its proposal."""
    drafted_s: float
    """Part of `waited_s` in which, according to the drafters, they computed the proposals that the
    round used."""
    rows: int
    """Number of token rows of the target's forward pass."""
    verify_rows: int
    """Number of sessions that decoded in the round."""
    prefill_tokens: int
    emitted: int
    hit_idle_s: float | None = None
    """Idle time between the end of the previous round and the submission of this one. None unless
    every decode row of this round verified a hit."""

    @property
    def other_s(self) -> float:
        """Time of the round in which neither a model nor acceptance ran."""
        inside = self.forward_s + self.project_s + self.draft_s + self.accept_s
        # A device's clock and the host's may disagree by a little.
        return max(0.0, self.total_s - inside)

    @property
    def overhead_s(self) -> float:
        """Time in which no model ran, neither the target, nor the feature projection, nor a
        drafter. It includes the wait before the round."""
        models_s = self.forward_s + self.project_s + self.draft_s + self.drafted_s
        return max(0.0, self.total_s + self.waited_s - models_s)


Effect = (
    EventBatch
    | FailSession
    | DrafterChanged
    | SendMessage
    | DisconnectDrafter
    | CompleteCommand
    | RoundReport
)
Post = Callable[[Effect], None]


def messages_by_link(effects: Iterable[Effect]) -> dict[int, list[VerifierMessage]]:
    """Return the messages of all `SendMessage`s in `effects`, grouped by link id and in their
    order."""
    told: dict[int, list[VerifierMessage]] = {}
    for effect in effects:
        if isinstance(effect, SendMessage):
            told.setdefault(effect.link_id, []).append(effect.message)
    return told
