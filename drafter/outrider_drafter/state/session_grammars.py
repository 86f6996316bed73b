"""Token constraints of sessions on a drafter; grammars are compiled in the background.

Limits of token ids are constraints, too. A grammar is ready a moment after its session is
announced; until then, and where it cannot be compiled, drafts are not masked: some of their tokens
cannot be accepted then, without further effect.
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
"""Forms that may wait to be compiled; sessions beyond that are drafted for without masks."""


class SessionConstraints:
    """Gives sessions their constraints; drafting thread only."""

    def __init__(self, grammars: GrammarCache | None, limits: VerdictLimits) -> None:
        """`grammars`: None where there can be none."""
        self._grammars, self._limits = grammars, limits
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forms")
        self._waiting: dict[StructuredOutput, Future[CompiledGrammar | None]] = {}

    @property
    def is_compiling(self) -> bool:
        """Whether any form that was asked for is not compiled yet."""
        return not all(future.done() for future in self._waiting.values())

    def request_grammar(self, session: FollowedSession) -> None:
        """A session was announced: have its form compiled, if it has one."""
        structured = session.structured_output
        if structured is None or structured in self._waiting or self._cached(structured):
            return
        if len(self._waiting) >= MAX_WAITING_GRAMMARS:
            # Those of sessions that have left meanwhile.
            self._waiting = {form: it for form, it in self._waiting.items() if not it.done()}
        if len(self._waiting) < MAX_WAITING_GRAMMARS:
            self._waiting[structured] = self._threads.submit(self._compile, structured)

    def assign_grammars(self, sessions: Sequence[FollowedSession]) -> None:
        """Sessions are about to be drafted for: those without a form, and those whose forms have
        been compiled meanwhile, get their constraints."""
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
        """On the thread."""
        try:
            return None if self._grammars is None else self._grammars.compile_grammar(structured)
        except OutriderError as error:
            logger.warning("drafts of a form are not masked", extra={"reason": error.message})
        except Exception:
            logger.exception("a form could not be compiled")
        return None


def constraint_of(session: FollowedSession) -> Constraint | None:
    """What may follow a session's tokens; None if anything may, as far as is known."""
    constraint = session.constraint
    if constraint is None:
        return None
    constraint.advance_to(session.tokens.view[session.prompt_len :])
    return None if constraint.failure else constraint


def masks_of(session: FollowedSession, paths: Sequence[Sequence[int]]) -> NDArray[np.uint32] | None:
    """uint32 [P, W]: what may follow the tokens of a session and each path; None: anything."""
    constraint = constraint_of(session)
    return None if constraint is None else masks_of_paths(constraint, paths)
