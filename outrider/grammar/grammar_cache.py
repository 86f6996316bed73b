"""Grammar cache of one tokenizer: compiles each grammar once and keeps those used most recently."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outrider.errors import FailedPreconditionError
from outrider.grammar.compiler import Cancellation, GrammarCompiler
from outrider.grammar.constraint import mask_words
from outrider.grammar.digit_bound import DigitBound, JsonPosition, has_json_numbers
from outrider.grammar.grammar_constraint import GrammarConstraint
from outrider.grammar.limits import CompileLimits, MaskLimits
from outrider.grammar.mask_jobs import MaskMeter
from outrider.grammar.matcher_compiler import (
    NICE_INCREMENT,
    call_with_stack,
    compile_matcher,
    is_installed,
    load_tokenizer,
)
from outrider.spec.structured_output import StructuredKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS: Final = 256
"""Maximum number of compiled grammars in the cache."""
MAX_KEPT_BYTES: Final = 512 << 20
"""Maximum memory, in bytes, of all cached grammars together. The newest grammar is kept even if it
alone exceeds this limit."""


class CompiledGrammar:
    """A compiled grammar. Each session gets a copy of its matcher. Thread-safe."""

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        vocab_size: int,
        end_id: int,
        masks: MaskLimits,
        may_be_ambiguous: bool,
        digits: tuple[DigitBound, JsonPosition] | None = None,
        memory_bytes: int = 0,
    ) -> None:
        """Create a compiled grammar.

        The matcher allows `end_id` where the output is complete. `masks` limits the time that the
        masks of a session may take. `may_be_ambiguous` is explained in `MaskMeter`. `digits` limits
        the digits of numbers, from a position on, if the answer has those of JSON. `memory_bytes`
        is the memory of the grammar in bytes, or 0 if it is unknown.
        """
        self._digits = digits
        self._matcher, self._vocab_size, self._end_id = matcher, vocab_size, end_id
        self._masks, self._may_be_ambiguous = masks, may_be_ambiguous
        self.memory_bytes = memory_bytes

    def start_constraint(self, stop_ids: Sequence[int]) -> GrammarConstraint:
        """Create the constraint of a new session. The session ends with one of `stop_ids`, which
        must be below the vocabulary size."""
        return GrammarConstraint(
            self._matcher.deep_copy(),
            vocab_size=self._vocab_size,
            end_id=self._end_id,
            stop_ids=stop_ids,
            meter=MaskMeter(self._masks, may_be_ambiguous=self._may_be_ambiguous),
            digits=self._digits,
        )


class GrammarCache:
    """Compiles grammars for one tokenizer and caches them. Thread-safe. Compiling takes
    milliseconds to seconds, so it must not run on an event loop."""

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        limits: CompileLimits | None = None,
        masks: MaskLimits | None = None,
    ) -> None:
        """Create an empty cache.

        `tokenizer_json` is the content of a tokenizer.json. `vocab_size` is the size of the logits,
        which may be padded beyond the tokenizer's ids. `limits` applies to compiling, and `masks`
        to the masks of each session.
        """
        self._json = tokenizer_json
        self._vocab_size = vocab_size
        self._masks = masks or MaskLimits()
        self.compiler = GrammarCompiler(tokenizer_json, vocab_size=vocab_size, limits=limits)
        """Test-compiles new grammars. A grammar that hangs or crashes the compile process is not
        compiled in this process."""
        self._tokenizer: LLTokenizer | None = None
        self._token_bytes: dict[int, bytes] = {}
        self._digits: DigitBound | None = None
        self._tokenizer_lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._compiling: dict[StructuredOutput, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()
        """Protects the cached grammars and those that are being compiled."""

    @classmethod
    def from_tokenizer_file(
        cls,
        tokenizer_file: Path,
        *,
        vocab_size: int,
        limits: CompileLimits | None = None,
        masks: MaskLimits | None = None,
    ) -> GrammarCache | None:
        """Create the cache for a tokenizer.json. Returns None if the file is missing or the grammar
        library is not installed.

        Call this before the process accepts requests, because it blocks all other threads for about
        a third of a second with 50,000 token ids.
        """
        if not is_installed() or not tokenizer_file.is_file():
            return None
        text = tokenizer_file.read_text(encoding="utf-8")
        found = cls(text, vocab_size=vocab_size, limits=limits, masks=masks)
        with contextlib.suppress(FailedPreconditionError):
            # Who asks for a form is told.
            found._llguidance_tokenizer()
        return found

    def close(self) -> None:
        """End the compile process; idempotent."""
        self.compiler.close()

    def get_cached(self, structured: StructuredOutput) -> CompiledGrammar | None:
        """Return a grammar if it is cached, else None.

        Never waits for a grammar that is being compiled.
        """
        with self._lock:
            found = self._kept.get(structured)
            if found is not None:
                self._kept.move_to_end(structured)
            return found

    def compile_grammar(
        self, structured: StructuredOutput, cancellation: Cancellation | None = None
    ) -> CompiledGrammar:
        """Return a compiled grammar, from the cache if possible.

        Threads that request the same grammar at the same time share one compilation. The
        `cancellation` of the first of these threads cancels it for all of them.

        Raises InvalidRequestError, with the library's reason, if the grammar cannot be compiled
        within the limits; FailedPreconditionError if the library cannot read the tokenizer;
        UnavailableError if no compile process can be started; and CancelledRequestError if the
        compilation is cancelled.
        """
        with self._lock:
            found = self._kept.get(structured)
            if found is not None:
                self._kept.move_to_end(structured)
                return found
            future = self._compiling.get(structured)
            is_mine = future is None
            if future is None:
                future = self._compiling[structured] = Future()
        if is_mine:
            self._compile_into(future, structured, cancellation)
        return future.result()

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token id contributes to the text. Special and unknown ids
        contribute none.

        Raises FailedPreconditionError if the library cannot read the tokenizer.
        """
        found = self._token_bytes.get(token)
        if found is None:
            tokenizer = self._llguidance_tokenizer()
            is_text = 0 <= token < tokenizer.vocab_size and not tokenizer.is_special_token(token)
            found = self._token_bytes[token] = tokenizer.decode_bytes([token]) if is_text else b""
        return found

    def _compile_into(
        self,
        future: Future[CompiledGrammar],
        structured: StructuredOutput,
        cancellation: Cancellation | None,
    ) -> None:
        try:
            grammar = self._compile(structured, cancellation)
        except BaseException as error:
            with self._lock:
                del self._compiling[structured]
            future.set_exception(error)
            return
        with self._lock:
            del self._compiling[structured]
            self._kept[structured] = grammar
            while len(self._kept) > 1 and self._is_full():
                self._kept.popitem(last=False)
        future.set_result(grammar)

    def _is_full(self) -> bool:
        taken = sum(grammar.memory_bytes for grammar in self._kept.values())
        return len(self._kept) > MAX_CACHED_GRAMMARS or taken > MAX_KEPT_BYTES

    def _compile(
        self, structured: StructuredOutput, cancellation: Cancellation | None
    ) -> CompiledGrammar:
        verdict = self.compiler.validate(structured, cancellation)
        tokenizer = self._llguidance_tokenizer()

        def compile_here() -> LLMatcher:
            _yield_to_serving()
            return compile_matcher(tokenizer, structured)

        return CompiledGrammar(
            call_with_stack(compile_here),
            vocab_size=self._vocab_size,
            end_id=tokenizer.eos_token,
            masks=self._masks,
            may_be_ambiguous=structured.kind is StructuredKind.GRAMMAR,
            digits=self._digits_of(structured),
            memory_bytes=verdict.memory_bytes,
        )

    def _digits_of(self, structured: StructuredOutput) -> tuple[DigitBound, JsonPosition] | None:
        if not has_json_numbers(structured):
            return None
        digits = self._digit_bound()
        return digits, digits.start_position(structured)

    def _digit_bound(self) -> DigitBound:
        tokenizer = self._llguidance_tokenizer()
        with self._tokenizer_lock:
            if self._digits is None:
                self._digits = DigitBound(tokenizer, mask_words(self._vocab_size))
            return self._digits

    def _llguidance_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._json, vocab_size=self._vocab_size)
            return self._tokenizer


def _yield_to_serving() -> None:
    """Lower the priority of this thread below that of other threads (Linux has a niceness per
    thread)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE_INCREMENT)
