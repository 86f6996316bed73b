"""Token constraints of sessions on a drafter; grammars are compiled in the background.

Limits of token ids are constraints, too. A grammar is ready some time after its session is
announced. Until then, and if the grammar cannot be compiled, drafts are not masked: the verifier
then rejects some of their tokens, without further effect.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.grammar.constraint import Constraint, masks_of_paths
from outrider.grammar.grammar_cache import CompiledGrammar, GrammarCache
from outrider.grammar.grammar_constraint import GrammarConstraint
from outrider.grammar.token_constraint import make_constraint
from outrider.spec.structured_output import StructuredOutput
from outrider_drafter.state.session import FollowedSession, VerdictLimits

logger = logging.getLogger(__name__)

MAX_WAITING_GRAMMARS: Final = 64
"""Maximum number of grammars that wait to be compiled. Sessions with further grammars are drafted
for without masks."""


class SessionConstraints:
    """Assigns token constraints to sessions. Used by the drafting thread only."""

    def __init__(self, grammars: GrammarCache | None, limits: VerdictLimits) -> None:
        """Create an instance without sessions. `grammars`: cache of compiled grammars, or None to
        mask no drafts by grammars."""
        self._grammars, self._limits = grammars, limits
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forms")
        self._waiting: dict[StructuredOutput, Future[CompiledGrammar | None]] = {}

    @property
    def is_compiling(self) -> bool:
        """Whether any requested grammar is not compiled yet."""
        return not all(future.done() for future in self._waiting.values())

    def request_grammar(self, session: FollowedSession) -> None:
        """Start to compile the grammar of a newly announced session, if the session has one."""
        structured = session.structured_output
        if structured is None or structured in self._waiting or self._cached(structured):
            return
        if len(self._waiting) >= MAX_WAITING_GRAMMARS:
            # Drop compiled grammars whose sessions may have ended before using them.
            self._waiting = {form: it for form, it in self._waiting.items() if not it.done()}
        if len(self._waiting) < MAX_WAITING_GRAMMARS:
            self._waiting[structured] = self._threads.submit(self._compile, structured)

    def assign_grammars(self, sessions: Sequence[FollowedSession]) -> None:
        """Assign constraints to those of the sessions that have none yet and whose grammars, if
        any, are compiled. Call this before drafting for the sessions."""
        for session in sessions:
            if session.has_constraint and session.constraint is None:
                session.constraint = self._constraint(session)

    def _constraint(self, session: FollowedSession) -> Constraint | None:
        form = None
        if session.structured_output is not None:
            form = self._begun(session, session.structured_output)
            if form is None:
                return None
        return make_constraint(session.token_limits, form, vocab_size=self._limits.vocab_size)

    def _cached(self, structured: StructuredOutput) -> CompiledGrammar | None:
        return None if self._grammars is None else self._grammars.get_cached(structured)

    def _begun(
        self, session: FollowedSession, structured: StructuredOutput
    ) -> GrammarConstraint | None:
        future = self._waiting.get(structured)
        if future is not None and not future.done():
            return None
        if future is not None:
            del self._waiting[structured]
        grammar = self._cached(structured) if future is None else future.result()
        if grammar is None:
            return None
        ids = [i for i in session.stop_token_ids if i < self._limits.vocab_size]
        return grammar.start_constraint(ids)

    def _compile(self, structured: StructuredOutput) -> CompiledGrammar | None:
        """Compile a grammar; runs on the background thread. Return None if that fails."""
        try:
            return None if self._grammars is None else self._grammars.compile_grammar(structured)
        except OutriderError as error:
            logger.warning("drafts of a form are not masked", extra={"reason": error.message})
        except Exception:
            logger.exception("a form could not be compiled")
        return None


def constraint_of(session: FollowedSession) -> Constraint | None:
    """Return a session's constraint, advanced to the end of its tokens, or None if the session is
    not constrained."""
    constraint = session.constraint
    if constraint is None:
        return None
    constraint.advance_to(session.tokens.view[session.prompt_len :])
    return None if constraint.failure else constraint


def masks_of(session: FollowedSession, paths: Sequence[Sequence[int]]) -> NDArray[np.uint32] | None:
    """Return the allowed-token mask after the session's tokens and each of the P paths, uint32 [P,
    words of a mask], or None if the session is not constrained."""
    constraint = constraint_of(session)
    return None if constraint is None else masks_of_paths(constraint, paths)
