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
from outrider.grammar.token_constraint import make_constraint
from outrider.wire.messages import SessionSpec

FOLLOWING_THREADS: Final = 2


class GrammarPreparation:
    """Compiles the grammars that sessions ask for; asyncio thread only.

    Compilation itself runs elsewhere, in the compile process.
    """

    def __init__(self, grammars: GrammarCache | None) -> None:
        """None: this process has no tokenizer, or no grammar library."""
        self._grammars = grammars
        self._queue: CompileQueue[CompiledGrammar] | None = None
        if grammars is not None:
            threads = grammars.compiler.limits.processes
            self._queue = CompileQueue(grammars.compile_grammar, threads=threads)
        self._threads = ThreadPoolExecutor(FOLLOWING_THREADS, thread_name_prefix="grammars")
        """They lead grammars through what sessions have emitted elsewhere."""

    def close(self) -> None:
        """End the compile process and all that it compiles; idempotent."""
        if self._grammars is not None:
            self._grammars.close()

    def get_cached(self, spec: SessionSpec) -> tuple[GrammarConstraint | None] | None:
        """The constraint of a session, None in it if it is in no grammar; None: the grammar is to
        be compiled, or to be led through what the session has emitted elsewhere."""
        if spec.structured_output is None:
            return (None,)
        if len(spec.token_ids) > spec.prompt_len:
            return None
        found = (
            None if self._grammars is None else self._grammars.get_cached(spec.structured_output)
        )
        return None if found is None else (begin_constraint(spec, found),)

    async def begin(self, spec: SessionSpec) -> GrammarConstraint | None:
        """The constraint of a session behind what it has emitted elsewhere, None if it is in no
        grammar; what only cancelled calls wait for is not compiled on.

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
    spec: SessionSpec, form: GrammarConstraint | None, *, vocab_size: int
) -> Constraint | None:
    """What a session may emit behind what it had emitted elsewhere; None: anything. `form`: of its
    structured output, which has followed that already. Raises InvalidRequestError if it does not
    fit its grammar."""
    if spec.structured_output is not None and form is None:
        raise FailedPreconditionError(
            "the grammar of a structured output was not compiled", reason="NO_STRUCTURED_OUTPUT"
        )
    constraint = make_constraint(spec.token_limits, form, vocab_size=vocab_size)
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
    """A session's constraint at the beginning of its grammar."""
    return grammar.start_constraint(spec.stop_token_ids)
