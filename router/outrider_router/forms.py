"""The forms of answers at the router: compiled before anything is queued, so that what cannot be
compiled is the client's error at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.errors import FailedPreconditionError, OutriderError, ResourceExhaustedError
from outrider.grammar.grammars import Grammars
from outrider.spec.structured import StructuredOutput
from outrider.transport.status import copy_of

MOST_COMPILING: Final = 64
"""Forms that may wait to be compiled, however many requests wait for each; more are refused."""
RETRY_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Compiling:
    """A form that is being compiled, or waits for its turn; given up once nobody waits for it."""

    done: asyncio.Future[None]
    waiting: int = 0
    """Requests that wait for it."""


class Forms:
    """Compiles forms on one thread; asyncio thread only."""

    def __init__(self, tokenizer_file: Path | None, *, vocab_size: int) -> None:
        """`tokenizer_file`: tokenizer.json, read by `prepare`; None: there is none. `vocab_size`:
        of the tokenizer."""
        self._file, self._vocab_size = tokenizer_file, vocab_size
        self._grammars: Grammars | None = None
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forms")
        self._compiling: dict[StructuredOutput, _Compiling] = {}

    def prepare(self) -> None:
        """Read the tokenizer: see `Grammars.load`. Idempotent."""
        if self._grammars is None and self._file is not None:
            self._grammars = Grammars.load(self._file, vocab_size=self._vocab_size)

    async def check(self, structured: StructuredOutput | None) -> None:
        """Refuse a form that no verifier could serve.

        Raises InvalidRequestError with the reason for a schema, expression or grammar that cannot
        be compiled; ResourceExhaustedError while too many are being compiled;
        FailedPreconditionError where there is no structured output at all.
        """
        if structured is None:
            return
        if self._grammars is not None and self._grammars.known(structured) is not None:
            return
        compiling = self._compiling.get(structured) or self._begin(structured)
        compiling.waiting += 1
        try:
            # Whoever leaves does not take it from the others.
            await asyncio.shield(compiling.done)
        except OutriderError as error:
            raise copy_of(error) from None
        finally:
            compiling.waiting -= 1
            if not compiling.waiting:
                self._compiling.pop(structured, None)
                compiling.done.cancel()

    def _begin(self, structured: StructuredOutput) -> _Compiling:
        if len(self._compiling) >= MOST_COMPILING:
            raise ResourceExhaustedError(
                f"{MOST_COMPILING} structured outputs are being compiled",
                reason="COMPILING_EXHAUSTED",
                retry_after_s=RETRY_S,
            )
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._threads, self._compile, structured)
        begun = self._compiling[structured] = _Compiling(done)
        return begun

    def _compile(self, structured: StructuredOutput) -> None:
        """On the thread."""
        self.prepare()
        if self._grammars is None:
            raise FailedPreconditionError(
                "this router has no structured output: it needs a tokenizer.json and llguidance",
                reason="NO_STRUCTURED_OUTPUT",
            )
        self._grammars.compile(structured)
