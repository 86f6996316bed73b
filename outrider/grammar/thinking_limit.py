"""Thinking limit: counts the tokens of reasoning in an answer and forces its close tag.

The tags are found in the bytes of the tokens, because models write the text of a tag in several
tokenizations. A position follows from the emitted tokens only, so it can be kept for each token of
a draft and computed again on another verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import NamedTuple

from outrider.errors import InvalidRequestError
from outrider.spec.thinking_budget import ThinkingBudget

TokenBytes = Callable[[int], bytes]
"""Function that returns the bytes which a token id contributes to the text."""


class ThinkingPhase(Enum):
    """Part of the answer in which a position is."""

    UNDECIDED = auto()
    """Before the end of the text that decides whether the answer begins with the open tag."""
    REASONING = auto()
    ANSWER = auto()
    """Behind the reasoning, or in an answer without reasoning."""


class ThinkingPosition(NamedTuple):
    """Position in an answer that may begin with reasoning."""

    phase: ThinkingPhase
    num_tokens: int = 0
    """Number of tokens since the one that completed the open tag."""
    tag_part: bytes = b""
    """Longest end of the text with which a tag begins: of the whole text without white space before
    the open tag, of the reasoning before the close tag."""


ANSWER: ThinkingPosition = ThinkingPosition(ThinkingPhase.ANSWER)
"""Position behind the reasoning, where all tokens are free."""


class ThinkingLimit:
    """Positions of one session with a thinking budget. Immutable."""

    def __init__(self, budget: ThinkingBudget, token_bytes: TokenBytes) -> None:
        """Create the limit of a session. `token_bytes`: bytes of the tokenizer's ids; special
        tokens have none. Raises InvalidRequestError if the ids of the close tag do not write
        it."""
        self._max_tokens = budget.max_tokens
        self._open_tag, self._close_tag = budget.open_tag.encode(), budget.close_tag.encode()
        self._beginnings = tuple(
            self._close_tag[:size] for size in range(len(self._close_tag) - 1, 0, -1)
        )
        """Beginnings of the close tag, the longest first."""
        self._token_bytes = token_bytes
        self._tag_bytes: dict[int, bytes] = {}
        """Bytes of ids that are a whole tag."""
        for tag, ids in (
            (self._open_tag, budget.open_ids),
            (self._close_tag, budget.close_ids),
        ):
            if len(ids) == 1:
                self._tag_bytes[ids[0]] = tag
        self._forced: dict[int, int] = {}
        """Next id of the close tag by the number of its bytes that are written."""
        part: bytes | None = b""
        for id_ in budget.close_ids:
            if part is None:
                break
            # The first ids may write only white space before the tag, which is not needed.
            self._forced[len(part)] = id_
            part = self._find_close_tag(part + self._bytes_of(id_))
        if part is not None:
            raise InvalidRequestError(
                f"the ids {budget.close_ids} do not write {budget.close_tag!r}",
                reason="INVALID_REQUEST",
            )

    @property
    def start(self) -> ThinkingPosition:
        """Position at the beginning of the answer."""
        phase = ThinkingPhase.UNDECIDED if self._open_tag else ThinkingPhase.REASONING
        return ThinkingPosition(phase)

    def advance(self, position: ThinkingPosition, tokens: Iterable[int]) -> ThinkingPosition:
        """Return the position after further token ids."""
        left = iter(tokens)
        while position.phase is ThinkingPhase.UNDECIDED:
            token = next(left, None)
            if token is None:
                return position
            position = self._decide(position.tag_part + self._bytes_of(token))
        if position.phase is ThinkingPhase.ANSWER:
            return position
        pieces = [self._bytes_of(token) for token in left]
        return self._reason(position.num_tokens + len(pieces), position.tag_part + b"".join(pieces))

    def _decide(self, text: bytes) -> ThinkingPosition:
        """Return the position after a text with which the answer begins."""
        text = text.lstrip()
        if self._open_tag.startswith(text) and text != self._open_tag:
            return ThinkingPosition(ThinkingPhase.UNDECIDED, tag_part=text)
        if not text.startswith(self._open_tag):
            return ANSWER
        return self._reason(0, text[len(self._open_tag) :])

    def _reason(self, num_tokens: int, text: bytes) -> ThinkingPosition:
        """Return the position after `num_tokens` tokens of reasoning, whose text ends with
        `text`."""
        part = self._find_close_tag(text)
        if part is None:
            return ANSWER
        return ThinkingPosition(ThinkingPhase.REASONING, num_tokens, part)

    def forced_id(self, position: ThinkingPosition) -> int | None:
        """Return the only id that may follow at a position; None if others may follow, too."""
        phase, num_tokens, part = position
        if phase is not ThinkingPhase.REASONING or num_tokens < self._max_tokens:
            return None
        # A beginning of the tag that the forced ids do not write is left behind.
        return self._forced.get(len(part), self._forced[0])

    def _bytes_of(self, token: int) -> bytes:
        found = self._tag_bytes.get(token)
        return self._token_bytes(token) if found is None else found

    def _find_close_tag(self, text: bytes) -> bytes | None:
        """Return the longest end of a text with which the close tag begins; None if the text has
        the whole tag."""
        if self._close_tag in text:
            return None
        if not text.endswith(self._beginnings):
            return b""
        return next(part for part in self._beginnings if text.endswith(part))
