"""Grammars of tool calls in a model's own format, and of answers behind reasoning. Pure.

The grammars are in Lark's syntax, as the grammar library (llguidance) reads it. The output parser
of the same format reads the calls back. A special token is written as a reference to its id, such
as `<[128010]>`, because `outrider.grammar.special_tokens` hides its text.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider.grammar.complexity import check_complexity
from outrider.grammar.digit_bound import has_json_numbers, json_numbers_line
from outrider.grammar.matcher_compiler import WHITESPACE, invalid_grammar_error, parse_schema
from outrider.grammar.schema_recursion import find_target
from outrider.spec.structured_output import (
    MAX_STRUCTURE_BYTES,
    StructuredKind,
    StructuredOutput,
    lark_literal,
)

MAX_CALLS: Final = 32
"""Maximum number of calls in one answer."""
MAX_NAME_CHARS: Final = 64
"""Maximum length of a tool's name. Output parsers read no longer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A tool that the model may call."""

    name: str
    parameters: str
    """JSON text of the JSON schema of the arguments, which must be a schema of an object. A tool
    with "" or "{}" has no parameters: its arguments are an empty object."""
    index: int | None = None
    """Index of the tool in the request, by which errors name it; None if it is that in the sequence
    of tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkTags:
    """Tags around the reasoning with which an answer begins. Each is one special token, or text."""

    open_tag: str
    close_tag: str
    is_open: bool
    """Whether the prompt ended with the open tag, so that the answer begins with reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallFormat:
    """Texts around the names and the arguments of calls.

    An answer is `first`, calls with `between` between them, and `last`. A call is `begin`, the
    name, `name_end`, the arguments and `end`. `first` and `between` are one of several texts, and
    `around_name` has pairs of `begin` and `name_end`, of which a call has one.
    """

    first: tuple[str, ...] = ("",)
    around_name: tuple[tuple[str, str], ...]
    end: str
    between: tuple[str, ...] = ("",)
    last: str = ""
    names: str = ""
    """Regular expression of the names that the output parser can read; "" if the name is written
    as a JSON string, which can hold every printable name."""
    is_pythonic: bool = False
    """Whether arguments are keyword arguments of Python, not a JSON object."""
    is_harmony: bool = False
    """Whether reasoning is in a channel of its own, not between tags."""
    has_call_ids: bool = False
    """Whether `[CALL_ID]` and an id may follow the name, if the tokenizer has this token."""


def _deepseek(name: str) -> str:
    """Return a special token of DeepSeek's tokenizers, which have two characters of their own."""
    bar, space = "\uff5c", "\u2581"
    return f"<{bar}{name.replace(' ', space)}{bar}>"


_PLAIN_NAMES: Final = r"[^\s<\[{]+"
_ARGS: Final = "[ARGS]"
CALL_FORMATS: Final[Mapping[str, _CallFormat]] = {
    "hermes": _CallFormat(
        around_name=(('<tool_call>\n{"name": ', ', "arguments": '),),
        end="}\n</tool_call>",
        between=("\n",),
    ),
    "llama3_json": _CallFormat(
        # Without the marker, as Llama 3.1 and 3.2 write calls of custom tools, or with it.
        first=("", "<|python_tag|>"),
        around_name=(('{"name": ', ', "parameters": '),),
        end="}",
        between=("; ",),
    ),
    "pythonic": _CallFormat(
        first=("[",),
        around_name=(("", "("),),
        end=")",
        between=(", ",),
        last="]",
        names=r"[A-Za-z_][\w.-]*",
        is_pythonic=True,
    ),
    "mistral": _CallFormat(
        # Tokenizers based on SentencePiece have a space here, newer ones do not.
        first=("[TOOL_CALLS][", "[TOOL_CALLS] ["),
        around_name=(('{"name": ', ', "arguments": '),),
        end="}",
        between=(", ",),
        last="]",
    ),
    "granite": _CallFormat(
        # The first marker is a token of Granite 3.0; Granite 3.1 writes the second one as text.
        first=tuple(
            f"{marker}{space}["
            for marker in ("<|tool_call|>", "<tool_call>")
            for space in ("", " ")
        ),
        around_name=(('{"name": ', ', "arguments": '),),
        end="}",
        between=(", ",),
        last="]",
    ),
    "deepseek_v3": _CallFormat(
        first=(_deepseek("tool calls begin"),),
        around_name=(
            (f"{_deepseek('tool call begin')}function{_deepseek('tool sep')}", "\n```json\n"),
        ),
        end=f"\n```{_deepseek('tool call end')}",
        # The model's card has no line break, its chat template has one.
        between=("", "\n"),
        last=_deepseek("tool calls end"),
        names=_PLAIN_NAMES,
    ),
    "deepseek_v31": _CallFormat(
        first=(_deepseek("tool calls begin"),),
        around_name=((_deepseek("tool call begin"), _deepseek("tool sep")),),
        end=_deepseek("tool call end"),
        last=_deepseek("tool calls end"),
        names=_PLAIN_NAMES,
    ),
    "openai": _CallFormat(
        # The guide of the format has the recipient in the channel part and in the role part.
        around_name=(
            ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
            (" to=functions.", "<|channel|>commentary <|constrain|>json<|message|>"),
        ),
        end="<|call|>",
        between=("<|start|>assistant",),
        names=_PLAIN_NAMES,
        is_harmony=True,
    ),
}
_CALL_ID: Final = "[CALL_ID]"
_MISTRAL_11: Final = _CallFormat(
    around_name=(("[TOOL_CALLS]", _ARGS),), end="", names=_PLAIN_NAMES, has_call_ids=True
)
"""Format of Mistral models since tokenizer version 11, which have a special token `[ARGS]`."""
MARKER: Final = re.compile(
    rf"<\|\w+\|>|</?tool_call>|\[(?:TOOL_CALLS|CALL_ID|ARGS)\]|{_deepseek('[^<>]+')}"
)
"""A text in the formats that is a special token in some tokenizers."""
_HARMONY_REASONING: Final = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
"""Texts around a message of reasoning in the harmony format."""
_HARMONY_FINAL: Final = "<|channel|>final<|message|>"
"""Text that begins the final answer in the harmony format."""
_HARMONY_FINAL_JSON: Final = "<|channel|>final <|constrain|>json<|message|>"
"""Text with which models begin a final answer that is JSON, too."""
HARMONY_MARKERS: Final = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
"""Texts at which the output parser of the harmony format ends reasoning."""
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_RULE_OF_TOOL: Final = re.compile(r"(?:tool\d+|arguments)_(\d+):")
"""Beginning of a line of a grammar with the schema of a tool, and the position of this tool."""
_REASON: Final = re.compile(
    r".*?cannot be used: (?:at (?P<line>\d+)\(\d+\): )?(?:failed to compile JSON schema: )?"
    r"(?P<why>.*?)(?:\n *\d+ \| .*)?",
    re.DOTALL,
)
"""Message about a grammar: the line, the reason, and lines of the grammar, which clients do not
know."""
_SPACE: Final = r"/[ \n]{1,4}/"
"""White space that may be between the close tag of reasoning and the answer."""


def tool_call_grammar(
    format_name: str,
    tools: Sequence[ToolSchema],
    *,
    parallel: bool,
    special_ids: Mapping[str, int],
    think: ThinkTags | None,
) -> str:
    """Return the grammar of an answer that calls one of `tools`, as the text of a
    `StructuredOutput` of kind GRAMMAR.

    `format_name`: key of `outrider.text.output_parsers.formats.TOOL_FORMATS`. `parallel`: whether
    up to `MAX_CALLS` calls are allowed, not only one. `special_ids`: ids of the tokenizer's special
    tokens by their text. `think`: tags of the reasoning that may precede the calls; None without
    reasoning. It is ignored for the format "openai", which allows reasoning in a channel of its
    own.

    Raises InvalidRequestError: reason INVALID_TOOLS for tools that the format cannot express,
    INVALID_CONFIG for an unknown format.
    """
    if format_name not in CALL_FORMATS:
        raise InvalidRequestError(
            f"tool calls cannot be enforced in the format {format_name!r}; these formats can: "
            f"{', '.join(sorted(CALL_FORMATS))}",
            reason="INVALID_CONFIG",
            param="tool_call_parser",
        )
    uses_args = format_name == "mistral" and _ARGS in special_ids
    form = _MISTRAL_11 if uses_args else CALL_FORMATS[format_name]
    text = "\n".join(_call_rules(form, tools, parallel, special_ids, think))
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_STRUCTURE_BYTES:
        raise _invalid_tools(
            "tools",
            f"the schemas of all tools together must be at most {MAX_STRUCTURE_BYTES} bytes as a "
            f"grammar, got {size}",
        )
    _check_complexity(StructuredOutput(StructuredKind.GRAMMAR, text), "tools")
    return text


def enforcement_error(
    grammar: str, tools: Sequence[ToolSchema], error: InvalidRequestError
) -> InvalidRequestError:
    """Return the error for tools whose grammar cannot be compiled. Its message names the tool at
    fault, if `error` tells a line with its schema, and has no lines of the grammar.

    `grammar`: result of `tool_call_grammar` for `tools`. `error`: the compiler's error.
    """
    reason = _REASON.fullmatch(error.message)
    why = error.message.removeprefix("structured output: ") if reason is None else reason["why"]
    what = "the schemas of the tools cannot be enforced"
    if reason is not None and reason["line"] is not None:
        lines = grammar.split("\n")
        number = min(int(reason["line"]), len(lines))
        if rule := _RULE_OF_TOOL.match(lines[number - 1]):
            what = f"the schema of the tool {tools[int(rule[1])].name!r} cannot be enforced"
    return InvalidRequestError(f"{what}: {why}", reason="INVALID_TOOLS", param="tools")


def wrap_structured_output(
    structured: StructuredOutput, *, special_ids: Mapping[str, int], think: ThinkTags
) -> StructuredOutput:
    """Return a grammar of answers that begin with reasoning, and continue with `structured`.

    The reasoning is optional if the prompt has not begun it. Up to four line breaks or spaces may
    follow its close tag. If the close tag is `<|channel|>final<|message|>`, the reasoning is a
    message in the harmony format. `special_ids` is as for `tool_call_grammar`.

    Raises InvalidRequestError (reason INVALID_STRUCTURE) if `structured` exceeds a limit or is no
    schema.
    """
    # The limits of complexity do not count what is nested in `%lark` and `%json`.
    check_complexity(structured)
    spaced, plain = "SPACE? answer", "answer"
    match structured.kind:
        case StructuredKind.JSON_SCHEMA:
            answer = f"answer: {_json_expression(_schema(structured))}"
        case StructuredKind.JSON_OBJECT:
            answer = f"answer: {_json_expression({'type': 'object'})}"
        case StructuredKind.REGEX:
            # One terminal with the space: the pattern may begin with white space itself.
            spaced, plain = "SPACED", "ANSWER"
            answer = f"ANSWER: {_regex(structured.text)}\nSPACED: {_SPACE}? ANSWER"
        case StructuredKind.GRAMMAR:
            answer = f"answer: %lark {{\n{structured.text}\n}}"
    if think.close_tag == _HARMONY_FINAL:
        finals = [_HARMONY_FINAL]
        if has_json_numbers(structured):
            finals.append(_HARMONY_FINAL_JSON)
        final = " | ".join(_expression(text, special_ids) for text in finals)
        rules = _harmony_rules(f"final {plain}", special_ids)
        rules.append(f"final: {final}")
        line = _numbers_line(None, special_ids)
    else:
        rules = _tagged_rules(plain, spaced, special_ids, think)
        line = _numbers_line(think, special_ids)
    if has_json_numbers(structured):
        rules.insert(0, line)
    return StructuredOutput(StructuredKind.GRAMMAR, "\n".join([*rules, answer]))


def _call_rules(
    form: _CallFormat,
    tools: Sequence[ToolSchema],
    parallel: bool,
    special_ids: Mapping[str, int],
    think: ThinkTags | None,
) -> list[str]:
    def expression(*texts: str) -> str:
        return " | ".join(_expression(text, special_ids) for text in texts)

    repeated = f"(between call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    indices = range(len(tools))
    shapes = range(len(form.around_name))
    calls = (
        f"{expression(begin)} tool{shape} {expression(form.end)}"
        for shape, (begin, _) in enumerate(form.around_name)
    )
    rules = [
        f"calls: first call {repeated} {expression(form.last)}",
        f"first: {expression(*form.first)}",
        f"between: {expression(*form.between)}",
        f"call: {' | '.join(calls)}",
        *(f"tool{shape}: {' | '.join(f'tool{shape}_{n}' for n in indices)}" for shape in shapes),
    ]
    call_id = ""
    if form.has_call_ids and _CALL_ID in special_ids:
        call_id = f"({expression(_CALL_ID)} /[0-9A-Za-z]{{9}}/)?"
    pythonic = _PythonicRules()
    for index, (name, schema) in enumerate(_checked_tools(form, tools)):
        if not form.is_pythonic:
            arguments = lark_literal("{}") if schema is None else _json_arguments(schema)
        else:
            try:
                arguments = pythonic.add_arguments(schema or {})
            except _UnsupportedSchemaError as error:
                raise _invalid_tools(
                    f"tools[{_index(index, tools[index])}].function.parameters",
                    "this model's call format, keyword arguments of Python, cannot express the "
                    f"schema: {error}",
                ) from None
        if len(shapes) > 1:
            rules.append(f"arguments_{index}: {arguments}")
            arguments = f"arguments_{index}"
        rules += (
            f"tool{shape}_{index}: {lark_literal(name)} {call_id} {expression(name_end)} "
            f"{arguments}"
            for shape, (_, name_end) in enumerate(form.around_name)
        )
    rules += pythonic.lines
    if form.is_harmony:
        return [_numbers_line(None, special_ids), *_harmony_rules("calls", special_ids), *rules]
    if think is None:
        return [json_numbers_line(), "start: calls", *rules]
    line = _numbers_line(think, special_ids)
    return [line, *_tagged_rules("calls", "SPACE? calls", special_ids, think), *rules]


def _numbers_line(think: ThinkTags | None, special_ids: Mapping[str, int]) -> str:
    """Return the first line of a grammar with JSON numbers behind reasoning. `think`: its tags;
    None in the harmony format."""
    open_tag, close_tag = _HARMONY_REASONING
    if think is not None:
        open_tag, close_tag = think.open_tag, think.close_tag
    is_open = think is not None and think.is_open
    return json_numbers_line(
        (_parts(open_tag, special_ids), _parts(close_tag, special_ids), is_open)
    )


def _checked_tools(
    form: _CallFormat, tools: Sequence[ToolSchema]
) -> list[tuple[str, dict[str, Any] | None]]:
    """Return each tool's name as it is written in calls, and the schema of its arguments; None for
    a tool without parameters."""
    if not tools:
        raise _invalid_tools("tools", "at least one tool is needed to call one")
    checked: list[tuple[str, dict[str, Any] | None]] = []
    known: set[str] = set()
    for position, tool in enumerate(tools):
        index = _index(position, tool)
        name = tool.name if form.names else json.dumps(tool.name, ensure_ascii=False)
        is_readable = tool.name.isprintable() and len(tool.name) <= MAX_NAME_CHARS
        if not tool.name or not is_readable or (form.names and not re.fullmatch(form.names, name)):
            raise _invalid_tools(
                f"tools[{index}].function.name",
                f"this model's call format cannot express the name {tool.name[:64]!r}; a name may "
                "have 1 to 64 letters, digits, underscores and dashes, and begins with a letter",
            )
        if tool.name in known:
            raise _invalid_tools(
                f"tools[{index}].function.name",
                f"two tools have the name {tool.name!r}; names must differ",
            )
        known.add(tool.name)
        checked.append((name, _parameters(index, tool)))
    return checked


def _index(position: int, tool: ToolSchema) -> int:
    return position if tool.index is None else tool.index


def _parameters(index: int, tool: ToolSchema) -> dict[str, Any] | None:
    where = f"tools[{index}].function.parameters"
    if not tool.parameters:
        return None
    try:
        structured = StructuredOutput(StructuredKind.JSON_SCHEMA, tool.parameters)
    except InvalidRequestError as error:
        raise _invalid_tools(where, error.message) from None
    _check_complexity(structured, where)
    try:
        schema = json.loads(tool.parameters)
    except (ValueError, RecursionError) as error:
        raise _invalid_tools(where, f"the schema is not JSON: {error}") from None
    if schema == {}:
        return None
    if not isinstance(schema, dict) or (
        schema.get("type", "object" if "properties" in schema else None) != "object"
    ):
        raise _invalid_tools(
            where, 'the schema must be the JSON schema of an object, with "type": "object"'
        )
    if not isinstance(schema.get("properties", {}), dict):
        raise _invalid_tools(where, "`properties` must be an object whose values are schemas")
    if _SURROGATE.search(json.dumps(schema, ensure_ascii=False)):
        raise _invalid_tools(where, "the schema has half of a surrogate pair, which is no text")
    # Without a type, a value that is no object would fit the schema.
    return {**schema, "type": "object"}


def _check_complexity(structured: StructuredOutput, param: str) -> None:
    try:
        check_complexity(structured)
    except InvalidRequestError as error:
        raise _invalid_tools(param, error.message.removeprefix("structured output: ")) from None


def _invalid_tools(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {why}", reason="INVALID_TOOLS", param=param)


def _tagged_rules(
    plain: str, spaced: str, special_ids: Mapping[str, int], think: ThinkTags
) -> list[str]:
    """Return the start rule, and the rules that it needs, of an answer behind reasoning.

    `plain` and `spaced`: expressions of the answer without reasoning, and directly behind a close
    tag.
    """
    start = f"thought {spaced}"
    if not think.is_open:
        start = f"{plain} | {_expression(think.open_tag, special_ids)} {start}"
    thought = _thought_rules(think.close_tag, special_ids, excluded=[think.close_tag])
    return [f"start: {start}", *thought, f"SPACE: {_SPACE}"]


def _harmony_rules(answer: str, special_ids: Mapping[str, int]) -> list[str]:
    """Return the start rule, and the rules that it needs, of an answer in the harmony format, which
    may begin with a message of reasoning. `answer`: expression of the next message."""
    begin, end = _HARMONY_REASONING
    start = f"start: {answer} | {_expression(begin, special_ids)} thought {answer}"
    return [start, *_thought_rules(end, special_ids, excluded=HARMONY_MARKERS)]


def _thought_rules(
    end: str, special_ids: Mapping[str, int], *, excluded: Sequence[str]
) -> list[str]:
    """Return the rules of `thought`, a text without the texts `excluded`, up to and including
    `end`."""
    expression = _expression(end, special_ids)
    # Output parsers do not distinguish a special token from its text, so the text is excluded, too.
    text = rf"TEXT: /(.|\n)*/ & ~/(?s:.*)({'|'.join(map(_escape, excluded))})(?s:.*)/"
    if expression.startswith("<["):
        return [f"thought: TEXT {expression}", text]
    return [f"thought[suffix={expression}]: TEXT", text]


def _escape(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join(char if char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


def _parts(text: str, special_ids: Mapping[str, int]) -> list[str | int]:
    """Return the parts of a text: ids of the special tokens in it, and the texts around them."""
    if text in special_ids:
        return [special_ids[text]]
    parts: list[str | int] = []
    done = 0
    for marker in MARKER.finditer(text):
        if marker[0] in special_ids:
            parts += [text[done : marker.start()], special_ids[marker[0]]]
            done = marker.end()
    parts.append(text[done:])
    return [part for part in parts if part != ""]


def _expression(text: str, special_ids: Mapping[str, int]) -> str:
    """Return the expression for a text, in which special tokens are references to their ids."""
    return " ".join(
        lark_literal(part) if isinstance(part, str) else f"<[{part}]>"
        for part in _parts(text, special_ids) or [""]
    )


def _regex(pattern: str) -> str:
    """Return a regular expression between slashes."""
    escaped = {"/": r"\/", "\n": r"\n"}
    within = re.sub(
        r"\\.|/|\n", lambda match: escaped.get(match[0], match[0]), pattern, flags=re.DOTALL
    )
    return f"/{within}/"


def _schema(structured: StructuredOutput) -> dict[str, Any]:
    try:
        return parse_schema(structured.text)
    except ValueError as error:
        raise invalid_grammar_error(structured, str(error)) from None


def _json_expression(schema: dict[str, Any], **options: str) -> str:
    """Return the expression for a JSON value, with limited white space. `options` are further
    options of the library."""
    given = schema.get("x-guidance", {})
    given = given if isinstance(given, dict) else {}
    options = {**given, "whitespace_pattern": WHITESPACE, **options}
    text = json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
    # Half of a surrogate pair cannot be encoded: it stays an escape, which the library refuses.
    return "%json " + _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _json_arguments(schema: dict[str, Any]) -> str:
    # A client's separators would make arguments that are not JSON.
    return _json_expression(schema, item_separator=",", key_separator=":")


class _UnsupportedSchemaError(ValueError):
    """A schema that cannot be expressed in keyword arguments of Python."""


_ANNOTATIONS: Final = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"),
        *("description", "examples", "readOnly", "title", "writeOnly", "x-guidance"),
    }
)
"""Keywords that do not restrict values."""
_KEYWORDS: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
"""Keywords that restrict the values of a type, and that can be expressed in Python."""
_STRING: Final = '%json {"type": "string"}'
_INTEGER: Final = "/-?(0|[1-9][0-9]{0,17})/"
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?/"


class _PythonicRules:
    """Rules of keyword arguments of Python whose values fit JSON schemas.

    Strings are written as in JSON, which Python reads as the same strings: the library does not
    write the escapes that differ. Objects have only the properties that their schema names.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """Names of rules by their expansions."""
        self._references: dict[str, str] = {}
        """Names of the rules of referenced parts of the present schema, by reference."""
        self._num_references = 0
        self._pending: list[tuple[str, str]] = []
        """References whose rules are not written yet, with the names of the rules."""
        self._root: dict[str, Any] = {}
        """The present schema."""
        self.lines: list[str] = []
        """All rules."""

    def add_arguments(self, schema: dict[str, Any]) -> str:
        """Add the rules of arguments that fit the schema of an object. Return their expression.

        Raises _UnsupportedSchemaError.
        """
        self._root, self._references = schema, {}
        _check_keywords(schema, {"type", *_KEYWORDS["object"]})
        for name in schema.get("properties", {}):
            is_keyword = keyword.iskeyword(name) or name == "__debug__"
            if is_keyword or not (name.isascii() and name.isidentifier()):
                raise _UnsupportedSchemaError(f"the name {name!r} is no identifier of Python")
        arguments = self._members(schema, lambda name: f"{name}=")
        while self._pending:
            reference, rule = self._pending.pop()
            self.lines.append(f"{rule}: {self._value(self._target(reference))}")
        return arguments

    def _members(self, schema: dict[str, Any], write_key: Callable[[str], str]) -> str:
        """Return the expression of the members of an object, which are in the schema's order."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _UnsupportedSchemaError("`properties` or `required` has a wrong type")
        for name in required:
            if not isinstance(name, str) or name not in properties:
                raise _UnsupportedSchemaError(f"the required member {name!r} is no property")
        firsts: list[str] = []
        """Alternatives of the members from the present property on, by the first member."""
        rest = ""
        """The members from the present property on, each behind a comma."""
        for name in reversed(properties):
            member = f"{lark_literal(write_key(name))} {self._value(properties[name])}"
            if name in required:
                firsts = []
            firsts.append(f"{member} {rest}")
            behind = f'", " {member}' if name in required else f'(", " {member})?'
            rest = self._rule(f"{behind} {rest}")
        if not firsts:
            return lark_literal("")
        return f"({' | '.join(reversed(firsts))}){'' if required else '?'}"

    def _value(self, schema: Any) -> str:
        """Return the expression of the values that fit a schema."""
        if schema is True:
            return self._any()
        if not isinstance(schema, dict):
            raise _UnsupportedSchemaError(f"a schema is {json.dumps(schema)[:64]}")
        if "$ref" in schema:
            _check_keywords(schema, {"$ref"})
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            _check_keywords(schema, {"anyOf"})
            options = schema["anyOf"]
            if not isinstance(options, list) or not options:
                raise _UnsupportedSchemaError("`anyOf` is no list of schemas")
            return self._rule(" | ".join(map(self._value, options)))
        types = _types(schema)
        if "enum" in schema or "const" in schema:
            _check_keywords(schema, {"type", "enum", "const"})
            return self._rule(" | ".join(_constants(schema, types)))
        if not types:
            _check_keywords(schema, ())
            return self._any()
        _check_keywords(schema, {"type"}.union(*(_KEYWORDS[name] for name in types)))
        return self._rule(" | ".join(self._typed_value(name, schema) for name in types))

    def _typed_value(self, name: str, schema: dict[str, Any]) -> str:
        limits = {key: schema[key] for key in schema if key in _KEYWORDS[name]}
        match name:
            case "boolean":
                return '"True" | "False"'
            case "null":
                return '"None"'
            case "array":
                return self._array(limits)
            case "object":
                return self._object(limits)
            case "integer" if not limits:
                return _INTEGER
            case "number" if not limits:
                return _NUMBER
            case _:
                return f"%json {json.dumps({'type': name, **limits}, ensure_ascii=False)}"

    def _array(self, schema: dict[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(fewest, int) or not isinstance(most, int | None) or fewest < 0:
            raise _UnsupportedSchemaError("`minItems` or `maxItems` is no count")
        if most is not None and most < max(fewest, 1):
            if most < fewest:
                raise _UnsupportedSchemaError("`maxItems` is less than `minItems`")
            return '"[]"'
        more = f'(", " {item}){{{max(fewest - 1, 0)},{"" if most is None else most - 1}}}'
        items = item if most == 1 else f"{item} {more}"
        return f'"[" {items} "]"' if fewest else f'"[" ({items})? "]"'

    def _object(self, schema: dict[str, Any]) -> str:
        if schema.get("properties"):
            members = self._members(
                schema, lambda name: f"{json.dumps(name, ensure_ascii=False)}: "
            )
            return f'"{{" {members} "}}"'
        others = schema.get("additionalProperties", True)
        if schema.get("required"):
            raise _UnsupportedSchemaError("a required member is no property")
        if others is False:
            return '"{}"'
        member = f'{_STRING} ": " {self._value(others)}'
        return f'"{{" ({member} (", " {member})*)? "}}"'

    def _any(self) -> str:
        """Return the expression of all values."""
        if "any" not in self._names:
            self._names["any"] = "any"
            self.lines.append(
                f'any: {_STRING} | {_NUMBER} | "True" | "False" | "None" | '
                f"{self._rule(self._array({}))} | {self._rule(self._object({}))}"
            )
        return "any"

    def _rule(self, expansion: str) -> str:
        """Return the name of the rule with this expansion. Nested expressions would exceed the
        library's limit of nesting."""
        if expansion not in self._names:
            self._names[expansion] = name = f"value_{len(self._names)}"
            self.lines.append(f"{name}: {expansion}")
        return self._names[expansion]

    def _reference(self, reference: Any) -> str:
        if not isinstance(reference, str):
            raise _UnsupportedSchemaError("`$ref` is no text")
        if reference not in self._references:
            self._num_references += 1
            self._references[reference] = name = f"reference_{self._num_references}"
            self._pending.append((reference, name))
        return self._references[reference]

    def _target(self, reference: str) -> object:
        """Return the part of the present schema that a reference names."""
        found = find_target(self._root, reference)
        if found is None:
            raise _UnsupportedSchemaError(f"the reference {reference[:64]!r} is not found")
        return found


def _check_keywords(schema: dict[str, Any], allowed: Iterable[str]) -> None:
    """Raise _UnsupportedSchemaError if a schema has other keywords that restrict values."""
    unknown = sorted(schema.keys() - _ANNOTATIONS - set(allowed))
    if unknown:
        raise _UnsupportedSchemaError(f"the keyword {unknown[0]!r} cannot be used here")


def _types(schema: dict[str, Any]) -> list[str]:
    """Return the types that a schema allows; none if it allows all."""
    implied = "object" if "properties" in schema else "array" if "items" in schema else []
    types = schema.get("type", implied)
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(name in _KEYWORDS for name in types):
        raise _UnsupportedSchemaError("`type` is unknown")
    return types


def _constants(schema: dict[str, Any], types: Sequence[str]) -> list[str]:
    """Return the expressions of the values of `enum` and `const` that have one of `types`."""
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        raise _UnsupportedSchemaError("`enum` is no list")
    if "const" in schema:
        const = _python_literal(schema["const"])
        values = [value for value in values if _python_literal(value) == const]
    fitting = [value for value in values if not types or _type_names(value) & set(types)]
    if not fitting:
        raise _UnsupportedSchemaError("no value fits `enum` or `const`")
    return [lark_literal(_python_literal(value)) for value in fitting]


def _type_names(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _python_literal(value: Any) -> str:
    match value:
        case None | True | False:
            return str(value)
        case list():
            return f"[{', '.join(map(_python_literal, value))}]"
        case dict():
            members = (
                f"{json.dumps(key, ensure_ascii=False)}: {_python_literal(each)}"
                for key, each in value.items()
            )
            return f"{{{', '.join(members)}}}"
        case _:
            return json.dumps(value, ensure_ascii=False)
