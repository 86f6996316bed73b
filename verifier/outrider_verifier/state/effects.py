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
    """What a session emits; its tokens are elsewhere."""

    ticket: int
    round_id: int
    num_tokens: int
    reason: int
    """Code of a finish reason, 0: the session goes on."""
    flags: int
    """DRAFTER_ATTACHED | FALLBACK | TARGET_ONLY | LOOKED_AHEAD | HIT | flags of PLANNED."""
    proposed: int
    accepted: int


EVENT_FIELDS: Final = len(SessionEventRow._fields)


@dataclass(slots=True, eq=False)
class EventBatch:
    """Events of sessions; more are added until it is handed over."""

    tokens: list[int] = field(default_factory=list)
    """The tokens, event after event."""
    logprobs: dict[int, PathLogprobs] = field(default_factory=dict)
    """Of the tokens of events whose sessions ask, by their place."""
    _words: list[int] = field(default_factory=list)
    """The fields of each `SessionEventRow`, event after event: of plain numbers an array is made
    fastest."""
    _before: list[NDArray[np.int64]] = field(default_factory=list)
    """[n, fields]: of those before them."""

    def __len__(self) -> int:
        return sum(map(len, self._before)) + len(self._words) // EVENT_FIELDS

    def add_event(
        self, event: Iterable[int], tokens: Sequence[int], logprobs: PathLogprobs | None = None
    ) -> None:
        """Add the event of one session, as the fields of an `SessionEventRow`; `logprobs` may go on
        behind its tokens."""
        if logprobs is not None:
            self.logprobs[len(self)] = logprobs.first_tokens(len(tokens))
        self._words.extend(event)
        self.tokens.extend(tokens)

    def add_events(self, events: NDArray[np.int64], tokens: Sequence[int]) -> None:
        """Add events of sessions that ask for no log-probabilities, [fields of `SessionEventRow`,
        n], with their tokens in turn."""
        self._seal()
        self._before.append(events.T)
        self.tokens.extend(tokens)

    def columns(self) -> NDArray[np.int64]:
        """[fields of `SessionEventRow`, n]."""
        self._seal()
        if len(self._before) != 1:
            self._before = [np.concatenate([np.empty((0, EVENT_FIELDS), np.int64), *self._before])]
        return self._before[0].T

    @property
    def tickets(self) -> NDArray[np.int64]:
        """[n]."""
        tickets: NDArray[np.int64] = self.columns()[0]
        return tickets

    @property
    def reasons(self) -> NDArray[np.int64]:
        """[n] codes of `REASON_CODES`, 0 for a session that goes on."""
        reasons: NDArray[np.int64] = self.columns()[3]
        return reasons

    def _seal(self) -> None:
        if self._words:
            self._before.append(np.array(self._words, np.int64).reshape(-1, EVENT_FIELDS))
            self._words = []

    def iter_events(self) -> list[SessionEventRow]:
        """One by one."""
        return list(map(SessionEventRow._make, self.columns().T.tolist()))


@dataclass(frozen=True, slots=True)
class FailSession:
    """End the session with this ticket by an error."""

    ticket: int
    error: OutriderError


@dataclass(frozen=True, slots=True)
class DrafterChanged:
    """Tell a session's router whose it is after a `SetDrafter`."""

    ticket: int
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message on the exchange link with this number."""

    link_id: int
    message: VerifierMessage

    def owned(self) -> SendMessage:
        """The same in memory that no round writes to, for another thread to send."""
        message = self.message
        return (
            SendMessage(self.link_id, message.copy_owned())
            if isinstance(message, EncodedMessage)
            else self
        )


@dataclass(frozen=True, slots=True)
class DisconnectDrafter:
    """End an exchange link: its drafter sends more than anybody asked for."""

    link_id: int


@dataclass(frozen=True, slots=True)
class CompleteCommand:
    """Settle the future of a command: an error, or None for success."""

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
    """Part of `waited_s` that the drafters report as their own work on the proposals used."""
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
        """Time of the round and of the wait before it that no model used: neither the target, nor
        the feature projection, nor a drafter."""
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
    """The messages of all `SendMessage`s by link, in order: what a round says crosses together."""
    told: dict[int, list[VerifierMessage]] = {}
    for effect in effects:
        if isinstance(effect, SendMessage):
            told.setdefault(effect.link_id, []).append(effect.message)
    return told
