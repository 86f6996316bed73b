"""Histories against the texts of a calm run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from outrider.chaos.history import End, History
from outrider.errors import DeadlineExceededError, InternalError, OutriderError
from outrider.wire.messages import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a client hears in calm."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    exact: bool = True
    """Whether the text may not depend on what was drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A promise that was not kept."""

    promise: str
    """In a word: text, order, hang, error, leak."""
    detail: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.detail}"


Allowed = Callable[[OutriderError], bool]
"""Whether a client may hear this error."""


def check(history: History, expected: Expected, *, allowed: Allowed) -> list[Violation]:
    """What is wrong with a client's history."""
    found = _check_text(history, expected)
    match history.end:
        case End.FINISHED:
            found += _check_finish(history, expected)
        case End.HUNG:
            found.append(Violation(promise="hang", detail=str(history)))
        case End.CRASHED:
            found.append(Violation(promise="error", detail=f"not a typed error: {history}"))
        case End.FAILED if not _permitted(history.error, allowed):
            found.append(Violation(promise="error", detail=str(history)))
    return found


def never(_error: OutriderError) -> bool:
    """No error is allowed."""
    return False


def reasons(allowed: Collection[str]) -> Allowed:
    """Errors with these reasons are allowed."""
    return lambda error: error.reason in allowed


def _permitted(error: BaseException | None, allowed: Allowed) -> bool:
    # A bug is never what was to be expected, and a deadline that nobody set is a hang.
    hopeless = isinstance(error, InternalError | DeadlineExceededError)
    return isinstance(error, OutriderError) and not hopeless and allowed(error)


def _check_text(history: History, expected: Expected) -> list[Violation]:
    """Everything that was heard is the beginning of the expected text, once and in order."""
    if not expected.exact:
        return []
    ids, text = history.token_ids, history.text
    found = []
    if ids != expected.token_ids[: len(ids)]:
        found.append(
            Violation(promise="text", detail=_divergence(history.number, ids, expected.token_ids))
        )
    elif text != expected.text[: len(text)]:
        detail = _divergence(history.number, tuple(text), tuple(expected.text))
        found.append(Violation(promise="text", detail=f"same ids, other characters: {detail}"))
    return found


def _check_finish(history: History, expected: Expected) -> list[Violation]:
    if history.finish is None:
        return [Violation(promise="end", detail=f"{history} without a finish")]
    usage, heard = history.finish.usage.completion_tokens, len(history.token_ids)
    found = []
    if usage != heard:
        found.append(
            Violation(promise="end", detail=f"{history}: usage says {usage} tokens, heard {heard}")
        )
    if not expected.exact:
        return found
    if history.finish.reason is not expected.reason:
        detail = f"{history}: {history.finish.reason}, expected {expected.reason}"
        found.append(Violation(promise="end", detail=detail))
    if heard < len(expected.token_ids) or len(history.text) < len(expected.text):
        detail = f"{history}: {len(expected.token_ids)} tokens were expected"
        found.append(Violation(promise="text", detail=detail))
    return found


def _divergence(number: int, heard: tuple[object, ...], expected: tuple[object, ...]) -> str:
    """The first place where two sequences differ, with what is around it."""
    at = next(
        (i for i, (a, b) in enumerate(zip(heard, expected, strict=False)) if a != b),
        min(len(heard), len(expected)),
    )
    around = slice(max(0, at - 3), at + 5)
    return (
        f"request {number} differs at {at} of {len(heard)}: heard ...{list(heard[around])}, "
        f"expected ...{list(expected[around])} of {len(expected)}"
    )
