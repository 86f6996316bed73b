"""Grammar check: compiles a request's grammar before the request is queued.

So a client gets the error for an invalid grammar at once.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from outrider.errors import FailedPreconditionError
from outrider.grammar.compile_queue import TwoStageCompileQueue
from outrider.grammar.compiler import Cancellation, GrammarCompiler
from outrider.grammar.limits import CompileLimits
from outrider.spec.structured_output import StructuredOutput


class GrammarChecker:
    """Compiles grammars in separate processes. Use from the asyncio thread only."""

    def __init__(
        self, tokenizer_file: Path | None, *, vocab_size: int, limits: CompileLimits
    ) -> None:
        """Create a checker. `tokenizer_file` is the tokenizer.json that `prepare` reads, or None if
        there is none; `vocab_size` is the vocabulary size of the tokenizer.
        """
        self._file, self._vocab_size, self._limits = tokenizer_file, vocab_size, limits
        self._compiler: GrammarCompiler | None = None
        self._queue = TwoStageCompileQueue(
            partial(self._compile, is_first_try=True),
            partial(self._compile, is_first_try=False),
            threads=limits.processes,
        )

    def prepare(self) -> None:
        """Load the tokenizer file. Idempotent."""
        if self._compiler is None and self._file is not None:
            self._compiler = GrammarCompiler.load(
                self._file, vocab_size=self._vocab_size, limits=self._limits
            )

    def close(self) -> None:
        """Stop the compile processes and cancel their work. Idempotent."""
        if self._compiler is not None:
            self._compiler.close()

    async def check_grammar(self, structured: StructuredOutput, *, tenant: str) -> None:
        """Check that the grammar of a structured output can be compiled. If several tenants wait,
        their grammars are compiled in rotation.

        Raises InvalidRequestError with the reason for a schema, expression or grammar that cannot
        be compiled, ResourceExhaustedError while too many are being compiled,
        FailedPreconditionError if structured output is not available, and UnavailableError if no
        compile process can be started.
        """
        verdict = None if self._compiler is None else self._compiler.find_verdict(structured)
        if verdict is None:
            await self._queue.compile(structured, tenant=tenant)
        elif verdict.error is not None:
            raise verdict.error.copy()

    def _compile(
        self, structured: StructuredOutput, cancellation: Cancellation, *, is_first_try: bool
    ) -> None:
        """Compile a grammar and wait for the result. Runs on a thread of the queue."""
        self.prepare()
        if self._compiler is None:
            raise FailedPreconditionError(
                "structured output is not available: it needs the model's tokenizer.json and the "
                "package llguidance",
                reason="NO_STRUCTURED_OUTPUT",
            )
        self._compiler.validate(structured, cancellation, is_first_try=is_first_try)
