"""Registry of the running requests and their emitted tokens, from which a failover resumes.

It is in memory; the durable log of `--journal` is `durable_log`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

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

UNBOUNDED_TOKENS: Final = MAX_VOCAB_SIZE
"""Token limit of a request whose own limit is not known yet: more than any request may emit."""


def _release_nothing() -> None:
    """Release nothing, for a request that holds no place of its caller's key."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEntry:
    """State of one request from its arrival to its last message."""

    request_id: RequestId
    arrived_at: float
    """Clock time of the arrival, in seconds."""
    caller: Caller = ANONYMOUS
    """Caller of the request. Only callers of its tenant may resume or abort it."""
    release: Callable[[], None] = _release_nothing
    """Releases the place that the request takes among those of its caller's API key."""
    group: RequestGroup | None = None
    """Requests of the same call, admitted to the queue together or not at all; None: there is no
    other one."""
    deadline: float | None = None
    """Clock time at which the request ends with an error, in seconds; None: it has no deadline."""
    emitted: list[int] = field(default_factory=list)
    """Token ids that the verifier committed, in order; appended to as they arrive."""
    top_logprobs: int | None = None
    """Number of most probable ids that come with each token; None: no log-probabilities come."""
    max_new_tokens: int = UNBOUNDED_TOKENS
    """Maximum number of tokens that the request may emit."""
    vocab_size: int = MAX_VOCAB_SIZE
    """Vocabulary size of its verifier: all token ids are below this."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of each token of `emitted`, if the request asked for them."""
    log_number: int = 0
    """Number of the request in the durable log; 0: it is not logged."""
    epoch: int = 0
    """Epoch of the newest session; a session that replaces a lost one has a higher epoch."""
    first_token: float | None = None
    """Clock time of the first token, in seconds."""
    last_token: float = 0.0
    """Clock time of the newest token, in seconds."""
    verifier_id: VerifierId | None = None
    prompt_tokens: int = 0
    method: DraftMethod | None = None
    """Draft method of its drafter; None: it needs no drafter."""
    drafter_id: DrafterId | None = None
    """Drafter chosen for the session, or the one that the verifier last reported; None: none."""
    moving_to: DrafterId | None = None
    """Drafter of a requested move that the verifier has not answered yet."""
    move_asked_at: float = -math.inf
    """Clock time of the last requested move, in seconds."""
    refused_moves: int = 0
    """Number of requested moves that the verifier did not carry out."""
    move: Callable[[DrafterId | None], None] | None = None
    """Asks the verifier to move the session to another drafter, or to none; None: no session."""
    drafter_attached: bool = False
    """Whether a drafter is attached, by the session's newest event."""
    counters: SpecCounters = field(default_factory=SpecCounters)
    """Speculation counters."""
    span: RequestSpan = NO_SPAN
    """Trace span of the request."""
    session_id: SessionId | None = None
    """Id of the newest session."""
    end_error: OutriderError | None = None
    """Error with which the request must end, although its verifier has not ended it."""
    on_fail: Callable[[OutriderError], None] | None = None
    """Wakes the request's task wherever it waits, with the error of `fail_request`."""
    on_ended: Callable[[OutriderError], None] | None = None
    """Called with the same error after `on_fail`; stops a write to a client that does not read."""

    def accepts(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bool:
        """Return whether these are valid next tokens of the request: not too many, inside the
        vocabulary, and with the log-probabilities that were asked for."""
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
        """Return the ids that the request's log lines have in all processes."""
        ids = {"request_id": str(self.request_id)}
        if self.session_id is not None:
            ids["session_id"] = self.session_id
        if self.span.is_sampled:
            ids["trace_id"] = self.span.trace_id
        return ids

    def leave_session(self) -> None:
        """Clear the fields of the session, which has ended or was not opened."""
        self.on_fail = self.verifier_id = self.drafter_id = None
        self.move = self.moving_to = self.method = None
        self.refused_moves = 0

    def fail_request(self, error: OutriderError) -> None:
        """End the request with `error`, wherever it is. Only the first call has an effect."""
        if self.end_error is not None:
            return
        self.end_error = error
        if self.on_fail is not None:
            self.on_fail(error)
        if self.on_ended is not None:
            self.on_ended(error)


class RunningRequests:
    """Registry of all running requests of one router, in memory."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, RequestEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestEntry]:
        return iter(list(self._entries.values()))

    def get_entry(self, request_id: RequestId) -> RequestEntry | None:
        """Return the entry of a running request; None if it is not running."""
        return self._entries.get(request_id)

    def num_emitted(self, request_id: RequestId) -> int:
        """Return the number of tokens that a request has emitted; 0 if it is not running."""
        entry = self._entries.get(request_id)
        return len(entry.emitted) if entry is not None else 0

    def open_entry(
        self, request_id: RequestId, now: float, caller: Caller = ANONYMOUS
    ) -> RequestEntry:
        """Add and return a new entry. Raises AlreadyExistsError if a request of this id is
        running."""
        if request_id in self._entries:
            raise AlreadyExistsError(
                f"request {request_id!r} is running already", reason="REQUEST_EXISTS"
            )
        entry = RequestEntry(request_id=request_id, arrived_at=now, caller=caller)
        self._entries[request_id] = entry
        return entry

    def close_entry(self, entry: RequestEntry) -> None:
        """Remove the entry of a request that has ended."""
        if self._entries.get(entry.request_id) is entry:
            del self._entries[entry.request_id]

    def sessions_by_drafter(self) -> dict[DrafterId, int]:
        """Return the number of running sessions by drafter; a requested move counts as done."""
        counts: dict[DrafterId, int] = {}
        for entry in self._entries.values():
            drafter_id = entry.moving_to or entry.drafter_id
            if drafter_id is not None:
                counts[drafter_id] = counts.get(drafter_id, 0) + 1
        return counts


async def run_unless_ended(entry: RequestEntry, making: Awaitable[MadeT]) -> MadeT:
    """Return the result of `making`. If the request fails meanwhile, cancel it and raise the
    request's error at once: tokenizing a long prompt takes long."""
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
