"""Every answer that a grammar of tool calls allows is read as calls by the format's parser."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.errors import InvalidRequestError
from outrider.grammar import tool_calls as module
from outrider.grammar.matcher_compiler import compile_matcher, load_tokenizer
from outrider.grammar.tool_calls import (
    ThinkTags,
    ToolSchema,
    enforcement_error,
    tool_call_grammar,
    wrap_structured_output,
)
from outrider.spec.structured_output import MAX_STRUCTURE_BYTES, StructuredKind, StructuredOutput
from outrider.text.output_parsers import harmony, json_call
from outrider.text.output_parsers.events import (
    ArgumentsDelta,
    ContentDelta,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    ToolCallStart,
    merge_events,
)
from outrider.text.output_parsers.formats import TOOL_FORMATS
from outrider.text.output_parsers.reasoning import TaggedReasoningParser

BAR, LOW = "\uff5c", "\u2581"
FORMATS = sorted(TOOL_FORMATS)
JSON_FORMATS = sorted(set(TOOL_FORMATS) - {"pythonic"})
TAGS = ("<think>", "</think>")
END = "<|endoftext|>"
MARKERS = [END, *TAGS, *dict.fromkeys(m for f in TOOL_FORMATS.values() for m in f.markers)]


def deepseek(name: str) -> str:
    return f"<{BAR}{name.replace(' ', LOW)}{BAR}>"


def schema(properties: dict[str, Any], *required: str, **others: Any) -> str:
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(required), **others}
    )


TOOLS = [
    ToolSchema(
        name="get_weather",
        parameters=schema(
            {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}}, "city"
        ),
    ),
    # A name that another one begins with, and a tool without parameters.
    ToolSchema(name="get", parameters=""),
]
PARIS = '{"city": "Paris", "days": 2}'
CALLS = [
    ToolCallStart(0, "get_weather"),
    ArgumentsDelta(0, PARIS),
    ToolCallStart(1, "get"),
    ArgumentsDelta(1, "{}"),
]
SECTION = (deepseek("tool calls begin"), deepseek("tool calls end"))
V3 = f"{deepseek('tool call begin')}function{deepseek('tool sep')}"
V31 = deepseek("tool call begin")
HARMONY = "<|channel|>commentary to=functions."
HARMONY_END = " <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"


@dataclass(frozen=True)
class Example:
    """Two calls in a format, in parts: text before and after all calls, text between them."""

    format_name: str
    first: str
    calls: tuple[str, str]
    between: str
    last: str
    is_mistral_11: bool = False

    @property
    def one(self) -> str:
        return self.first + self.calls[0] + self.last

    @property
    def two(self) -> str:
        return self.first + self.between.join(self.calls) + self.last


def json_call_text(name: str, key: str, arguments: str) -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def both(before: str, behind_name: str, end: str) -> tuple[str, str]:
    first, second = (("get_weather", PARIS), ("get", "{}"))
    return (
        f"{before}{first[0]}{behind_name}{first[1]}{end}",
        f"{before}{second[0]}{behind_name}{second[1]}{end}",
    )


EXAMPLES = [
    Example(
        "hermes",
        "",
        both('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        "\n",
        "",
    ),
    Example("llama3_json", "", both('{"name": "', '", "parameters": ', "}"), "; ", ""),
    Example(
        "llama3_json", "<|python_tag|>", both('{"name": "', '", "parameters": ', "}"), "; ", ""
    ),
    Example("mistral", "[TOOL_CALLS][", both('{"name": "', '", "arguments": ', "}"), ", ", "]"),
    Example("mistral", "[TOOL_CALLS] [", both('{"name": "', '", "arguments": ', "}"), ", ", "]"),
    Example("mistral", "", both("[TOOL_CALLS]", "[ARGS]", ""), "", "", is_mistral_11=True),
    Example(
        "mistral",
        "",
        both("[TOOL_CALLS]", "[CALL_ID]a1B2c3D4e[ARGS]", ""),
        "",
        "",
        is_mistral_11=True,
    ),
    *(
        Example("granite", f"{marker}[", both('{"name": "', '", "arguments": ', "}"), ", ", "]")
        for marker in ("<|tool_call|>", "<tool_call>", "<|tool_call|> ")
    ),
    Example(
        "deepseek_v3",
        SECTION[0],
        both(V3, "\n```json\n", f"\n```{deepseek('tool call end')}"),
        "",
        SECTION[1],
    ),
    Example(
        "deepseek_v3",
        SECTION[0],
        both(V3, "\n```json\n", f"\n```{deepseek('tool call end')}"),
        "\n",
        SECTION[1],
    ),
    Example(
        "deepseek_v31",
        SECTION[0],
        both(V31, deepseek("tool sep"), deepseek("tool call end")),
        "",
        SECTION[1],
    ),
    Example("openai", "", both(HARMONY, HARMONY_END, "<|call|>"), "<|start|>assistant", ""),
    Example("openai", ANALYSIS, both(HARMONY, HARMONY_END, "<|call|>"), "<|start|>assistant", ""),
    *(
        Example(
            "openai",
            before,
            both(" to=functions.", f"<|channel|>commentary{HARMONY_END}", "<|call|>"),
            "<|start|>assistant",
            "",
        )
        for before in ("", ANALYSIS)
    ),
    Example("pythonic", "[", ('get_weather(city="Paris", days=2)', "get()"), ", ", "]"),
]


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level tokenizer with merges, and the grammar library's tokenizer made of it."""

    tokenizer: Tokenizer
    library: LLTokenizer
    special_ids: dict[str, int]
    size: int

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def spelled(self, text: str) -> list[int]:
        """The text in ordinary tokens, although it may be that of a special token."""
        return [token for char in text for token in self.ids(char)]

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def specials_of(self, example: Example) -> dict[str, int]:
        is_left_out = example.format_name == "mistral" and not example.is_mistral_11
        return {
            text: token
            for text, token in self.special_ids.items()
            if not (is_left_out and text == "[ARGS]")
        }

    def compile(self, grammar: str | StructuredOutput) -> LLMatcher:
        if isinstance(grammar, str):
            grammar = StructuredOutput(StructuredKind.GRAMMAR, grammar)
        return compile_matcher(self.library, grammar)

    def accepts(self, matcher: LLMatcher, text: str | list[int]) -> bool:
        """Whether the matcher allows each token in turn, and then the end."""
        matcher = matcher.deep_copy()
        for token in self.ids(text) if isinstance(text, str) else text:
            if not self.mask(matcher)[token]:
                return False
            assert matcher.consume_token(token)
        assert matcher.is_accepting() == self.mask(matcher)[0]
        return matcher.is_accepting()

    def accepts_spelled(self, matcher: LLMatcher, text: str) -> bool:
        """Whether the matcher allows a text in ordinary tokens. Where it allows only one text, it
        allows only one way to spell it."""
        matcher, rest = matcher.deep_copy(), text.encode()
        special = {0, *self.special_ids.values()}
        while rest:
            allowed = set(np.flatnonzero(self.mask(matcher)).tolist()) - special
            texts = {token: self.library.decode_bytes([token]) for token in allowed}
            fitting = [token for token in allowed if rest.startswith(texts[token])]
            if not fitting:
                return False
            token = max(fitting, key=lambda token: len(texts[token]))
            assert matcher.consume_token(token)
            rest = rest[len(texts[token]) :]
        return bool(self.mask(matcher)[0])

    def mask(self, matcher: LLMatcher) -> NDArray[np.uint8]:
        """The allowed tokens; entry 0 is the end."""
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        return np.unpackbits(words, bitorder="little")[: self.size]


def make_vocabulary(directory: Path, specials: list[str]) -> Vocabulary:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=6,
        show_progress=False,
    )
    corpus = [example.two for example in EXAMPLES]
    tokenizer.train_from_iterator([*corpus, "\n\n[1, 2.5, -3e4, true, false, null]"] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    library = load_tokenizer((directory / "tokenizer.json").read_text(), vocab_size=size)
    ids = {text: token for text in specials if (token := tokenizer.token_to_id(text))}
    return Vocabulary(tokenizer, library, ids, size)


@pytest.fixture(scope="module", params=["special tokens", "plain text"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer in which all markers are special tokens, and one in which none is."""
    specials = MARKERS if request.param == "special tokens" else [END]
    return make_vocabulary(tmp_path_factory.mktemp("tokenizer"), specials)


def parse(parser: OutputParser, *pieces: str) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push_text(piece)
    return merge_events(events + parser.flush())


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(1, 40))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def tags(*, is_open: bool) -> ThinkTags:
    return ThinkTags(open_tag=TAGS[0], close_tag=TAGS[1], is_open=is_open)


def test_formats_are_those_of_the_output_parsers() -> None:
    assert module.CALL_FORMATS.keys() == TOOL_FORMATS.keys()
    assert {example.format_name for example in EXAMPLES} == TOOL_FORMATS.keys()
    assert module.MAX_NAME_CHARS == json_call.MAX_NAME_CHARS
    assert harmony.MARKERS == module.HARMONY_MARKERS
    for name, form in TOOL_FORMATS.items():
        assert all(module.MARKER.fullmatch(marker) for marker in form.markers), name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: repr(each.first + each.between))
@pytest.mark.parametrize("parallel", [False, True])
def test_calls_in_the_format_are_allowed_and_read(
    vocabulary: Vocabulary, example: Example, parallel: bool
) -> None:
    if example.is_mistral_11 and "[ARGS]" not in vocabulary.special_ids:
        pytest.skip("models without the special token write calls as JSON")
    matcher = vocabulary.compile(
        tool_call_grammar(
            example.format_name,
            TOOLS,
            parallel=parallel,
            special_ids=vocabulary.specials_of(example),
            think=None,
        )
    )
    assert vocabulary.accepts(matcher, example.one)
    assert vocabulary.accepts(matcher, example.two) == parallel
    events = parse(TOOL_FORMATS[example.format_name].make(), example.two)
    if example.first == ANALYSIS:
        assert events.pop(0) == ReasoningDelta("Hm.\n")
    assert events == CALLS
    most = example.first + example.between.join([example.calls[1]] * 32) + example.last
    assert vocabulary.accepts(matcher, most) == parallel
    extra = example.first + example.between.join([example.calls[1]] * 33) + example.last
    assert not vocabulary.accepts(matcher, extra)
    for wrong in (
        "",
        example.first + example.last,
        f"I call. {example.one}",
        f"{example.one} ",
        example.one.replace("get_weather", "get_whether"),
        example.one.replace("get_weather", "get"),
        example.one.replace("city", "town"),
        example.one.replace("2", "0"),
        example.one.replace("2", '"2"'),
        example.one[:-1],
        "Hello.",
    ):
        assert not vocabulary.accepts(matcher, wrong), wrong


def test_the_text_of_a_special_token_is_no_marker(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.compile(
        tool_call_grammar(
            "hermes", TOOLS, parallel=True, special_ids=vocabulary.special_ids, think=None
        )
    )
    is_text = TAGS[0] not in vocabulary.special_ids
    assert vocabulary.accepts_spelled(matcher, EXAMPLES[0].one) == is_text


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: repr(each.first + each.between))
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_precedes_calls(vocabulary: Vocabulary, example: Example, is_open: bool) -> None:
    if example.format_name == "openai":
        pytest.skip("reasoning is in a channel of its own")
    if example.is_mistral_11 and "[ARGS]" not in vocabulary.special_ids:
        pytest.skip("models without the special token write calls as JSON")
    matcher = vocabulary.compile(
        tool_call_grammar(
            example.format_name,
            TOOLS,
            parallel=True,
            special_ids=vocabulary.specials_of(example),
            think=tags(is_open=is_open),
        )
    )
    begin = "" if is_open else "<think>"
    for reasoning in ("\nHm <tool>, [x] {} </thin\n", "", "é\n\n"):
        for space in ("", "\n\n", " \n \n"):
            text = f"{begin}{reasoning}</think>{space}{example.two}"
            assert vocabulary.accepts(matcher, text), text
            parser = TaggedReasoningParser(
                *TAGS, is_open=is_open, content=TOOL_FORMATS[example.format_name].make()
            )
            thought = [ReasoningDelta(reasoning.strip())] if reasoning else []
            assert parse(parser, *text) == [*thought, *CALLS]
    assert vocabulary.accepts(matcher, example.two) != is_open
    for wrong in (
        f"{begin}Hm.",
        f"{begin}Hm.</think>",
        f"{begin}Hm.</think>Hm.{example.two}",
        f"{begin}Hm.</think>\n\n\n\n\n{example.two}",
    ):
        assert not vocabulary.accepts(matcher, wrong), wrong
    close = vocabulary.special_ids.get("</think>")
    if close is not None:
        for text in ("a </think b", "a </think> b"):
            ids = [*vocabulary.ids(begin), *vocabulary.spelled(text), close]
            ids += vocabulary.ids(example.two)
            assert vocabulary.accepts(matcher, ids) == ("</think>" not in text)


WRAPPED = [
    (
        StructuredOutput(
            StructuredKind.JSON_SCHEMA,
            schema({"a": {"$ref": "#/$defs/A"}}, "a", **{"$defs": {"A": {"enum": [1, "é"]}}}),
        ),
        ['{"a": 1}', '{ "a" :\n"é" }'],
        ["{}", '{"a": 2}', "1", '{"a"' + " " * 40 + ":1}"],
    ),
    (StructuredOutput(StructuredKind.JSON_SCHEMA, "true"), ["1", "[]"], ["", "x"]),
    (StructuredOutput(StructuredKind.JSON_OBJECT), ["{}", '{"a": [1]}'], ["[]", ""]),
    (
        StructuredOutput(StructuredKind.REGEX, "a/b\\/[/\n]|\nq+|(?x: z ) # z"),
        ["a/b//", "a/b/\n", "\nqq", "z # z"],
        ["", "a", "a\\/b"],
    ),
    (StructuredOutput(StructuredKind.REGEX, "x*"), ["", "xx"], ["y"]),
    (
        StructuredOutput(
            StructuredKind.GRAMMAR,
            'start: answer WORD /[a-z]{1,2}\\}/\nanswer: "a" | "{" # }\n'
            'WORD: "b"\n%ignore / /\n# }',
        ),
        ["a b cd}", "{bc}"],
        ["", "a", "bb"],
    ),
]


@pytest.mark.parametrize(("structured", "right", "wrong"), WRAPPED)
@pytest.mark.parametrize("is_open", [False, True])
def test_structured_output_begins_behind_the_reasoning(
    vocabulary: Vocabulary,
    structured: StructuredOutput,
    right: list[str],
    wrong: list[str],
    is_open: bool,
) -> None:
    wrapped = wrap_structured_output(
        structured, special_ids=vocabulary.special_ids, think=tags(is_open=is_open)
    )
    matcher, plain = vocabulary.compile(wrapped), vocabulary.compile(structured)
    begin = "Hm. {}" if is_open else "<think>\nHm. {}"
    for text in [*right, *wrong]:
        assert vocabulary.accepts(plain, text) == (text in right)
        assert vocabulary.accepts(matcher, text) == (text in right and not is_open)
        for space in ("", "\n\n", "\n\n  "):
            answer = f"{begin}</think>{space}{text}"
            assert vocabulary.accepts(matcher, answer) == (text in right), answer
        assert not vocabulary.accepts(matcher, f"{begin}{text}")


@pytest.mark.parametrize(("structured", "right", "wrong"), WRAPPED)
def test_structured_output_is_the_final_message_in_harmony(
    vocabulary: Vocabulary, structured: StructuredOutput, right: list[str], wrong: list[str]
) -> None:
    final = "<|channel|>final<|message|>"
    constrained = "<|channel|>final <|constrain|>json<|message|>"
    is_json = structured.kind in (StructuredKind.JSON_SCHEMA, StructuredKind.JSON_OBJECT)
    think = ThinkTags(open_tag="", close_tag=final, is_open=True)
    matcher = vocabulary.compile(
        wrap_structured_output(structured, special_ids=vocabulary.special_ids, think=think)
    )
    for text in [*right, *wrong]:
        for begin in ("", ANALYSIS):
            answer = f"{begin}{final}{text}"
            assert vocabulary.accepts(matcher, answer) == (text in right), answer
            if text in right and text:
                content = parse(harmony.HarmonyParser(), answer)[-1]
                assert content == ContentDelta(text)
            accepted = vocabulary.accepts(matcher, f"{begin}{constrained}{text}")
            assert accepted == (is_json and text in right)
        assert not vocabulary.accepts(matcher, text)


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(StructuredKind.JSON_SCHEMA, "false"),
        StructuredOutput(StructuredKind.JSON_SCHEMA, "{"),
        StructuredOutput(StructuredKind.JSON_SCHEMA, '{"minimum": 0.12345678901234567}'),
        StructuredOutput(
            StructuredKind.GRAMMAR, "start: a0\n" + "".join(f'a{n}: "x"\n' for n in range(5_000))
        ),
        StructuredOutput(StructuredKind.REGEX, "(" * 200 + ")" * 200),
        StructuredOutput(StructuredKind.REGEX, "a" * MAX_STRUCTURE_BYTES),
    ],
    ids=range(6),
)
def test_a_structured_output_beyond_the_limits_is_refused(structured: StructuredOutput) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        wrap_structured_output(structured, special_ids={}, think=tags(is_open=True))
    assert refused.value.reason == "INVALID_STRUCTURE"


def refusal(format_name: str, *tools: ToolSchema) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        tool_call_grammar(format_name, tools, parallel=True, special_ids={}, think=None)
    assert refused.value.reason == "INVALID_TOOLS"
    assert refused.value.message.startswith(f"{refused.value.param}: ")
    return refused.value


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("true", "of an object"),
        ('{"type": "string"}', "of an object"),
        ('{"type": ["object", "null"]}', "of an object"),
        ('{"anyOf": []}', "of an object"),
        ('{"type": "object", "properties": []}', "`properties` must be"),
        ('{"type": "object", "title": "\\ud800"}', "surrogate"),
        (schema({"a": {"minimum": 0.12345678901234567}}), "cannot be kept exactly"),
        (schema({"a": {"maximum": float("nan")}}), "must be finite"),
        (schema({"a": json.loads("[" * 150 + "]" * 150)}), "at most 128 arrays"),
        (schema({"a": {"allOf": [{"$ref": "#/properties/a"}]}}), "leads only to itself"),
        (json.dumps({"type": "object", "title": "x" * MAX_STRUCTURE_BYTES}), "at most 262144"),
    ],
)
@pytest.mark.parametrize("format_name", ["hermes", "pythonic"])
def test_an_invalid_schema_is_refused(format_name: str, parameters: str, message: str) -> None:
    error = refusal(format_name, TOOLS[1], ToolSchema(name="f", parameters=parameters))
    assert error.param == "tools[1].function.parameters"
    assert message in error.message


@pytest.mark.parametrize(
    ("format_name", "name"),
    [
        ("hermes", ""),
        ("hermes", "a\nb"),
        ("hermes", "x" * 65),
        ("hermes", '"' * 128),
        ("hermes", "\ud800"),
        ("deepseek_v3", "a b"),
        ("deepseek_v31", "a<b"),
        ("openai", "a<|call|>"),
        ("pythonic", "1a"),
        ("pythonic", "a(b"),
    ],
)
def test_a_name_that_a_format_cannot_express_is_refused(format_name: str, name: str) -> None:
    error = refusal(format_name, TOOLS[1], ToolSchema(name=name, parameters=""))
    assert error.param == "tools[1].function.name"


def test_other_invalid_tools_are_refused() -> None:
    assert refusal("hermes").param == "tools"
    assert refusal("hermes", TOOLS[1], TOOLS[1]).param == "tools[1].function.name"
    large = json.dumps({"type": "object", "title": "x" * 10_000})
    error = refusal("hermes", *(ToolSchema(name=f"f{n}", parameters=large) for n in range(30)))
    assert error.param == "tools" and "all tools together must be at most 262144" in error.message
    with pytest.raises(InvalidRequestError, match="hermes, llama3_json") as refused:
        tool_call_grammar("none", TOOLS, parallel=True, special_ids={}, think=None)
    assert refused.value.reason == "INVALID_CONFIG"


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"from": {"type": "string"}}, "no identifier"),
        ({"a-b": {"type": "string"}}, "no identifier"),
        ({"\u00e9": {"type": "string"}}, "no identifier"),
        ({"a": {"type": "array", "items": {"oneOf": []}}}, "'oneOf'"),
        ({"a": {"type": "array", "prefixItems": []}}, "'prefixItems'"),
        ({"a": {"type": "object", "minProperties": 1}}, "'minProperties'"),
        ({"a": {"type": "object", "required": ["x"]}}, "is no property"),
        ({"a": {"type": "integer", "minLength": 1}}, "'minLength'"),
        ({"a": {"$ref": "#/$defs/B"}}, "not found"),
        ({"a": {"$ref": "http://x/y"}}, "not found"),
        ({"a": {"type": "strnig"}}, "`type`"),
        ({"a": {"type": "array", "minItems": 2, "maxItems": 1}}, "less than"),
        ({"a": {"enum": ["x"], "type": "integer"}}, "no value fits"),
        ({"a": False}, "a schema is false"),
    ],
)
def test_a_schema_that_python_literals_cannot_express_is_refused(
    properties: dict[str, Any], message: str
) -> None:
    error = refusal("pythonic", TOOLS[1], ToolSchema(name="f", parameters=schema(properties)))
    assert error.param == "tools[1].function.parameters"
    assert message in error.message and "keyword arguments" in error.message


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/N"}},
    "required": ["v"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("properties", "right", "wrong"),
    [
        ({"a": {"type": "boolean"}}, ["f()", "f(a=True)", "f(a=False)"], ["f(a=true)", "f(a=1)"]),
        ({"a": {"type": ["null", "integer"]}}, ["f(a=None)", "f(a=-12)"], ["f(a=01)", "f(a=1.5)"]),
        ({"a": {"type": "number"}}, ["f(a=1)", "f(a=-1.5e+9)"], ["f(a=1e999)", "f(a=.5)"]),
        ({"a": {"type": "number", "minimum": 1.5}}, ["f(a=1.5)"], ["f(a=1)"]),
        ({"a": {"type": "string", "maxLength": 2}}, ['f(a="é\\n")'], ['f(a="abc")', "f(a='a')"]),
        (
            {"a": {"enum": ["x", True, None, [1.5, {"k": False}]]}},
            ['f(a="x")', "f(a=True)", "f(a=None)", 'f(a=[1.5, {"k": False}])'],
            ["f(a=1)"],
        ),
        ({"a": {"const": 3}}, ["f(a=3)"], ["f(a=4)"]),
        (
            {"a": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
            ["f(a=[True])", "f(a=[True, False])"],
            ["f(a=[])", "f(a=[True, True, True])"],
        ),
        ({"a": {"type": "array", "maxItems": 0}}, ["f(a=[])"], ["f(a=[1])"]),
        (
            {"a": {"type": "array"}},
            ["f(a=[])", 'f(a=[1, [None], {"x": [True]}, "y"])'],
            ["f(a=[true])"],
        ),
        (
            {"a": {"type": "object", "additionalProperties": {"type": "integer"}}},
            ["f(a={})", 'f(a={"x y": 1, "z": 2})'],
            ['f(a={"x": ""})'],
        ),
        (
            {"a": {"$ref": "#/$defs/N"}},
            ['f(a={"v": 1})', 'f(a={"v": 1, "next": {"v": 2, "next": {"v": 3}}})'],
            ["f(a={})", 'f(a={"next": {"v": 1}})'],
        ),
        (
            {"a": {}, "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/N"}]}, "c": True},
            [
                "f(a=1, b=None, c=None)",
                "f(b=None)",
                'f(b={"v": 1}, c="")',
                "f(a=[], c=2)",
                "f(c=1)",
            ],
            ["f(b=None, a=1)", "f(a=1, )", "f(, a=1)"],
        ),
    ],
)
def test_keyword_arguments_fit_their_schema(
    vocabulary: Vocabulary, properties: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    text = schema(properties, **{"$defs": {"N": NODE}})
    matcher = vocabulary.compile(
        tool_call_grammar(
            "pythonic",
            [ToolSchema(name="f", parameters=text)],
            parallel=False,
            special_ids=vocabulary.special_ids,
            think=None,
        )
    )
    for call in right:
        assert vocabulary.accepts(matcher, f"[{call}]"), call
        check_calls("pythonic", f"[{call}]", {"f": text})
    for call in wrong:
        assert not vocabulary.accepts(matcher, f"[{call}]"), call


def test_references_are_relative_to_the_schema_of_their_tool(vocabulary: Vocabulary) -> None:
    tools = [
        ToolSchema(
            name=f"f{n}",
            parameters=schema({"a": {"$ref": "#/$defs/A"}}, "a", **{"$defs": {"A": {"const": n}}}),
        )
        for n in range(2)
    ]
    for name, text in (
        ("llama3_json", '{{"name": "f{0}", "parameters": {{"a": {1}}}}}'),
        ("pythonic", "[f{0}(a={1})]"),
    ):
        grammar = tool_call_grammar(name, tools, parallel=False, special_ids={}, think=None)
        matcher = vocabulary.compile(grammar)
        for tool in range(2):
            for value in range(2):
                accepted = vocabulary.accepts(matcher, text.format(tool, value))
                assert accepted == (tool == value)


def test_odd_names_are_written_as_json(vocabulary: Vocabulary) -> None:
    names = ['a"b\\c', "start", "tool_0", "日本 x/y", "</tool_call>", "<[1]>", "'"]
    tools = [ToolSchema(name=name, parameters="{}") for name in names]
    matcher = vocabulary.compile(
        tool_call_grammar("llama3_json", tools, parallel=True, special_ids={}, think=None)
    )
    for name in names:
        text = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {{}}}}'
        assert vocabulary.accepts_spelled(matcher, text), text
        events = parse(TOOL_FORMATS["llama3_json"].make(), text)
        assert events == [ToolCallStart(0, name), ArgumentsDelta(0, "{}")]


def random_schema(rng: random.Random, depth: int, definitions: list[str]) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "bounded", "option"]
    kinds += ["array", "object"] * (depth < 3) + ["reference"] * bool(definitions)
    match rng.choice(kinds):
        case "enum":
            return {"enum": rng.sample(["a", "b c", 'q"', "é", 1, -2.5, True, None], 3)}
        case "bounded":
            low = rng.randrange(-50, 50)
            name = rng.choice(["integer", "number"])
            return {"type": name, "minimum": low, "exclusiveMaximum": low + rng.randrange(2, 99)}
        case "option":
            return {"anyOf": [{"type": "null"}, random_schema(rng, depth + 1, definitions)]}
        case "array":
            items = random_schema(rng, depth + 1, definitions)
            return {"type": "array", "items": items, "minItems": rng.randrange(2), "maxItems": 3}
        case "object":
            return random_object(rng, depth + 1, definitions)
        case "reference":
            return {"$ref": f"#/$defs/{rng.choice(definitions)}"}
        case "string":
            return rng.choice([{"type": "string"}, {"type": "string", "maxLength": 5}])
        case kind:
            return {"type": kind, "description": 'A { " / # value'}


def random_object(rng: random.Random, depth: int, definitions: list[str]) -> dict[str, Any]:
    names = rng.sample(["city", "days", "x1", "units", "_z", "option"], rng.randrange(5))
    properties = {name: random_schema(rng, depth, definitions) for name in names}
    found: dict[str, Any] = {"type": "object", "properties": properties}
    required = [name for name in names if rng.random() < 0.5]
    if required:
        found["required"] = required
    # Other properties are allowed by default, and make random answers long.
    if rng.random() < 0.9:
        found["additionalProperties"] = False
    return found


def random_tools(seed: int) -> list[ToolSchema]:
    rng = random.Random(seed)
    tools: list[ToolSchema] = []
    for index in range(rng.randrange(1, 5)):
        definitions = rng.sample(["A", "B"], rng.randrange(3))
        parameters = random_object(rng, 0, definitions)
        if definitions:
            parameters["$defs"] = {name: random_schema(rng, 2, []) for name in definitions}
        text = "" if rng.random() < 0.1 else json.dumps(parameters)
        tools.append(ToolSchema(name=f"tool{'_x' * index}", parameters=text))
    return tools


def random_answer(
    vocabulary: Vocabulary, matcher: LLMatcher, rng: random.Random, begin: str
) -> str | None:
    """The text of a random path through the grammar from a text on; None if it does not end
    soon."""
    texts = [vocabulary.text([token]) for token in range(vocabulary.size)]
    closing = np.array([any(char in text for char in '"}])<') for text in texts])
    output = vocabulary.ids(begin)
    assert matcher.try_consume_tokens(output) == len(output)
    while len(output) < 300:
        mask = vocabulary.mask(matcher)
        if mask[0] and rng.random() < 0.7:
            return vocabulary.text(output)
        mask[0] = 0
        for allowed in (mask & closing, mask):
            if allowed.any() and rng.random() < 0.6:
                mask = allowed
        if not mask.any():
            return vocabulary.text(output)
        token = int(rng.choice(np.flatnonzero(mask).tolist()))
        assert matcher.consume_token(token)
        output.append(token)
    return None


def check_calls(
    format_name: str, text: str, schemas: dict[str, str], think: ThinkTags | None = None
) -> None:
    """Check that an answer is calls that fit their schemas, however it is cut."""

    def make() -> OutputParser:
        content = TOOL_FORMATS[format_name].make()
        if think is None:
            return content
        return TaggedReasoningParser(
            think.open_tag, think.close_tag, is_open=think.is_open, content=content
        )

    events = parse(make(), text)
    rng = random.Random(len(text))
    for _ in range(5):
        assert parse(make(), *cut(text, rng)) == events
    assert parse(make(), *text) == events
    if events and isinstance(events[0], ReasoningDelta):
        assert think is not None or format_name == "openai"
        del events[0]
    assert events, text
    for index, (start, arguments) in enumerate(zip(events[::2], events[1::2], strict=True)):
        assert isinstance(start, ToolCallStart) and start.index == index, (text, events)
        assert isinstance(arguments, ArgumentsDelta) and arguments.index == index, (text, events)
        value = json.loads(arguments.text)
        jsonschema.validate(value, json.loads(schemas[start.name] or '{"maxProperties": 0}'))


def walk(vocabulary: Vocabulary, format_name: str, seeds: Sequence[int]) -> None:
    num_ended = 0
    for seed in seeds:
        tools, rng = random_tools(seed), random.Random(seed)
        think = rng.choice([None, tags(is_open=True), tags(is_open=False)])
        think = None if format_name == "openai" else think
        grammar = tool_call_grammar(
            format_name,
            tools,
            parallel=rng.random() < 0.5,
            special_ids=vocabulary.special_ids,
            think=think,
        )
        matcher = vocabulary.compile(grammar)
        begins = [""]
        if format_name == "openai":
            begins = ["", ANALYSIS]
        elif think is not None:
            begins = ["Hm.</think>"] if think.is_open else ["", "<think>Hm.\n</think>\n\n"]
        for _ in range(3):
            text = random_answer(vocabulary, matcher.deep_copy(), rng, rng.choice(begins))
            if text is not None:
                num_ended += 1
                schemas = {tool.name: tool.parameters for tool in tools}
                check_calls(format_name, text, schemas, think)
    assert num_ended >= 1.5 * len(seeds)


@pytest.mark.parametrize("format_name", FORMATS)
def test_random_answers_are_read_as_calls_that_fit(
    vocabulary: Vocabulary, format_name: str
) -> None:
    many = format_name in ("hermes", "llama3_json")
    walk(vocabulary, format_name, range(60 if many else 20))


@pytest.mark.parametrize("format_name", FORMATS)
def test_many_tools_are_within_the_limits(vocabulary: Vocabulary, format_name: str) -> None:
    rng = random.Random(1)
    tools = [
        ToolSchema(name=f"tool_{n}", parameters=json.dumps(random_object(rng, 0, [])))
        for n in range(60)
    ]
    grammar = tool_call_grammar(
        format_name,
        tools,
        parallel=True,
        special_ids=vocabulary.special_ids,
        think=tags(is_open=False),
    )
    vocabulary.compile(grammar)


def test_errors_name_a_tool_by_its_index_in_the_request() -> None:
    tool = ToolSchema(name="look", parameters='{"type": "array"}', index=7)
    with pytest.raises(InvalidRequestError) as refused:
        tool_call_grammar("hermes", [tool], parallel=False, special_ids={}, think=None)
    assert refused.value.param == "tools[7].function.parameters"


@pytest.mark.parametrize("format_name", ["hermes", "openai"])
@pytest.mark.parametrize(
    ("member", "why"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
    ],
)
def test_an_error_of_the_compiler_names_the_tool_and_not_the_grammar(
    vocabulary: Vocabulary, format_name: str, member: object, why: str
) -> None:
    tools = [
        ToolSchema(name="f", parameters="", index=3),
        ToolSchema(name="g", parameters=schema({"a": member}), index=7),
    ]
    special_ids = vocabulary.special_ids
    grammar = tool_call_grammar(
        format_name, tools, parallel=True, special_ids=special_ids, think=None
    )
    with pytest.raises(InvalidRequestError) as refused:
        compile_matcher(vocabulary.library, StructuredOutput(StructuredKind.GRAMMAR, grammar))
    error = enforcement_error(grammar, tools, refused.value)
    assert (error.reason, error.param) == ("INVALID_TOOLS", "tools")
    assert error.message.startswith("the schema of the tool 'g' cannot be enforced: ")
    assert error.message.endswith(why)
    # Without a line, the error is that of all tools.
    other = InvalidRequestError("structured output: it is too slow", reason="INVALID_STRUCTURE")
    error = enforcement_error(grammar, tools, other)
    assert error.message == "the schemas of the tools cannot be enforced: it is too slow"
