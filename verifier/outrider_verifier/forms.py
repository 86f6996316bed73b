"""What sessions of a verifier may emit: who compiles forms, and how a session begins in one, or
with limits of its ids."""

from __future__ import annotations

import numpy as np

from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.grammar.compile_queue import CompileQueue
from outrider.grammar.constraint import Constraint
from outrider.grammar.form_constraint import FormConstraint
from outrider.grammar.grammars import Grammar, Grammars
from outrider.grammar.id_constraint import within
from outrider.wire.messages import SessionSpec


class Forms:
    """Compiles what sessions ask for; asyncio thread only, compiling is done on another."""

    def __init__(self, grammars: Grammars | None) -> None:
        """None: this process has no tokenizer, or no grammar library."""
        self._grammars = grammars
        self._queue: CompileQueue[Grammar] | None = None
        if grammars is not None:
            threads = grammars.compiler.limits.processes
            self._queue = CompileQueue(grammars.compile, threads=threads)

    def close(self) -> None:
        """End the compile process and all that it compiles; idempotent."""
        if self._grammars is not None:
            self._grammars.close()

    def known(self, spec: SessionSpec) -> tuple[Grammar | None] | None:
        """The grammar of a session, None in it if it has none; None: it is to be compiled."""
        if spec.structured_output is None:
            return (None,)
        found = None if self._grammars is None else self._grammars.known(spec.structured_output)
        return None if found is None else (found,)

    async def compile(self, spec: SessionSpec) -> Grammar | None:
        """The grammar of a session; what only cancelled calls wait for is not compiled on.

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
        return await self._queue.compile(spec.structured_output)


def begin_constraint(
    spec: SessionSpec, grammar: Grammar | None, *, vocab_size: int
) -> Constraint | None:
    """What a session may emit behind what it had emitted elsewhere; None: anything. Raises
    InvalidRequestError if that does not fit its grammar."""
    form = None if spec.structured_output is None else _begin_form(spec, grammar)
    constraint = within(spec.token_limits, form, vocab_size=vocab_size)
    if constraint is None:
        return None
    constraint.follow(np.asarray(spec.token_ids[spec.prompt_len :], dtype=np.int32))
    if constraint.failed:
        raise InvalidRequestError(
            f"what was emitted does not fit the structured output: {constraint.failed}",
            reason="INVALID_STRUCTURE",
        )
    return constraint


def _begin_form(spec: SessionSpec, grammar: Grammar | None) -> FormConstraint:
    if grammar is None:
        raise FailedPreconditionError(
            "the grammar of a structured output was not compiled", reason="NO_STRUCTURED_OUTPUT"
        )
    return grammar.begin(spec.stop_token_ids)
