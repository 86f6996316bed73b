"""History checker: compares client histories with the answers of a fault-free run. It does no
I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from outrider.chaos.history import ClientHistory, StreamResult
from outrider.errors import DeadlineExceededError, InternalError, OutriderError
from outrider.wire.messages import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAnswer:
    """Answer that a request gets in a fault-free run."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    exact: bool = True
    """Whether a run with faults must give exactly this answer. If not, its text may depend on the
    drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckViolation:
    """A guarantee that was violated, with a description."""

    promise: str
    """Name of the violated guarantee in one word, such as text, end, hang, error or leak."""
    detail: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.detail}"


AllowedError = Callable[[OutriderError], bool]
"""Function that takes an error and returns whether a client may receive it."""


def check_history(
    history: ClientHistory, expected: ExpectedAnswer, *, allowed: AllowedError
) -> list[CheckViolation]:
    """Return the guarantees that a client's history violates.

    `expected` is the fault-free answer. `allowed` says which errors the client may receive.
    """
    found = _check_text(history, expected)
    match history.end:
        case StreamResult.FINISHED:
            found += _check_finish(history, expected)
        case StreamResult.HUNG:
            found.append(CheckViolation(promise="hang", detail=str(history)))
        case StreamResult.CRASHED:
            found.append(CheckViolation(promise="error", detail=f"not a typed error: {history}"))
        case StreamResult.FAILED if not _permitted(history.error, allowed):
            found.append(CheckViolation(promise="error", detail=str(history)))
    return found


def allow_none(_error: OutriderError) -> bool:
    """Return False, so that no error is allowed."""
    return False


def allow_reasons(allowed: Collection[str]) -> AllowedError:
    """Return a function that allows only errors with one of these reasons."""
    return lambda error: error.reason in allowed


def _permitted(error: BaseException | None, allowed: AllowedError) -> bool:
    # A bug is never what was to be expected, and a deadline that nobody set is a hang.
    hopeless = isinstance(error, InternalError | DeadlineExceededError)
    return isinstance(error, OutriderError) and not hopeless and allowed(error)


def _check_text(history: ClientHistory, expected: ExpectedAnswer) -> list[CheckViolation]:
    """Check that the received tokens and characters are the beginning of the expected ones."""
    if not expected.exact:
        return []
    ids, text = history.token_ids, history.text
    found = []
    if ids != expected.token_ids[: len(ids)]:
        found.append(
            CheckViolation(
                promise="text", detail=_divergence(history.number, ids, expected.token_ids)
            )
        )
    elif text != expected.text[: len(text)]:
        detail = _divergence(history.number, tuple(text), tuple(expected.text))
        found.append(CheckViolation(promise="text", detail=f"same ids, other characters: {detail}"))
    return found


def _check_finish(history: ClientHistory, expected: ExpectedAnswer) -> list[CheckViolation]:
    if history.finish is None:
        return [CheckViolation(promise="end", detail=f"{history} without a finish")]
    usage, heard = history.finish.usage.completion_tokens, len(history.token_ids)
    found = []
    if usage != heard:
        found.append(
            CheckViolation(
                promise="end", detail=f"{history}: usage says {usage} tokens, heard {heard}"
            )
        )
    if not expected.exact:
        return found
    if history.finish.reason is not expected.reason:
        detail = f"{history}: {history.finish.reason}, expected {expected.reason}"
        found.append(CheckViolation(promise="end", detail=detail))
    if heard < len(expected.token_ids) or len(history.text) < len(expected.text):
        detail = f"{history}: {len(expected.token_ids)} tokens were expected"
        found.append(CheckViolation(promise="text", detail=detail))
    return found


def _divergence(number: int, heard: tuple[object, ...], expected: tuple[object, ...]) -> str:
    """Describe the first position at which two sequences differ, with its surroundings."""
    at = next(
        (i for i, (a, b) in enumerate(zip(heard, expected, strict=False)) if a != b),
        min(len(heard), len(expected)),
    )
    around = slice(max(0, at - 3), at + 5)
    return (
        f"request {number} differs at {at} of {len(heard)}: heard ...{list(heard[around])}, "
        f"expected ...{list(expected[around])} of {len(expected)}"
    )
