"""Compiles structured-output grammars and starts the token constraints of sessions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.grammar.compile_queue import CompileQueue
from outrider.grammar.constraint import Constraint
from outrider.grammar.grammar_cache import CompiledGrammar, GrammarCache
from outrider.grammar.grammar_constraint import GrammarConstraint
from outrider.grammar.thinking_limit import ThinkingLimit, TokenBytes
from outrider.grammar.token_constraint import make_constraint
from outrider.wire.messages import SessionSpec

FOLLOWING_THREADS: Final = 2


class GrammarPreparation:
    """Compiles the grammars that sessions request. Asyncio thread only.

    The compilation itself runs in a separate process.
    """

    def __init__(self, grammars: GrammarCache | None) -> None:
        """Create an object without compilations. `grammars` is None if this process has no
        tokenizer or the grammar library is not installed; requests for structured output are then
        refused."""
        self._grammars = grammars
        self._queue: CompileQueue[CompiledGrammar] | None = None
        if grammars is not None:
            threads = grammars.compiler.limits.processes
            self._queue = CompileQueue(grammars.compile_grammar, threads=threads)
        self._threads = ThreadPoolExecutor(FOLLOWING_THREADS, thread_name_prefix="grammars")
        """Threads that advance a grammar over the tokens that the session emitted on another
        verifier."""

    def close(self) -> None:
        """End the compilation process and all its compilations; idempotent."""
        if self._grammars is not None:
            self._grammars.close()

    @property
    def token_bytes(self) -> TokenBytes | None:
        """Function that returns the bytes of a token id; None if this process has no tokenizer or
        the grammar library is not installed."""
        return None if self._grammars is None else self._grammars.token_bytes

    def get_cached(self, spec: SessionSpec) -> tuple[GrammarConstraint | None] | None:
        """Return the session's grammar constraint as a 1-tuple if it is available without work,
        else None.

        The tuple contains None if the session has no structured output. The result is None if the
        grammar is not compiled yet, or if the session has emitted tokens on another verifier, over
        which the grammar must be advanced first.
        """
        if spec.structured_output is None:
            return (None,)
        if len(spec.token_ids) > spec.prompt_len:
            return None
        found = (
            None if self._grammars is None else self._grammars.get_cached(spec.structured_output)
        )
        return None if found is None else (begin_constraint(spec, found),)

    async def begin(self, spec: SessionSpec) -> GrammarConstraint | None:
        """Return the session's grammar constraint, advanced over the tokens that the session has
        emitted on another verifier. Return None if the session has no structured output.

        If all calls that wait for a compilation are cancelled, the compilation is stopped.

        Raises InvalidRequestError, FailedPreconditionError, ResourceExhaustedError,
        UnavailableError.
        """
        if spec.structured_output is None:
            return None
        if self._queue is None:
            raise FailedPreconditionError(
                "this verifier has no structured output: it needs the model's tokenizer.json and "
                "llguidance",
                reason="NO_STRUCTURED_OUTPUT",
            )
        grammar = await self._queue.compile(spec.structured_output)
        output = np.asarray(spec.token_ids[spec.prompt_len :], dtype=np.int32)
        form = begin_constraint(spec, grammar)
        if len(output):
            await asyncio.get_running_loop().run_in_executor(self._threads, form.resume, output)
        return form


def start_session_constraint(
    spec: SessionSpec,
    form: GrammarConstraint | None,
    *,
    vocab_size: int,
    token_bytes: TokenBytes | None = None,
) -> Constraint | None:
    """Return the constraint on a session's next tokens, or None if all tokens are allowed.

    `form` is the grammar constraint of the structured output, already advanced over the tokens that
    the session has emitted on another verifier. `token_bytes` returns the bytes of a token id; it
    is None without a tokenizer. Raises InvalidRequestError if the emitted tokens do not match the
    grammar, and FailedPreconditionError if the grammar was not compiled or a thinking budget lacks
    the tokenizer.
    """
    if spec.structured_output is not None and form is None:
        raise FailedPreconditionError(
            "the grammar of a structured output was not compiled", reason="NO_STRUCTURED_OUTPUT"
        )
    thinking = None
    if spec.thinking_budget is not None:
        if token_bytes is None:
            raise FailedPreconditionError(
                "this verifier has no thinking budgets: they need the model's tokenizer.json and "
                "llguidance",
                reason="NO_THINKING_BUDGET",
            )
        thinking = ThinkingLimit(spec.thinking_budget, token_bytes)
    constraint = make_constraint(spec.token_limits, form, vocab_size=vocab_size, thinking=thinking)
    if constraint is None:
        return None
    constraint.advance_to(np.asarray(spec.token_ids[spec.prompt_len :], dtype=np.int32))
    if constraint.failure:
        if form is not None and form.is_given_up:
            raise InvalidRequestError(
                f"the structured output cannot go on behind what was emitted: {constraint.failure}",
                reason="STRUCTURE_FAILED",
            )
        raise InvalidRequestError(
            f"what was emitted does not fit the structured output: {constraint.failure}",
            reason="INVALID_STRUCTURE",
        )
    return constraint


def begin_constraint(spec: SessionSpec, grammar: CompiledGrammar) -> GrammarConstraint:
    """Return a session's grammar constraint in its initial state."""
    return grammar.start_constraint(spec.stop_token_ids)
