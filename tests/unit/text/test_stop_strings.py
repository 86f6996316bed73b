"""Stop strings cut the text at the same place however it arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.text.stop_strings import StopStringFilter

STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)
TEXT = st.text(alphabet="abc\n", max_size=24)


def cut_by_hand(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The definition: the first position at which some stop string is complete."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    text=TEXT,
    stops=STOPS,
    sizes=st.lists(st.integers(1, 5), min_size=24, max_size=24),
    include=st.booleans(),
)
def test_any_chunking_cuts_where_the_definition_says(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    matcher, shown, rest = StopStringFilter(stops, include=include), "", text
    for size in sizes:
        shown += matcher.push_text(rest[:size])
        rest = rest[size:]
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == cut_by_hand(text, stops, include=include)


def test_only_what_could_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStringFilter(["\n\nUser:"])
    assert matcher.push_text("Hello.\n") == "Hello."
    assert matcher.push_text("\nUse") == ""
    assert matcher.push_text("d it") == "\n\nUsed it"
    assert matcher.matched is None


def test_nothing_is_held_back_where_stop_strings_are_included() -> None:
    matcher = StopStringFilter(["END"], include=True)
    assert matcher.push_text("a E") == "a E"
    assert matcher.push_text("N") == "N"
    assert matcher.push_text("D b") == "D"
    assert (matcher.matched, matcher.push_text("more"), matcher.flush()) == ("END", "", "")


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopStringFilter(["END"])
    assert matcher.push_text("a END b") == "a "
    assert matcher.matched == "END"
    assert matcher.push_text("more") == ""
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStringFilter([]).push_text("text") == "text"
