"""Search for markers, such as `<tool_call>`, in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Collection

from outrider.text.stop_strings import partial_match_len


def first_marker(text: str, markers: Collection[str]) -> tuple[int, str] | None:
    """Return the position and the marker that occurs first in a text; None if none occurs. Of
    several at one position, the longest counts."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    position, _, marker = min((each for each in found if each[0] >= 0), default=(-1, 0, ""))
    return (position, marker) if marker else None


class MarkedText:
    """Text that was received and not processed yet, in which a parser looks for markers."""

    def __init__(self) -> None:
        self._text = ""

    def __len__(self) -> int:
        return len(self._text)

    def push_text(self, text: str) -> None:
        """Add received text."""
        self._text += text

    def push_back(self, text: str) -> None:
        """Put text that was taken back, before the remaining text."""
        self._text = text + self._text

    def take_until(self, *markers: str) -> tuple[str, str]:
        """Take the text before the first of `markers`, and this marker. Without a marker in the
        text, take the text that cannot be part of one, and return "" for the marker."""
        found = first_marker(self._text, markers)
        if found is None:
            kept = len(self._text) - partial_match_len(self._text, markers)
            taken, self._text = self._text[:kept], self._text[kept:]
            return taken, ""
        position, marker = found
        taken, self._text = self._text[:position], self._text[position + len(marker) :]
        return taken, marker

    def take_space(self) -> str:
        """Take the white space at the beginning."""
        rest = self._text.lstrip()
        space, self._text = self._text[: len(self._text) - len(rest)], rest
        return space

    def take_prefix(self, *prefixes: str) -> str | None:
        """Take the longest of `prefixes` with which the text begins. Return "" if the text begins
        with none of them, and None if more text is needed to decide."""
        matching = [prefix for prefix in prefixes if self._text.startswith(prefix)]
        longest = max(matching, key=len, default="")
        if any(
            len(prefix) > len(self._text) and prefix.startswith(self._text) for prefix in prefixes
        ):
            return None
        self._text = self._text[len(longest) :]
        return longest

    def take_all(self) -> str:
        """Take all text."""
        taken, self._text = self._text, ""
        return taken
