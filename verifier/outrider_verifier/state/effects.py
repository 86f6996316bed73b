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
    """Event of one session without its tokens, which are in `EventBatch.tokens`."""

    ticket: int
    round_id: int
    num_tokens: int
    reason: int
    """Code of the finish reason, 0 if the session continues."""
    flags: int
    """DRAFTER_ATTACHED | FALLBACK | TARGET_ONLY | LOOKED_AHEAD | HIT | flags of PLANNED."""
    proposed: int
    accepted: int


EVENT_FIELDS: Final = len(SessionEventRow._fields)


@dataclass(slots=True, eq=False)
class EventBatch:
    """Batch of session events. Events are added until the batch is handed to the asyncio thread."""

    tokens: list[int] = field(default_factory=list)
    """Tokens of all events, in the order of the events."""
    logprobs: dict[int, PathLogprobs] = field(default_factory=dict)
    """Log-probabilities by index of the event, for sessions that request them."""
    _words: list[int] = field(default_factory=list)
    """Fields of the last `SessionEventRow`s in a flat list, which converts to an array fastest."""
    _before: list[NDArray[np.int64]] = field(default_factory=list)
    """Arrays [n, fields] of the events before those in `_words`."""

    def __len__(self) -> int:
        return sum(map(len, self._before)) + len(self._words) // EVENT_FIELDS

    def add_event(
        self, event: Iterable[int], tokens: Sequence[int], logprobs: PathLogprobs | None = None
    ) -> None:
        """Add the event of one session, given as the fields of a `SessionEventRow`.

        `logprobs` may cover more than `tokens`; only those of `tokens` are kept.
        """
        if logprobs is not None:
            self.logprobs[len(self)] = logprobs.first_tokens(len(tokens))
        self._words.extend(event)
        self.tokens.extend(tokens)

    def add_events(self, events: NDArray[np.int64], tokens: Sequence[int]) -> None:
        """Add n events without log-probabilities, as an array [fields of `SessionEventRow`, n].

        `tokens` holds the tokens of all these events, in the order of the events.
        """
        self._seal()
        self._before.append(events.T)
        self.tokens.extend(tokens)

    def columns(self) -> NDArray[np.int64]:
        """Return all n events as an array [fields of `SessionEventRow`, n]."""
        self._seal()
        if len(self._before) != 1:
            self._before = [np.concatenate([np.empty((0, EVENT_FIELDS), np.int64), *self._before])]
        return self._before[0].T

    @property
    def tickets(self) -> NDArray[np.int64]:
        """Tickets of the events' sessions, [n]."""
        tickets: NDArray[np.int64] = self.columns()[0]
        return tickets

    @property
    def reasons(self) -> NDArray[np.int64]:
        """Codes of the finish reasons as in `REASON_CODES`, [n]; 0 for a session that continues."""
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
    """End the session with this ticket with an error."""

    ticket: int
    error: OutriderError


@dataclass(frozen=True, slots=True)
class DrafterChanged:
    """Tell a session's router the session's drafter after a `SetDrafter`."""

    ticket: int
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message on the exchange link with this id."""

    link_id: int
    message: VerifierMessage

    def owned(self) -> SendMessage:
        """Return a copy whose memory no round overwrites, so that another thread can send it."""
        message = self.message
        return (
            SendMessage(self.link_id, message.copy_owned())
            if isinstance(message, EncodedMessage)
            else self
        )


@dataclass(frozen=True, slots=True)
class DisconnectDrafter:
    """End an exchange link whose drafter sends far more than was requested."""

    link_id: int


@dataclass(frozen=True, slots=True)
class CompleteCommand:
    """Complete the future of a command, with an error or, if `error` is None, with success."""

    future: asyncio.Future[None]
    error: OutriderError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """Timings (seconds) and sizes of one round."""

    total_s: float
    forward_s: float
    accept_s: float
    project_s: float
    """Time of the feature projection (the draft head's `fc`)."""
    draft_s: float = 0.0
    """Time of the in-process drafter."""
    waited_s: float
    """Idle time before the round in which a session waited for its proposal."""
    drafted_s: float
    """Part of `waited_s` that the drafters report as time spent on the proposals that the round
    used."""
    rows: int
    """Token rows of the target's forward."""
    verify_rows: int
    """Sessions that decoded in the round."""
    prefill_tokens: int
    emitted: int
    hit_idle_s: float | None = None
    """Idle time between the end of the previous round and the submission of this one; None unless
    all rows of this one are hits."""

    @property
    def other_s(self) -> float:
        """Time of the round outside the models' forwards and acceptance."""
        inside = self.forward_s + self.project_s + self.draft_s + self.accept_s
        # A device's clock and the host's may disagree by a little.
        return max(0.0, self.total_s - inside)

    @property
    def overhead_s(self) -> float:
        """Time of the round and of the wait before it in which no model ran: neither the target,
        nor the feature projection, nor a drafter."""
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
    """Return the messages of all `SendMessage`s by link id, in order, to send them together."""
    told: dict[int, list[VerifierMessage]] = {}
    for effect in effects:
        if isinstance(effect, SendMessage):
            told.setdefault(effect.link_id, []).append(effect.message)
    return told
