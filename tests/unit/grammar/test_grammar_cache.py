"""Compiling forms: once each, bounded, refused with a reason."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.grammar import grammar_cache as module
from outrider.grammar import matcher_compiler
from outrider.grammar.grammar_cache import GrammarCache
from outrider.spec.structured_output import MAX_STRUCTURE_BYTES, StructuredKind, StructuredOutput
from tests.mask_limits import LONG_MASKS


@pytest.fixture
def grammars(tiny_target: Path) -> GrammarCache:
    found = GrammarCache.from_tokenizer_file(
        tiny_target / "tokenizer.json", vocab_size=384, masks=LONG_MASKS
    )
    assert found is not None
    return found


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(StructuredKind.REGEX, text)


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (StructuredKind.JSON_SCHEMA, "{", "it is not JSON"),
        (StructuredKind.JSON_SCHEMA, "[]", "object or a boolean"),
        (StructuredKind.JSON_SCHEMA, '{"type": "strange"}', "Invalid type"),
        (StructuredKind.JSON_SCHEMA, '{"$ref": "#/nowhere"}', "does not exist"),
        (StructuredKind.JSON_SCHEMA, "false", "nothing fits"),
        (StructuredKind.REGEX, "[", "unclosed"),
        (StructuredKind.REGEX, "(?<!x)y", "look-behind"),
        (StructuredKind.GRAMMAR, "nonsense", "Expected"),
        (StructuredKind.GRAMMAR, "start: other", "unknown name"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    grammars: GrammarCache, kind: StructuredKind, text: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as refused:
        grammars.compile_grammar(StructuredOutput(kind, text))
    assert refused.value.reason == "INVALID_STRUCTURE" and len(refused.value.message) < 700
    assert grammars.get_cached(StructuredOutput(kind, text)) is None


def test_what_would_take_too_much_work_is_refused(
    grammars: GrammarCache, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = GrammarCache((tiny_target / "tokenizer.json").read_text(), vocab_size=384)
    large = {"enum": [{f"key{n}": n} for n in range(300)]}
    schema = StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(large))
    grammars.compile_grammar(schema)
    monkeypatch.setattr(matcher_compiler, "MAX_GRAMMAR_SYMBOLS", 100)
    with pytest.raises(InvalidRequestError, match="grammar size|too large|limit"):
        fresh.compile_grammar(schema)
    deep = "[" * 100_000
    with pytest.raises(InvalidRequestError, match="not JSON|nested"):
        grammars.compile_grammar(StructuredOutput(StructuredKind.JSON_SCHEMA, deep))


def test_a_schema_may_be_true(grammars: GrammarCache) -> None:
    assert grammars.compile_grammar(StructuredOutput(StructuredKind.JSON_SCHEMA, "true"))


def test_a_form_is_compiled_once_and_the_oldest_are_dropped(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CACHED_GRAMMARS", 2)
    first = grammars.compile_grammar(regex("a+"))
    assert grammars.compile_grammar(regex("a+")) is first is grammars.get_cached(regex("a+"))
    grammars.compile_grammar(regex("b+"))
    grammars.get_cached(regex("a+"))
    grammars.compile_grammar(regex("c+"))
    assert grammars.get_cached(regex("b+")) is None
    assert grammars.get_cached(regex("a+")) is first


def test_threads_share_what_is_compiled(grammars: GrammarCache) -> None:
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(grammars.compile_grammar(regex("x{3}"))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 6 and len(set(map(id, found))) == 1


def test_there_are_none_without_a_tokenizer_or_with_one_that_cannot_be_read(tmp_path: Path) -> None:
    assert GrammarCache.from_tokenizer_file(tmp_path / "tokenizer.json", vocab_size=384) is None
    broken = GrammarCache('{"no": "tokenizer"}', vocab_size=384)
    with pytest.raises(FailedPreconditionError, match="with this tokenizer"):
        broken.compile_grammar(regex("a"))


def test_a_form_says_what_it_needs() -> None:
    with pytest.raises(InvalidRequestError, match="needs a text"):
        StructuredOutput(StructuredKind.REGEX)
    with pytest.raises(InvalidRequestError, match="takes no text"):
        StructuredOutput(StructuredKind.JSON_OBJECT, "{}")
    with pytest.raises(InvalidRequestError, match="at most 262144 bytes"):
        regex("x" * (MAX_STRUCTURE_BYTES + 1))
