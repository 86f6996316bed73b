"""Thinking budget of a session: how many tokens of reasoning its answer may have (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider.errors import InvalidRequestError

MAX_THINKING_TOKENS: Final = 1 << 24
"""Largest thinking budget in tokens."""
MAX_TAG_BYTES: Final = 256
"""Largest length of a tag of reasoning in bytes of UTF-8."""
MAX_TAG_TOKENS: Final = 64
"""Largest number of ids of a tag of reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """Maximum number of tokens between the tags of the reasoning with which an answer may begin.

    When they are used up, only the close tag may follow; the rest of the answer is free. A tag with
    one id is the text of this id, even if the id is a special token that has no text otherwise.
    Raises InvalidRequestError for values out of bounds.
    """

    max_tokens: int
    open_tag: str = ""
    """Text that begins the reasoning; "" if the prompt has begun it."""
    open_ids: tuple[int, ...] = ()
    """Ids of the open tag; none if it is ""."""
    close_tag: str
    """Text that ends the reasoning, in whatever tokens the model writes it."""
    close_ids: tuple[int, ...]
    """Ids of the close tag that are forced."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_tokens <= MAX_THINKING_TOKENS:
            raise InvalidRequestError(
                f"thinking_token_budget must be in [0, {MAX_THINKING_TOKENS}], got "
                f"{self.max_tokens}",
                reason="INVALID_REQUEST",
                param="thinking_token_budget",
            )
        for tag, ids in ((self.open_tag, self.open_ids), (self.close_tag, self.close_ids)):
            is_within = len(tag.encode()) <= MAX_TAG_BYTES and len(ids) <= MAX_TAG_TOKENS
            if not is_within or bool(tag) != bool(ids) or min(ids, default=0) < 0:
                raise InvalidRequestError(
                    f"a tag of reasoning must have at most {MAX_TAG_BYTES} bytes and 1 to "
                    f"{MAX_TAG_TOKENS} ids >= 0",
                    reason="INVALID_REQUEST",
                )
        if not self.close_tag:
            raise InvalidRequestError("reasoning needs a close tag", reason="INVALID_REQUEST")
