"""The grammars of one tokenizer: compiled once each, kept while they are used."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.grammar.form_constraint import FormConstraint
from outrider.spec.structured import StructuredKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_KEPT: Final = 256
"""Compiled grammars that are kept."""
MAX_GRAMMAR_SYMBOLS: Final = 100_000
INITIAL_LEXER_FUEL: Final = 1_000_000
"""Work that building the lexer of a grammar may take; some tens of milliseconds."""
MAX_ERROR_CHARS: Final = 500
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the parts of a JSON value. Without a bound a model that likes line breaks never comes to
an end."""


class Grammar:
    """A compiled grammar; sessions begin from copies of it. Thread-safe."""

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, end_id: int) -> None:
        self._matcher, self._vocab_size, self._end_id = matcher, vocab_size, end_id

    def begin(self, stop_ids: Sequence[int]) -> FormConstraint:
        """The constraint of a session that begins; `stop_ids`, below the vocabulary's size, end
        it."""
        return FormConstraint(
            self._matcher.deep_copy(),
            vocab_size=self._vocab_size,
            end_id=self._end_id,
            stop_ids=stop_ids,
        )


class Grammars:
    """Compiles the forms of answers for one tokenizer. Thread-safe; compiling takes milliseconds,
    so it does not belong on an event loop."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int) -> None:
        """`tokenizer_json`: the content of a tokenizer.json; `vocab_size`: of the logits, which may
        be padded beyond the tokenizer's ids."""
        self._json = tokenizer_json
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        """Of what is kept."""
        self._building = threading.Lock()
        """One grammar is compiled at a time: who asks for many does not get all cores."""

    @classmethod
    def load(cls, tokenizer_file: Path, *, vocab_size: int) -> Grammars | None:
        """Of a tokenizer.json; None without the file, or without the library. Takes a third of a
        second for 50,000 ids, and holds all other threads up: before anybody is served."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            return None
        if not tokenizer_file.is_file():
            return None
        found = cls(tokenizer_file.read_text(encoding="utf-8"), vocab_size=vocab_size)
        with contextlib.suppress(FailedPreconditionError):
            # Who asks for a form is told.
            found._llguidance_tokenizer()
        return found

    def known(self, structured: StructuredOutput) -> Grammar | None:
        """The grammar, if it was compiled already; never waits for one that is being compiled."""
        with self._lock:
            found = self._kept.get(structured)
            if found is not None:
                self._kept.move_to_end(structured)
            return found

    def compile(self, structured: StructuredOutput) -> Grammar:
        """The grammar of this form.

        Raises InvalidRequestError, with the library's reason, for what cannot be compiled within
        the bounds; FailedPreconditionError for a tokenizer that the library cannot read.
        """
        with self._building:
            found = self.known(structured)
            if found is None:
                found = self._compile(structured)
                with self._lock:
                    self._kept[structured] = found
                    while len(self._kept) > MOST_KEPT:
                        self._kept.popitem(last=False)
            return found

    def _compile(self, structured: StructuredOutput) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._llguidance_tokenizer()
        limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            initial_lexer_fuel=INITIAL_LEXER_FUEL,
            verbose_errors=False,
        )
        try:
            matcher = LLMatcher(tokenizer, _source(structured), log_level=0, limits=limits)
        except ValueError as error:
            raise _refused(structured, str(error)) from error
        if not matcher.is_error():
            # The first mask builds the lexer: a session would wait for it.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(structured, matcher.get_error())
        return Grammar(matcher, vocab_size=self._vocab_size, end_id=tokenizer.eos_token)

    def _llguidance_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            try:
                # Which ids end a session is the session's: one that is no text stands for them.
                added = json.loads(self._json).get("added_tokens", ())
                specials = [token["id"] for token in added if token.get("special")]
                self._tokenizer = LLTokenizer(
                    self._json, n_vocab=self._vocab_size, eos_token=min(specials, default=None)
                )
            except ValueError as error:
                raise FailedPreconditionError(
                    f"structured output cannot be had with this tokenizer: {error}",
                    reason="UNSUPPORTED_TOKENIZER",
                ) from error
        return self._tokenizer


def _source(structured: StructuredOutput) -> str:
    """The grammar in the library's own form."""
    from llguidance import LLMatcher

    match structured.kind:
        case StructuredKind.JSON_SCHEMA:
            return _json_source(_schema(structured.text))
        case StructuredKind.JSON_OBJECT:
            return _json_source({"type": "object"})
        case StructuredKind.REGEX:
            return LLMatcher.grammar_from_regex(structured.text)
        case StructuredKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(structured.text)


def _json_source(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    overrides: Any = {"whitespace_pattern": WHITESPACE}
    return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)


def _schema(text: str) -> dict[str, Any]:
    """A schema as an object. Raises ValueError for what is none."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if found is True:
        return {}
    if not isinstance(found, dict):
        raise ValueError("it must be an object or a boolean, and not `false`, which nothing fits")
    return found


def _refused(structured: StructuredOutput, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured output: the {structured.kind} cannot be used: {why[:MAX_ERROR_CHARS]}",
        reason="INVALID_STRUCTURE",
    )
