"""Legible text of answers for `outrider generate`: reasoning, content and tool calls."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from outrider.spec.tools import ToolCallDelta
from outrider.wire.inference import Delta, GenerateResult

REASONING_BEGIN: Final = "[reasoning]"
"""Line before the reasoning."""
REASONING_END: Final = "[end of reasoning]"
"""Line behind the reasoning."""
CALL_BEGIN: Final = "[tool call]"
"""Text before the name of a tool that the model calls."""
_DIM: Final = "\x1b[2m{}\x1b[0m"
"""Terminal sequences that dim a text."""


class _AnswerPart(Enum):
    NONE = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class AnswerText:
    """Turns the deltas of one answer into text.

    Reasoning stands between two lines that mark it, and each tool call on a line of its own:
    `[tool call] NAME(ARGUMENTS)`.
    """

    def __init__(self, *, shows_reasoning: bool = True, is_dimmed: bool = False) -> None:
        """Create the text of an answer. `is_dimmed`: whether a terminal dims the reasoning."""
        self._shows_reasoning, self._is_dimmed = shows_reasoning, is_dimmed
        self._part = _AnswerPart.NONE
        self._call_index = -1
        """Index of the call that was begun last."""

    def push_delta(self, delta: Delta) -> str:
        """Return the text of a delta: its reasoning, its content and its calls."""
        text = ""
        if delta.reasoning and self._shows_reasoning:
            if self._part is not _AnswerPart.REASONING:
                text += self._end_part() + self._dim(f"{REASONING_BEGIN}\n")
                self._part = _AnswerPart.REASONING
            text += self._dim(delta.reasoning)
        if delta.text:
            if self._part is not _AnswerPart.CONTENT:
                text += self._end_part()
                self._part = _AnswerPart.CONTENT
            text += delta.text
        return text + "".join(map(self._push_call, delta.tool_calls))

    def finish(self) -> str:
        """Return the text that ends a part which the end of the answer leaves open."""
        if self._part is _AnswerPart.CONTENT:
            return ""
        text, self._part = self._end_part(), _AnswerPart.NONE
        return text.rstrip("\n")

    def _push_call(self, call: ToolCallDelta) -> str:
        text = ""
        if self._part is not _AnswerPart.CALL or call.index != self._call_index:
            text = f"{self._end_part()}{CALL_BEGIN} {call.name}("
            self._part, self._call_index = _AnswerPart.CALL, call.index
        return text + call.arguments

    def _end_part(self) -> str:
        """Return the text between the present part and the next one."""
        match self._part:
            case _AnswerPart.NONE:
                return ""
            case _AnswerPart.REASONING:
                return self._dim(f"\n{REASONING_END}") + "\n\n"
            case _AnswerPart.CONTENT:
                return "\n"
            case _AnswerPart.CALL:
                return ")\n"

    def _dim(self, text: str) -> str:
        return _DIM.format(text) if self._is_dimmed else text


def render_answer(answer: GenerateResult, *, shows_reasoning: bool = True) -> str:
    """Return the text of a complete answer."""
    text = AnswerText(shows_reasoning=shows_reasoning)
    calls = tuple(
        ToolCallDelta(index=index, name=call.name, arguments=call.arguments)
        for index, call in enumerate(answer.tool_calls)
    )
    delta = Delta(text=answer.text, token_ids=(), reasoning=answer.reasoning, tool_calls=calls)
    return text.push_delta(delta) + text.finish()
