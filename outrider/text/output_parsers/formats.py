"""Formats of tool calls and of reasoning: which parser reads them, and which templates use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from outrider.text.output_parsers import harmony
from outrider.text.output_parsers.call_readers import (
    JsonCallsReader,
    MakeReader,
    MistralCallsReader,
    NamedCallReader,
)
from outrider.text.output_parsers.events import OutputParser
from outrider.text.output_parsers.json_call import JsonCallReader
from outrider.text.output_parsers.leading_calls import LeadingCallParser
from outrider.text.output_parsers.marked_calls import MarkedCallParser
from outrider.text.output_parsers.plain import PlainContentParser
from outrider.text.output_parsers.pythonic_calls import PythonicCallsReader
from outrider.text.output_parsers.reasoning import TaggedReasoningParser
from outrider.text.output_parsers.reasoning_span import ReasoningSpan, TaggedSpan

NONE: Final = "none"
"""Name with which an operator switches a parser off."""
AUTO: Final = "auto"
"""Name with which the chat template decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format in which models write tool calls."""

    name: str
    """Name of the parser in the configuration, as in vLLM."""
    make_parser: Callable[[Collection[str] | None], OutputParser]
    """Makes the parser of one answer; see `make`."""
    markers: tuple[str, ...]
    """Texts that the parser must see even if the tokenizer declares them special tokens."""
    template_marks: tuple[tuple[str, ...], ...]
    """A chat template uses the format if it holds all texts of one of these entries."""
    foreign_marks: tuple[str, ...] = ()
    """Texts of other formats: a chat template that holds one does not use this format."""
    has_short_ids: bool = False
    """Whether call ids must have 9 letters and digits, as Mistral's templates demand."""
    needs_names: bool = False
    """Whether calls have no marker, so that they are distinguished from other text by the names of
    the request's tools."""

    def make(self, names: Collection[str] | None = None) -> OutputParser:
        """Return the parser of one answer. `names`: names of the request's tools, if the format
        needs them: what looks like a call of another tool is content. None allows all names."""
        return self.make_parser(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A format in which models write their reasoning."""

    name: str
    """Name of the parser in the configuration, as in vLLM."""
    open_tag: str
    """Text that begins the reasoning; "" if every answer begins with reasoning."""
    close_tag: str
    """Text behind which the answer begins."""
    template_marks: tuple[str, ...]
    """A chat template uses the format if it holds all of these texts."""
    is_harmony: bool = False
    """Whether the reasoning is in a channel of the harmony format, not between tags."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see even if the tokenizer declares them special tokens."""
        return harmony.MARKERS if self.is_harmony else (self.open_tag, self.close_tag)


def _marked(
    *begin: str, end: str = "", ignored: tuple[str, ...] = (), reader: MakeReader
) -> Callable[[Collection[str] | None], OutputParser]:
    return lambda _names: MarkedCallParser(begin=begin, end=end, ignored=ignored, reader=reader)


def _llama_json_parser(names: Collection[str] | None) -> OutputParser:
    make_reader = partial(
        JsonCallReader, first_keys=("name", "type"), names=names, needs_arguments=True
    )
    return LeadingCallParser(
        opening="{",
        marker=_PYTHON_TAG,
        separator=";",
        reader=partial(JsonCallsReader, make_reader=make_reader),
    )


def _pythonic_parser(names: Collection[str] | None) -> OutputParser:
    return LeadingCallParser(
        opening="[", marker=_PYTHON_TAG, reader=partial(PythonicCallsReader, names=names)
    )


def _deepseek(name: str) -> str:
    """Return a special token of DeepSeek's tokenizers, which have two characters of their own."""
    bar, space = "\uff5c", "\u2581"
    return f"<{bar}{name.replace(' ', space)}{bar}>"


_DEEPSEEK_SECTION: Final = (_deepseek("tool calls begin"), _deepseek("tool calls end"))
_DEEPSEEK_BEGIN: Final = _deepseek("tool call begin")
_DEEPSEEK_END: Final = _deepseek("tool call end")
_DEEPSEEK_SEPARATOR: Final = _deepseek("tool sep")
_DEEPSEEK_MARKERS: Final = (
    *_DEEPSEEK_SECTION,
    _DEEPSEEK_BEGIN,
    _DEEPSEEK_END,
    _DEEPSEEK_SEPARATOR,
)

_PYTHON_TAG: Final = "<|python_tag|>"
_HARMONY: Final = "openai"
"""Name of the harmony format, as in vLLM."""

_TOOLS: Final = (
    ToolFormat(
        name=_HARMONY,
        make_parser=lambda _names: harmony.HarmonyParser(),
        markers=harmony.MARKERS,
        template_marks=((harmony.CHANNEL, "functions.", "<|call|>"),),
    ),
    ToolFormat(
        name="deepseek_v3",
        make_parser=_marked(
            f"{_DEEPSEEK_BEGIN}function{_DEEPSEEK_SEPARATOR}",
            end=_DEEPSEEK_END,
            ignored=_DEEPSEEK_SECTION,
            reader=partial(NamedCallReader, separators=("\n",), fence="```json"),
        ),
        markers=_DEEPSEEK_MARKERS,
        template_marks=((_DEEPSEEK_BEGIN, "```json"),),
    ),
    ToolFormat(
        name="deepseek_v31",
        make_parser=_marked(
            _DEEPSEEK_BEGIN,
            end=_DEEPSEEK_END,
            ignored=_DEEPSEEK_SECTION,
            reader=partial(NamedCallReader, separators=(_DEEPSEEK_SEPARATOR,)),
        ),
        markers=_DEEPSEEK_MARKERS,
        template_marks=((_DEEPSEEK_BEGIN,),),
    ),
    ToolFormat(
        name="mistral",
        make_parser=_marked("[TOOL_CALLS]", reader=MistralCallsReader),
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        template_marks=(("[TOOL_CALLS]",),),
        has_short_ids=True,
    ),
    ToolFormat(
        # Granite 3.0 writes the special token, Granite 3.1 the text `<tool_call>`; the templates of
        # Granite 4 use the format hermes, with an end marker.
        name="granite",
        make_parser=_marked("<|tool_call|>", "<tool_call>", reader=JsonCallsReader),
        markers=("<|tool_call|>", "<tool_call>"),
        template_marks=tuple(
            ("<|start_of_role|>", mark)
            for mark in ("<|tool_call|>", "<tool_call>", "available_tools<|end_of_role|>")
        ),
        foreign_marks=("</tool_call>",),
    ),
    ToolFormat(
        name="hermes",
        make_parser=_marked("<tool_call>", end="</tool_call>", reader=JsonCallsReader),
        markers=("<tool_call>", "</tool_call>"),
        template_marks=(("<tool_call>", "arguments"),),
        foreign_marks=("<function=", "<arg_key>"),
    ),
    ToolFormat(
        name="llama3_json",
        make_parser=_llama_json_parser,
        markers=(_PYTHON_TAG,),
        template_marks=((_PYTHON_TAG,), ('"parameters"', "Respond in the format")),
        needs_names=True,
    ),
    ToolFormat(
        name="pythonic",
        make_parser=_pythonic_parser,
        markers=(_PYTHON_TAG,),
        template_marks=(("[func_name1(",),),
        needs_names=True,
    ),
)
_REASONING: Final = (
    ReasoningFormat(
        name="openai_gptoss",
        open_tag="",
        close_tag=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        template_marks=(harmony.CHANNEL, "analysis"),
        is_harmony=True,
    ),
    ReasoningFormat(
        name="granite",
        open_tag="Here is my thought process:",
        close_tag="Here is my response:",
        template_marks=("Here is my thought process:", "Here is my response:"),
    ),
    ReasoningFormat(
        name="qwen3", open_tag="<think>", close_tag="</think>", template_marks=("<think>",)
    ),
    ReasoningFormat(
        name="deepseek_r1", open_tag="<think>", close_tag="</think>", template_marks=("</think>",)
    ),
)
TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {each.name: each for each in _TOOLS}
"""Formats of tool calls by name."""
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {each.name: each for each in _REASONING}
"""Formats of reasoning by name."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Formats in which a model writes reasoning and tool calls; None for those that are not
    parsed."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the parser must see even if they are special tokens."""
        tools = () if self.tools is None else self.tools.markers
        reasoning = () if self.reasoning is None else self.reasoning.markers
        return tuple(dict.fromkeys((*tools, *reasoning)))

    def make_parser(
        self, *, is_reasoning_open: bool, names: Collection[str] | None = None
    ) -> OutputParser:
        """Return the parser of one answer. `is_reasoning_open`: whether the prompt ends inside the
        reasoning. `names`: as for `ToolFormat.make`."""
        if self.reasoning is not None and self.reasoning.is_harmony:
            return harmony.HarmonyParser(reads_calls=self.tools is not None)
        if self.tools is not None and self.tools.name == _HARMONY:
            content: OutputParser = harmony.HarmonyParser(reads_reasoning=False)
        else:
            content = PlainContentParser() if self.tools is None else self.tools.make(names)
        if self.reasoning is None:
            return content
        return TaggedReasoningParser(
            self.reasoning.open_tag,
            self.reasoning.close_tag,
            is_open=is_reasoning_open,
            content=content,
        )

    def make_span(self, *, is_reasoning_open: bool) -> ReasoningSpan | None:
        """Return the span of the reasoning of one answer; None if no reasoning is read."""
        if self.reasoning is None:
            return None
        if self.reasoning.is_harmony:
            return harmony.HarmonySpan()
        return TaggedSpan(
            self.reasoning.open_tag, self.reasoning.close_tag, is_open=is_reasoning_open
        )


def is_reasoning_open(reasoning: ReasoningFormat, prompt: str) -> bool:
    """Return whether a prompt with this end leaves the reasoning open for the answer."""
    return bool(reasoning.open_tag) and prompt.rstrip().endswith(reasoning.open_tag)


def output_format_of(tool_format: str, reasoning_format: str) -> OutputFormat:
    """Return the formats with these names; "" for none."""
    return OutputFormat(TOOL_FORMATS.get(tool_format), REASONING_FORMATS.get(reasoning_format))


def check_parser_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ValueError unless both are names of formats, or `AUTO` or `NONE`."""
    for setting, name, formats in (
        ("tool_call_parser", tool_call_parser, tuple(TOOL_FORMATS)),
        ("reasoning_parser", reasoning_parser, tuple(REASONING_FORMATS)),
    ):
        if name not in (AUTO, NONE, *formats):
            raise ValueError(
                f"{setting} must be one of {', '.join([AUTO, NONE, *formats])}, got {name!r}"
            )


def choose_output_format(
    template: str, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> OutputFormat:
    """Return the formats of a model by the source of its chat template, "" if it has none, or by
    the names that the operator has set. Raises ValueError for an unknown name."""
    check_parser_names(tool_call_parser, reasoning_parser)
    tools = TOOL_FORMATS.get(tool_call_parser)
    if tool_call_parser == AUTO:
        tools = next((each for each in _TOOLS if _uses_tools(template, each)), None)
    reasoning = REASONING_FORMATS.get(reasoning_parser)
    if reasoning_parser == AUTO:
        reasoning = next((each for each in _REASONING if _uses_reasoning(template, each)), None)
    return OutputFormat(tools, reasoning)


def _uses_tools(template: str, each: ToolFormat) -> bool:
    if any(mark in template for mark in each.foreign_marks):
        return False
    return any(all(mark in template for mark in marks) for marks in each.template_marks)


def _uses_reasoning(template: str, each: ReasoningFormat) -> bool:
    return all(mark in template for mark in each.template_marks)
