"""Resumable answers: output that a client can resume reading after a broken connection.

The task of a resumable request writes to its client directly, while the task of the client's call
only waits. So a message needs no more event loop iterations than a message of other requests, and
the pacer measures when messages are sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from outrider.errors import (
    AbortedError,
    CancelledRequestError,
    InternalError,
    InvalidRequestError,
    OutriderError,
)
from outrider.ids import RequestId
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateResult,
    PromptInfo,
    StreamEvent,
    StreamPosition,
)
from outrider_router.requests.parsed_answer import EventWriter
from outrider_router.requests.running_requests import RequestEntry

logger = logging.getLogger(__name__)


POLL_INTERVAL_S = 0.02
"""Time in seconds between two checks of whether an answer that continues after a restart has
reached its client's position.
"""
MAX_FINISHED_ANSWERS = 4096
"""Largest number of finished answers that are kept for their clients."""
MAX_FINISHED_BYTES = 64 << 20
"""Approximate largest size in bytes of all finished answers that are kept, including texts, token
ids and log-probabilities.
"""
_LOGPROB_BYTES = 100
"""Approximate memory in bytes of one log-probability with its token id."""


class _AnswerListener:
    """A client's call that receives an answer."""

    __slots__ = ("error", "live", "over", "write")

    def __init__(self, write: EventWriter) -> None:
        self.write = write
        self.live = False
        """Whether the request's task writes new messages to this call. Before that, the call sends
        the earlier output itself.
        """
        self.error: OutriderError | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: OutriderError | None = None) -> None:
        """End the call, with an error if one is given. Only the first error counts."""
        self.error = self.error or error
        if not self.over.done():
            self.over.set_result(None)


class ResumableAnswer:
    """Output of a resumable request so far, and the client call that listens to it."""

    def __init__(self, entry: RequestEntry, *, grace_s: float, may_lag: bool = False) -> None:
        """Create an empty answer. The request is cancelled after `grace_s` seconds without a client
        that listens.
        """
        self.entry = entry
        self.info: PromptInfo | None = None
        self.finish: FinishInfo | None = None
        self.error: OutriderError | None = None
        self.over = False
        self.tokens = 0
        """Number of token ids in the answer. The output of the entry may have more."""
        self.characters = 0
        """Number of characters that were added to the answer."""
        self.may_lag = may_lag
        """Whether a client may have received more of the output than this router has. The log may
        lack the last tokens, but the request generates the same ones again, because its text
        depends only on prompt and seed.
        """
        self._text: list[str] = []
        self._grace_s = grace_s
        self._timer: asyncio.TimerHandle | None = None
        self._listener: _AnswerListener | None = None
        self._task: asyncio.Task[None] | None = None
        self._telling = False

    @property
    def text(self) -> str:
        """Text of the answer so far."""
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return self._text[0] if self._text else ""

    @property
    def size_bytes(self) -> int:
        """Approximate memory size in bytes."""
        output = self.entry.output
        # All tokens have the same number of log-probabilities.
        told = len(output.logprobs) * (1 + len(output.logprobs[0].top)) if output.logprobs else 0
        ids = len(output.token_ids) + (len(self.info.prompt_token_ids) if self.info else 0)
        return 8 * ids + self.characters + _LOGPROB_BYTES * told

    def result(self) -> GenerateResult:
        """Return the complete answer. The request must have finished without an error."""
        assert self.info is not None and self.finish is not None, "it ended without an error"
        return GenerateResult(
            request_id=self.info.request_id,
            model=self.info.model,
            text=self.text,
            token_ids=tuple(self.entry.output.token_ids[: self.tokens]),
            finish=self.finish,
            logprobs=tuple(self.entry.output.logprobs[: self.tokens]),
            prompt_token_ids=self.info.prompt_token_ids,
        )

    async def add_event(self, event: StreamEvent) -> None:
        """Store a message of the request and send it to the client. Called only by the request's
        task.
        """
        self.store_event(event)
        listener = self._listener
        if listener is not None and listener.live:
            await self._tell(listener, event)

    def store_event(self, event: StreamEvent) -> None:
        """Store a message without sending it."""
        match event:
            case Delta():
                self.tokens += len(event.token_ids)
                self.characters += len(event.text)
                self._text.append(event.text)
            case FinishInfo():
                self.finish = event
            case PromptInfo():
                self.info = event

    def finish_answer(self, error: OutriderError | None) -> None:
        """Record the end of the request and end the client's call. Called only by the request's
        task.
        """
        self.over = True
        self.error = error
        # The answer outlives its task; a reference to the task would keep its frames in memory.
        self._task = None
        self.cancel_timer()
        if self._listener is not None:
            self._listener.end()

    async def stream_from(self, position: StreamPosition, write: EventWriter) -> None:
        """Send a client all messages from a position to the end. Called by the task of the client's
        call.

        A client that listened before gets AbortedError (TAKEN_OVER). Raises the request's error,
        and InvalidRequestError (INVALID_POSITION) for a position that the answer has not reached.
        Cancelling this call does not affect the request.
        """
        self._check(position)
        listener = _AnswerListener(write)
        self._replace(listener)
        try:
            await self._reach(position)
            await self._catch_up(listener, position)
            if not self.over:
                await listener.over
            if listener.error is not None:
                raise listener.error
            if self.error is not None:
                raise self.error.copy()
        finally:
            self._leave(listener)

    def start_task(self, events: Coroutine[object, None, None]) -> asyncio.Task[None]:
        """Start `events` as the task that reads the request's messages. A client must listen within
        the grace time, which starts now.
        """
        self._task = asyncio.create_task(events, name="resumable-request")
        self._wait_for_listener()
        return self._task

    def cancel_timer(self) -> None:
        """Cancel the timer that ends the request if no client listens."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def interrupt(self, error: OutriderError) -> None:
        """If the request's task is waiting for a client that reads slowly, end that client's call
        with `error`. The task can then continue.
        """
        listener = self._listener
        if self._telling and listener is not None:
            self._listener = None
            self._stop_telling()
            listener.end(error.copy())

    async def _reach(self, position: StreamPosition) -> None:
        """Wait, after a restart, until the answer has reached a client's position again."""
        while not self._check(position):
            await asyncio.sleep(POLL_INTERVAL_S)

    def _check(self, position: StreamPosition) -> bool:
        """Return whether the answer has reached a position. Raises InvalidRequestError if it never
        will.
        """
        if position.tokens <= self.tokens and position.characters <= self.characters:
            return True
        known = len(self.entry.output.token_ids)
        comes = self.tokens < known and position.tokens <= known
        if self.over or not (comes or self.may_lag):
            raise InvalidRequestError(
                f"request {position.request_id!r} has sent {self.tokens} tokens and "
                f"{self.characters} characters, not {position.tokens} and {position.characters}",
                reason="INVALID_POSITION",
            )
        return False

    async def _catch_up(self, listener: _AnswerListener, position: StreamPosition) -> None:
        tokens, characters = position.tokens, position.characters
        if self.info is not None and tokens == characters == 0:
            await listener.write(self.info)
        while (tokens, characters) != (self.tokens, self.characters) and listener.error is None:
            delta = Delta(
                text=self.text[characters:],
                token_ids=tuple(self.entry.output.token_ids[tokens : self.tokens]),
                logprobs=tuple(self.entry.output.logprobs[tokens : self.tokens]),
            )
            tokens, characters = self.tokens, self.characters
            await listener.write(delta)
        # No await since the last comparison, so that no message is lost or sent twice.
        listener.live = True
        if self.finish is not None and listener.error is None:
            await listener.write(self.finish)

    async def _tell(self, listener: _AnswerListener, event: StreamEvent) -> None:
        self._telling = True
        try:
            await listener.write(event)
        except asyncio.CancelledError:
            if self._listener is listener or self._task is None:
                raise
            # The listener has left, but the request continues.
            self._task.uncancel()
        except Exception as error:
            logger.debug("client disconnected", exc_info=error)
            listener.end(InternalError("the message could not be sent", reason="NOT_SENT"))
            self._leave(listener)
        finally:
            self._telling = False

    def _replace(self, listener: _AnswerListener) -> None:
        previous, self._listener = self._listener, listener
        self.cancel_timer()
        if previous is not None:
            self._stop_telling()
            previous.end(
                AbortedError(
                    f"the stream of request {self.entry.request_id!r} was resumed by another call",
                    reason="TAKEN_OVER",
                )
            )

    def _leave(self, listener: _AnswerListener) -> None:
        if self._listener is listener:
            self._listener = None
            self._stop_telling()
            self._wait_for_listener()

    def _stop_telling(self) -> None:
        """Let the request's task continue although its write to the client has not finished."""
        if self._telling and self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _wait_for_listener(self) -> None:
        if not self.over and self._timer is None:
            error = CancelledRequestError(
                "the client did not resume the stream in time", reason="ABANDONED"
            )
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._grace_s, self.entry.fail_request, error)


class AnswerStore:
    """Resumable answers of one router: all running ones, and recently finished ones."""

    def __init__(
        self,
        *,
        grace_s: float,
        on_forgotten: Callable[[RequestEntry], None],
        max_kept: int = MAX_FINISHED_ANSWERS,
        max_kept_bytes: int = MAX_FINISHED_BYTES,
    ) -> None:
        """Create an empty store. A finished answer is kept for `grace_s` seconds. `on_forgotten` is
        called with the entry of each answer that is removed.
        """
        self._grace_s = grace_s
        self._on_forgotten = on_forgotten
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._answers: dict[RequestId, ResumableAnswer] = {}
        self._kept: dict[ResumableAnswer, asyncio.TimerHandle] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get_answer(self, request_id: RequestId) -> ResumableAnswer | None:
        """Return the answer of a request that is running or finished recently, or None."""
        return self._answers.get(request_id)

    def add_answer(self, entry: RequestEntry, *, may_lag: bool = False) -> ResumableAnswer:
        """Create the answer of a request, and remove a finished answer with the same id. `may_lag`
        is described at `ResumableAnswer.may_lag`.
        """
        previous = self._answers.get(entry.request_id)
        if previous is not None:
            self._forget(previous)
        answer = ResumableAnswer(entry, grace_s=self._grace_s, may_lag=may_lag)
        self._answers[entry.request_id] = answer
        return answer

    def keep_finished(self, answer: ResumableAnswer, for_s: float | None = None) -> None:
        """Keep a finished answer for `for_s` seconds, by default the grace time. The oldest answers
        are removed if there are too many.
        """
        loop = asyncio.get_running_loop()
        seconds = self._grace_s if for_s is None else for_s
        self._kept[answer] = loop.call_later(seconds, self._forget, answer)
        self._kept_bytes += answer.size_bytes
        while len(self._kept) > self._max_kept or self._kept_bytes > self._max_kept_bytes:
            self._forget(next(iter(self._kept)))

    def drop_answer(self, answer: ResumableAnswer) -> None:
        """Remove a finished answer that no client will ask for."""
        self._forget(answer)

    def clear(self) -> None:
        """Remove all answers."""
        for timer in self._kept.values():
            timer.cancel()
        for answer in self._answers.values():
            answer.cancel_timer()
        self._answers.clear()
        self._kept.clear()

    def _forget(self, answer: ResumableAnswer) -> None:
        timer = self._kept.pop(answer, None)
        if timer is not None:
            timer.cancel()
            self._kept_bytes -= answer.size_bytes
        if self._answers.get(answer.entry.request_id) is answer:
            del self._answers[answer.entry.request_id]
        self._on_forgotten(answer.entry)
