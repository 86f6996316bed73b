"""Journal of the running requests and their emitted tokens, from which a failover resumes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from outrider.errors import AlreadyExistsError, OutriderError
from outrider.ids import DrafterId, RequestId, SessionId, VerifierId
from outrider.spans import NO_SPAN, RequestSpan
from outrider.spec.plan import DraftMethod
from outrider.wire.limits import MAX_VOCAB_SIZE
from outrider.wire.logprobs import TokenLogprobs
from outrider_router.admission.request_group import RequestGroup
from outrider_router.base.api_keys import ANONYMOUS, Caller
from outrider_router.requests.spec_counters import SpecCounters

MadeT = TypeVar("MadeT")


def _nothing() -> None:
    """It holds nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class JournalEntry:
    """One request from its arrival to its last message."""

    request_id: RequestId
    arrived_at: float
    """Clock time of arrival, seconds."""
    caller: Caller = ANONYMOUS
    """Who asked; others of its tenant may go on with it and abort it, nobody else."""
    release: Callable[[], None] = _nothing
    """Gives back the place that its caller's key has for it."""
    group: RequestGroup | None = None
    """With whom it is let into the queue, or not at all; None: it came alone."""
    deadline: float | None = None
    """Clock time at which it ends with an error, seconds."""
    emitted: list[int] = field(default_factory=list)
    """Ids that the verifier committed, in order; appended to where they arrive."""
    top_logprobs: int | None = None
    """Most probable ids that come with each of them; None: they come without log-probabilities."""
    max_new_tokens: int = MAX_VOCAB_SIZE
    """Ids that it may emit at most."""
    vocab_size: int = MAX_VOCAB_SIZE
    """Ids of the verifier that serves it are below this."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each of `emitted`, where they are asked for."""
    number: int = 0
    """Its number in the durable log; 0: it is not in there."""
    epoch: int = 0
    first_token: float | None = None
    """Clock time of the first token, seconds."""
    last_token: float = 0.0
    """Clock time of the newest token, seconds."""
    verifier_id: VerifierId | None = None
    prompt_tokens: int = 0
    method: DraftMethod | None = None
    """How a drafter is to draft for it; None: it needs none."""
    drafter_id: DrafterId | None = None
    """Who drafts for it, as far as the verifier has said."""
    moving_to: DrafterId | None = None
    """Who is to, while the verifier has not said whether it could be done."""
    move_asked_at: float = -math.inf
    """Clock time of the last wish, seconds."""
    refused_moves: int = 0
    """How often it could not be done."""
    move: Callable[[DrafterId | None], None] | None = None
    """Asks the verifier for another drafter, or for none, while there is a session."""
    drafter_attached: bool = False
    """What the session's newest event said."""
    counters: SpecCounters = field(default_factory=SpecCounters)
    """Speculation counters."""
    span: RequestSpan = NO_SPAN
    """What is traced of it."""
    session_id: SessionId | None = None
    """Its newest session."""
    end_error: OutriderError | None = None
    """Why the request must end although its verifier said nothing of the kind."""
    on_fail: Callable[[OutriderError], None] | None = None
    """Wakes the request, wherever it waits."""
    on_ended: Callable[[OutriderError], None] | None = None
    """Hears of the same; has the request wait no more for a client that takes nothing."""

    def accepts(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        """Whether a verifier may say these ids of it next, with these log-probabilities: no more
        than the request may have, of the vocabulary, and what is asked for beside them."""
        count, top, vocab_size = len(ids), self.top_logprobs, self.vocab_size
        if count:
            if len(self.emitted) + count > self.max_new_tokens:
                return False
            if max(ids) >= vocab_size or min(ids) < 0:
                return False
        if top is None:
            return not logprobs
        return len(logprobs) == count and all(
            len(entry.top) == top and all(0 <= token < vocab_size for token, _ in entry.top)
            for entry in logprobs
        )

    @property
    def log_ids(self) -> dict[str, str]:
        """What its lines in the log are found by, here and in the other processes."""
        ids = {"request_id": str(self.request_id)}
        if self.session_id is not None:
            ids["session_id"] = self.session_id
        if self.span.is_sampled:
            ids["trace_id"] = self.span.trace_id
        return ids

    def leave_session(self) -> None:
        """Its session is over, or has not begun."""
        self.on_fail = self.verifier_id = self.drafter_id = None
        self.move = self.moving_to = self.method = None
        self.refused_moves = 0

    def fail_request(self, error: OutriderError) -> None:
        """End the request with `error`, wherever it is; the first error counts."""
        if self.end_error is not None:
            return
        self.end_error = error
        if self.on_fail is not None:
            self.on_fail(error)
        if self.on_ended is not None:
            self.on_ended(error)


class RunningRequests:
    """Journal entries of all running requests of one router."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, JournalEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(list(self._entries.values()))

    def get_entry(self, request_id: RequestId) -> JournalEntry | None:
        """The entry of a running request."""
        return self._entries.get(request_id)

    def num_emitted(self, request_id: RequestId) -> int:
        """Tokens that a request has emitted; 0 for one that is not running."""
        entry = self._entries.get(request_id)
        return len(entry.emitted) if entry is not None else 0

    def open_entry(
        self, request_id: RequestId, now: float, caller: Caller = ANONYMOUS
    ) -> JournalEntry:
        """Start an entry; AlreadyExistsError while another request has this id."""
        if request_id in self._entries:
            raise AlreadyExistsError(
                f"request {request_id!r} is running already", reason="REQUEST_EXISTS"
            )
        entry = JournalEntry(request_id=request_id, arrived_at=now, caller=caller)
        self._entries[request_id] = entry
        return entry

    def close_entry(self, entry: JournalEntry) -> None:
        """Forget a request that is over."""
        if self._entries.get(entry.request_id) is entry:
            del self._entries[entry.request_id]

    def sessions_by_drafter(self) -> dict[DrafterId, int]:
        """Running sessions by drafter."""
        counts: dict[DrafterId, int] = {}
        for entry in self._entries.values():
            drafter_id = entry.moving_to or entry.drafter_id
            if drafter_id is not None:
                counts[drafter_id] = counts.get(drafter_id, 0) + 1
        return counts


async def run_unless_ended(entry: JournalEntry, making: Awaitable[MadeT]) -> MadeT:
    """What is made for a request; raises its error as soon as it ends. A long prompt takes long."""
    task = asyncio.ensure_future(making)

    def stop(_error: OutriderError) -> None:
        task.cancel()

    entry.on_fail = stop
    try:
        return await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if entry.end_error is None or (current is not None and current.cancelling()):
            raise
        raise entry.end_error from None
    finally:
        entry.on_fail = None
