"""Compiles grammars into matchers with the grammar library (llguidance).

The compile process and the serving processes use the same functions, so a text that compiles in one
of them compiles in the others. The module does not import numpy, so that the compile process starts
fast.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.grammar.complexity import check_complexity
from outrider.grammar.error_messages import plain_error_message
from outrider.grammar.special_tokens import hide_special_tokens
from outrider.spec.structured_output import StructuredKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ResultT = TypeVar("ResultT")

STACK_BYTES: Final = 256 << 20
"""Stack size, in bytes, of the thread that compiles a grammar. The library recurses along rules and
references."""
NICE_INCREMENT: Final = 5
"""Value that is added to the niceness of threads that compile, so that serving has priority if both
need the same core."""
MAX_GRAMMAR_SYMBOLS: Final = 100_000
INITIAL_LEXER_FUEL: Final = 1_000_000
"""Limit on the work of building a grammar's lexer, in units of the library. It is reached after
some tens of milliseconds."""
MAX_STEP_ITEMS: Final = 10_000
"""Maximum number of parser items that the computation of one mask may create. Valid grammars in use
need up to 5,000."""
MAX_LEXER_STATES: Final = 50_000
"""Maximum number of lexer states of one grammar. A state takes about 1 KiB. Valid grammars in use
need up to 5,000."""
MAX_ERROR_CHARS: Final = 500
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space allowed between the parts of a JSON value. Without a limit, a model that prefers line
breaks might never end its answer."""

_stack_size_lock = threading.Lock()
"""Protects the stack size of new threads, which is one setting of the whole process."""


def call_with_stack(function: Callable[[], ResultT], stack_bytes: int = STACK_BYTES) -> ResultT:
    """Call a function in a new thread with a stack of `stack_bytes`, and return its result or raise
    its exception."""
    results: list[ResultT] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="grammar-compile", daemon=True)
    with _stack_size_lock:
        usual = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def load_tokenizer(tokenizer_json: str, *, vocab_size: int) -> LLTokenizer:
    """Create the grammar library's tokenizer from the content of a tokenizer.json.

    `vocab_size` is the number of ids of a mask. Raises FailedPreconditionError if the library
    cannot read the tokenizer.
    """
    from llguidance import LLTokenizer

    try:
        # Which ids end a session is the session's: one that is no text stands for them.
        added = json.loads(tokenizer_json).get("added_tokens", ())
        specials = [token["id"] for token in added if token.get("special")]
        hidden = hide_special_tokens(tokenizer_json)
        return LLTokenizer(hidden, n_vocab=vocab_size, eos_token=min(specials, default=None))
    except ValueError as error:
        raise FailedPreconditionError(
            f"structured output cannot be had with this tokenizer: {error}",
            reason="UNSUPPORTED_TOKENIZER",
        ) from error


def compile_matcher(tokenizer: LLTokenizer, structured: StructuredOutput) -> LLMatcher:
    """Compile a grammar into a matcher, which is at the start of the grammar and has built its
    lexer.

    Raises InvalidRequestError, with the library's reason, for grammars that cannot be compiled
    within the limits.
    """
    from llguidance import LLMatcher, LLParserLimits

    check_complexity(structured)
    limits = LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    try:
        matcher = LLMatcher(tokenizer, _source(structured), log_level=0, limits=limits)
    except ValueError as error:
        raise invalid_grammar_error(structured, str(error)) from error
    if not matcher.is_error():
        # The first mask builds the lexer: a session would wait for it.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise invalid_grammar_error(structured, matcher.get_error())
    return matcher


def invalid_grammar_error(structured: StructuredOutput, why: str) -> InvalidRequestError:
    """Return the error for a grammar that cannot be used. `why` is the reason, for instance the
    library's message."""
    # Their texts are hidden from the library, so its list of them would say nothing.
    known = why.find("; following special tokens are available")
    if known >= 0:
        why = f"{why[:known]}; grammars cannot name special tokens"
    return InvalidRequestError(
        f"structured output: the {structured.kind} cannot be used: "
        f"{plain_error_message(why)[:MAX_ERROR_CHARS]}",
        reason="INVALID_STRUCTURE",
        param="structured_outputs",
    )


def is_installed() -> bool:
    """Return whether llguidance, the grammar library, can be imported."""
    with contextlib.suppress(ImportError):
        import llguidance  # noqa: F401

        return True
    return False


def _source(structured: StructuredOutput) -> str:
    """Return the grammar in the library's own syntax."""
    from llguidance import LLMatcher

    match structured.kind:
        case StructuredKind.JSON_SCHEMA:
            return _json_source(parse_schema(structured.text))
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


def parse_schema(text: str) -> dict[str, Any]:
    """Parse a JSON schema. Raises ValueError if the text is not a schema."""
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
