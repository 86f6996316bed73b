"""Writers of completions and chat responses, whole and in stream chunks. Pure.

The constant JSON parts of a chunk are built once per stream. For each chunk, little more than its
text is converted to JSON. This conversion is most of the cost of a token in this module.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outrider.spec.tools import ToolCallDelta, join_call_deltas
from outrider.wire.inference import FinishInfo, TokenLogprobs
from outrider.wire.messages import FinishReason
from outrider_router.api.http.logprobs import (
    TextOffsets,
    TokenTextTable,
    chat_logprobs,
    completion_logprobs,
)
from outrider_router.api.http.usage import metrics_body, sum_stats, total_usage_body

json_quote = json.JSONEncoder(ensure_ascii=False).encode
"""Function that converts a value to JSON text."""
_REASONS = {FinishReason.LENGTH: "length"}


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """State of one choice while it is generated."""

    index: int
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    """Parts of the tool calls of a complete response."""
    has_calls: bool = False
    """Whether the answer has tool calls."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishInfo | None = None
    echo: str = ""
    """Text of the prompt that precedes the output if the request sets `echo`."""
    prompt_ids: Sequence[int] = ()
    """Token ids of the prompt if the request asks for token ids."""
    has_started: bool = False
    """Whether a chunk of the choice was sent."""
    tokens: int = 0
    """Number of token ids that were generated so far."""
    offsets: TextOffsets | None = None
    """Counter of the text offsets of the tokens; None until log-probabilities are written."""


class ResponseWriter(ABC):
    """Base class of the response formats."""

    prefix = ""
    whole_object = ""
    chunk_object = ""

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        n: int,
        texts: TokenTextTable,
        stop_token_ids: Collection[int] = (),
        with_logprobs: bool = False,
        with_ids: bool = False,
        with_usage: bool = False,
    ) -> None:
        """Create the writer of one response.

        `created` is the time in seconds since 1970, and `n` the number of choices of each prompt.
        `stop_token_ids` are those of the request. With `with_ids`, token ids of prompts and outputs
        are written. With `with_usage`, a stream ends with a usage chunk and all other chunks have
        `"usage": null`.
        """
        self._common = {"id": f"{self.prefix}-{request_id}", "created": created, "model": model}
        self._n = n
        self._texts = texts
        self._stop_token_ids = frozenset(stop_token_ids)
        self._with_logprobs = with_logprobs
        self._with_ids = with_ids
        self._no_usage = ', "usage": null}\n\n' if with_usage else "}\n\n"
        told = {**self._common, "object": self.chunk_object}
        self._head = f'data: {json_quote(told)[:-1]}, "choices": ['

    @property
    def is_text_only(self) -> bool:
        """Whether chunks contain no log-probabilities or token ids, so that a token without text
        needs no chunk.
        """
        return not self._with_logprobs and not self._with_ids

    # ---- chunks --------------------------------------------------------------------------------

    def write_delta(
        self,
        choice: ChoiceState,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        usage: dict[str, object] | None,
        *,
        reasoning: str = "",
        tool_calls: Sequence[ToolCallDelta] = (),
    ) -> str:
        """Return a server-sent event with new text, reasoning and parts of tool calls of a choice.
        If the format has an opening chunk, it precedes the first event of a choice. `usage` is part
        of the event unless it is None.
        """
        told = "null"
        if self._with_logprobs:
            told = json_quote(self._logprobs(choice, token_ids, logprobs))
        opening, first = "", not choice.has_started
        if first:
            choice.has_started = True
            opening, text = self._opening(choice, usage), choice.echo + text
        body = self._delta(
            choice.index, json_quote(text), told, _parsed_members(reasoning, tool_calls)
        )
        if self._with_ids:
            body = f"{body[:-1]}, {self._ids(choice, token_ids, first=first)}}}"
        return f"{opening}{self._head}{body}]{self._tail(usage)}"

    def write_end(self, choice: ChoiceState, usage: dict[str, object] | None) -> str:
        """Return the server-sent event that ends a choice. `usage` is part of the event unless it
        is None.
        """
        assert choice.finish is not None, "it has ended"
        opening = ""
        if not choice.has_started:
            if choice.echo or self._with_ids:
                opening = self.write_delta(choice, "", (), (), usage)
            else:
                opening = self._opening(choice, usage)
        reason = json_quote(self._reason(choice, choice.finish))
        stop_reason = json_quote(self._stop_reason(choice.finish))
        body = self._end(choice.index, reason, stop_reason)
        return f"{opening}{self._head}{body}]{self._tail(usage)}"

    def write_usage(self, choices: Sequence[ChoiceState]) -> str:
        """Return the last server-sent event of a stream. It has the token usage of all choices, and
        its list of choices is empty.
        """
        finishes = _finishes(choices)
        told = json_quote(total_usage_body(finishes, self._n))
        speculation = json_quote(metrics_body(sum_stats([finish.stats for finish in finishes])))
        return f'{self._head}], "usage": {told}, "metrics": {speculation}}}\n\n'

    def _tail(self, usage: dict[str, object] | None) -> str:
        return self._no_usage if usage is None else f', "usage": {json_quote(usage)}}}\n\n'

    def _opening(self, choice: ChoiceState, usage: dict[str, object] | None) -> str:
        return ""

    def _ids(self, choice: ChoiceState, token_ids: Sequence[int], *, first: bool) -> str:
        """Return the JSON members with the token ids of a choice with new text."""
        return f'"token_ids": {json_quote(list(token_ids))}'

    @abstractmethod
    def _delta(self, index: int, text: str, logprobs: str, parsed: str) -> str:
        """Return the JSON of a choice with new text. `text` and `logprobs` are already JSON, and
        `parsed` the JSON members with reasoning and parts of tool calls, or ""."""

    @abstractmethod
    def _end(self, index: int, reason: str, stop_reason: str) -> str:
        """Return the JSON of the last chunk's choice. `reason` and `stop_reason` are already
        JSON.
        """

    # ---- whole ---------------------------------------------------------------------------------

    def write_whole(self, choices: Sequence[ChoiceState]) -> str:
        """Return the JSON of a complete response."""
        finishes = _finishes(choices)
        told = {
            **self._common,
            "object": self.whole_object,
            "choices": [self._choice(choice) for choice in choices],
            **(self._prompt(choices) if self._with_ids else {}),
            "usage": total_usage_body(finishes, self._n),
            "metrics": metrics_body(sum_stats([finish.stats for finish in finishes])),
        }
        return json_quote(told)

    def _choice(self, choice: ChoiceState) -> dict[str, object]:
        assert choice.finish is not None, "it has ended"
        logprobs = None
        if self._with_logprobs:
            logprobs = self._logprobs(choice, choice.token_ids, choice.logprobs)
        return {
            "index": choice.index,
            **self._content(choice),
            "logprobs": logprobs,
            "finish_reason": self._reason(choice, choice.finish),
            "stop_reason": self._stop_reason(choice.finish),
            **(self._whole_ids(choice) if self._with_ids else {}),
        }

    def _prompt(self, choices: Sequence[ChoiceState]) -> dict[str, object]:
        """Return the members of a response with the prompt's token ids."""
        return {}

    def _whole_ids(self, choice: ChoiceState) -> dict[str, object]:
        """Return the members of a choice with token ids."""
        return {"token_ids": choice.token_ids}

    @abstractmethod
    def _content(self, choice: ChoiceState) -> dict[str, object]:
        """Return the members of a choice that contain the text."""

    @abstractmethod
    def _logprobs(
        self, choice: ChoiceState, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, object]:
        """Return the `logprobs` member for the next tokens of a choice."""

    # ---- both ----------------------------------------------------------------------------------

    def _reason(self, choice: ChoiceState, finish: FinishInfo) -> str:
        return _REASONS.get(finish.reason, "tool_calls" if choice.has_calls else "stop")

    def _stop_reason(self, finish: FinishInfo) -> str | int | None:
        """Return vLLM's `stop_reason`: the stop string or the client's stop token id that ended the
        output, or None.
        """
        if finish.stop_string is not None:
            return finish.stop_string
        return finish.stop_token_id if finish.stop_token_id in self._stop_token_ids else None


def _parsed_members(reasoning: str, tool_calls: Sequence[ToolCallDelta]) -> str:
    """Return the JSON members of a delta with reasoning and parts of tool calls; "" without."""
    members = []
    if reasoning:
        text = json_quote(reasoning)
        members += [f'"reasoning_content": {text}', f'"reasoning": {text}']
    if tool_calls:
        members.append(f'"tool_calls": {json_quote(list(map(_call_delta, tool_calls)))}')
    return ", ".join(members)


def _call_delta(delta: ToolCallDelta) -> dict[str, object]:
    if not delta.name:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}


def _finishes(choices: Sequence[ChoiceState]) -> list[FinishInfo]:
    return [choice.finish for choice in choices if choice.finish is not None]


class CompletionWriter(ResponseWriter):
    """Writer of responses to POST /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _delta(self, index: int, text: str, logprobs: str, parsed: str) -> str:
        return (
            f'{{"index": {index}, "text": {text}, "logprobs": {logprobs}, "finish_reason": null}}'
        )

    def _end(self, index: int, reason: str, stop_reason: str) -> str:
        return (
            f'{{"index": {index}, "text": "", "logprobs": null, "finish_reason": {reason}, '
            f'"stop_reason": {stop_reason}}}'
        )

    def _ids(self, choice: ChoiceState, token_ids: Sequence[int], *, first: bool) -> str:
        told = super()._ids(choice, token_ids, first=first)
        return (
            f'{told}, "prompt_token_ids": {json_quote(list(choice.prompt_ids))}' if first else told
        )

    def _whole_ids(self, choice: ChoiceState) -> dict[str, object]:
        return {**super()._whole_ids(choice), "prompt_token_ids": list(choice.prompt_ids)}

    def _content(self, choice: ChoiceState) -> dict[str, object]:
        return {"text": choice.echo + "".join(choice.text)}

    def _logprobs(
        self, choice: ChoiceState, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, object]:
        if choice.offsets is None:
            choice.offsets = self._texts.offsets()
        return completion_logprobs(token_ids, logprobs, self._texts, choice.offsets)


class ChatWriter(ResponseWriter):
    """Writer of responses to POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _opening(self, choice: ChoiceState, usage: dict[str, object] | None) -> str:
        delta = '{"role": "assistant", "content": ""}'
        ids = (
            f', "prompt_token_ids": {json_quote(list(choice.prompt_ids))}' if self._with_ids else ""
        )
        return (
            f'{self._head}{{"index": {choice.index}, "delta": {delta}, "logprobs": null, '
            f'"finish_reason": null}}]{ids}{self._tail(usage)}'
        )

    def _prompt(self, choices: Sequence[ChoiceState]) -> dict[str, object]:
        return {"prompt_token_ids": list(choices[0].prompt_ids)}

    def _delta(self, index: int, text: str, logprobs: str, parsed: str) -> str:
        members = f'"content": {text}'
        if parsed:
            members = parsed if text == '""' else f"{members}, {parsed}"
        return (
            f'{{"index": {index}, "delta": {{{members}}}, "logprobs": {logprobs}, '
            f'"finish_reason": null}}'
        )

    def _end(self, index: int, reason: str, stop_reason: str) -> str:
        return (
            f'{{"index": {index}, "delta": {{}}, "logprobs": null, "finish_reason": {reason}, '
            f'"stop_reason": {stop_reason}}}'
        )

    def _content(self, choice: ChoiceState) -> dict[str, object]:
        text, reasoning = "".join(choice.text), "".join(choice.reasoning)
        calls = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in join_call_deltas(choice.tool_calls)
        ]
        message: dict[str, object] = {
            "role": "assistant",
            "content": text or None if calls else text,
            "refusal": None,
        }
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _logprobs(
        self, choice: ChoiceState, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, object]:
        return chat_logprobs(token_ids, logprobs, self._texts)
