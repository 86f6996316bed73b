"""Whatever a client should not have heard is found; what it should have heard is not."""

from __future__ import annotations

import pytest

from outrider.chaos.checker import ExpectedAnswer, allow_none, allow_reasons, check_history
from outrider.chaos.history import ClientHistory, StreamResult
from outrider.errors import (
    DeadlineExceededError,
    InternalError,
    UnavailableError,
)
from outrider.wire.inference import Delta, FinishInfo, Usage
from outrider.wire.messages import FinishReason, SpecStats

EXPECTED = ExpectedAnswer(token_ids=(5, 6, 7, 8), text="abcd", reason=FinishReason.LENGTH)
LOST = UnavailableError("gone", reason="VERIFIER_LOST")


def finish(tokens: int, reason: FinishReason = FinishReason.LENGTH) -> FinishInfo:
    usage = Usage(prompt_tokens=3, completion_tokens=tokens)
    return FinishInfo(reason=reason, usage=usage, stats=SpecStats())


def heard(
    *parts: tuple[str, tuple[int, ...]], end: StreamResult = StreamResult.HUNG
) -> ClientHistory:
    history = ClientHistory(number=0)
    for text, ids in parts:
        history.add_delta(Delta(text=text, token_ids=ids), 0.0)
    history.end = end
    return history


def finished(*parts: tuple[str, tuple[int, ...]], tokens: int = 4) -> ClientHistory:
    history = heard(*parts)
    history.finished(finish(tokens), 1.0)
    return history


WHOLE = (("ab", (5, 6)), ("cd", (7, 8)))


def promises(history: ClientHistory, expected: ExpectedAnswer = EXPECTED) -> list[str]:
    return [found.promise for found in check_history(history, expected, allowed=allow_none)]


def test_the_whole_text_is_no_violation() -> None:
    assert promises(finished(*WHOLE)) == []


@pytest.mark.parametrize(
    ("parts", "promise"),
    {
        "another token": ((("ab", (5, 6)), ("cd", (7, 9))), "text"),
        "a token twice": ((("ab", (5, 6)), ("bcd", (6, 7))), "text"),
        "out of order": ((("cd", (7, 8)), ("ab", (5, 6))), "text"),
        "other characters": ((("ab", (5, 6)), ("cx", (7, 8))), "text"),
        "too few": ((("ab", (5, 6)),), "end"),
        "too many": ((*WHOLE, ("e", (9,))), "text"),
    }.values(),
    ids=["token", "twice", "order", "characters", "few", "many"],
)
def test_every_other_text_is_one(parts: tuple[tuple[str, tuple[int, ...]]], promise: str) -> None:
    assert promise in promises(finished(*parts))


def test_a_finish_that_counts_wrong_or_gives_another_reason_is_found() -> None:
    assert promises(finished(*WHOLE, tokens=5)) == ["end"]
    other = finished(*WHOLE)
    other.finish = finish(4, FinishReason.STOP_STRING)
    assert promises(other) == ["end"]
    other.finish = None
    assert promises(other) == ["end"]


def test_who_left_has_heard_a_beginning_or_something_is_wrong() -> None:
    assert promises(heard(("ab", (5, 6)), end=StreamResult.LEFT)) == []
    assert promises(heard(("ax", (5, 9)), end=StreamResult.LEFT)) == ["text"]


def test_a_reader_without_an_end_hangs() -> None:
    assert promises(heard(*WHOLE)) == ["hang"]


def test_errors_are_wrong_unless_allowed_and_bugs_always() -> None:
    def failed(error: Exception) -> ClientHistory:
        history = heard(("ab", (5, 6)))
        history.failed(error, 1.0)
        return history

    allowed = allow_reasons({"VERIFIER_LOST", "UNSPECIFIED"})
    assert promises(failed(LOST)) == ["error"]
    assert check_history(failed(LOST), EXPECTED, allowed=allowed) == []
    for hopeless in (InternalError("bug"), DeadlineExceededError("late"), ValueError("untyped")):
        found = check_history(failed(hopeless), EXPECTED, allowed=allowed)
        assert [violation.promise for violation in found] == ["error"]


def test_a_text_that_may_depend_on_drafts_need_only_be_whole() -> None:
    expected = ExpectedAnswer(
        token_ids=EXPECTED.token_ids, text="abcd", reason=FinishReason.LENGTH, exact=False
    )
    assert promises(finished(("xy", (1, 2)), ("zz", (3, 4))), expected) == []
    assert promises(finished(("xy", (1, 2))), expected) == ["end"]


def test_the_first_difference_is_shown() -> None:
    (found,) = check_history(finished(("ab", (5, 6)), ("cd", (9, 8))), EXPECTED, allowed=allow_none)
    assert "request 0 differs at 2 of 4" in found.detail
