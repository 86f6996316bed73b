"""Collects the messages of one response stream. Both clients use it."""

from __future__ import annotations

from outrider.errors import CancelledRequestError, InternalError, OutriderError
from outrider.ids import RequestId
from outrider.spec.tools import ToolCallDelta, join_call_deltas
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    GenerateResult,
    PromptInfo,
    StreamEvent,
    StreamPosition,
    TokenLogprobs,
)


class CollectedStream:
    """The messages received so far of one response stream."""

    def __init__(self) -> None:
        self.info: PromptInfo | None = None
        self.finish: FinishInfo | None = None
        self.problem: OutriderError | None = None
        """Error that ended the stream before its last message; None if there was none."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[ToolCallDelta] = []
        self._characters = 0

    @property
    def text(self) -> str:
        """Text received so far."""
        return "".join(self._text)

    @property
    def has_tokens(self) -> bool:
        """Whether a part of the answer was received. A request with such a part must not be sent
        again, because the part would be repeated."""
        return bool(self.token_ids or self._text)

    def position(self, request_id: RequestId) -> StreamPosition:
        """Return the position after the last received message, at which the stream must resume."""
        return StreamPosition(
            request_id=request_id, tokens=len(self.token_ids), characters=self._characters
        )

    def add_event(self, event: StreamEvent) -> Delta | None:
        """Add a message. Return it if it is a delta, else None."""
        match event:
            case PromptInfo():
                self.info = event
            case FinishInfo():
                self.finish = event
            case Delta():
                self.token_ids.extend(event.token_ids)
                self.logprobs.extend(event.logprobs)
                self._text.append(event.text)
                self._reasoning.append(event.reasoning)
                self._tool_calls += event.tool_calls
                self._characters = event.characters or self._characters + len(event.text)
                return event
        return None

    def fail(self, error: OutriderError) -> None:
        """Record the error that ended the stream. Only the first recorded error counts."""
        self.problem = self.problem or error

    def result(self) -> GenerateResult:
        """Return the complete answer. Raises the recorded error if the stream failed, and
        InternalError if it ended without its last message."""
        if self.problem is not None:
            raise self.problem
        if self.info is None or self.finish is None:
            raise InternalError("the stream ended without its final message", reason="BAD_RESPONSE")
        return GenerateResult(
            request_id=self.info.request_id,
            model=self.info.model,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish=self.finish,
            logprobs=tuple(self.logprobs),
            prompt_token_ids=self.info.prompt_token_ids,
            reasoning="".join(self._reasoning),
            tool_calls=join_call_deltas(self._tool_calls),
        )


def left_error() -> CancelledRequestError:
    """Return the error of a stream that its reader closed before the end."""
    return CancelledRequestError("the stream was closed before its end", reason="STREAM_CLOSED")
