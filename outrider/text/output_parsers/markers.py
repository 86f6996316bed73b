"""Search for markers, such as `<tool_call>`, in text that arrives in pieces.

The time that this takes is proportional to the length of the text, however it is cut into pieces.
"""

from __future__ import annotations

import functools
import re
from typing import Final

from outrider.text.stop_strings import partial_match_len

MAX_HELD_CHARS: Final = 1 << 17
"""Maximum number of characters that are held back until it is known what they belong to. After so
many of them a call whose name is not known yet counts as malformed, so that they are content."""
_SPACE: Final = re.compile(r"\s*")


@functools.lru_cache(maxsize=256)
def _search_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of any of some texts. At one position, the longest of them counts."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


def find_marker(text: str, start: int, end: int, markers: tuple[str, ...]) -> re.Match[str] | None:
    """Return the first of `markers` that lies between two indices of a text; None if none does."""
    return _search_pattern(markers).search(text, start, end)


def skip_space(text: str, start: int) -> int:
    """Return the index of the first character from `start` on that is no white space."""
    found = _SPACE.match(text, start)
    assert found is not None, "no white space matches, too"
    return found.end()


def is_separator(text: str, separator: str = "") -> bool:
    """Return whether a text only separates calls: a comma in an array, `separator`, or space."""
    return text.strip() in ("", ",", separator)


class HeldText:
    """Text that is held back in pieces until it is known what it belongs to."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push_text(self, text: str) -> None:
        """Add text."""
        if text:
            self._pieces.append(text)
            self._length += len(text)

    def take_all(self) -> str:
        """Take all text."""
        taken = "".join(self._pieces)
        self._pieces, self._length = [], 0
        return taken


class MarkedText:
    """Text that was received and not processed yet, in which a parser looks for markers."""

    def __init__(self) -> None:
        self.text = ""
        """Received text, of which the part from `position` on is not processed yet."""
        self.position = 0

    def __len__(self) -> int:
        return len(self.text) - self.position

    def push_text(self, text: str) -> None:
        """Add received text."""
        self.text, self.position = self.text[self.position :] + text, 0

    def move_to(self, position: int) -> None:
        """Mark the text before an index of `text` as processed, and the rest as not processed."""
        self.position = position

    def take_until(self, *markers: str) -> tuple[str, str]:
        """Take the text before the first of `markers`, and this marker. Without a marker in the
        text, take the text that cannot be part of one, and return "" for the marker."""
        start, end = self.position, len(self.text)
        found = find_marker(self.text, start, end, markers)
        if found is not None:
            self.position = found.end()
            return self.text[start : found.start()], found[0]
        longest = max(map(len, markers))
        self.position = end - partial_match_len(self.text[max(start, end - longest) :], markers)
        return self.text[start : self.position], ""

    def take_space(self) -> str:
        """Take the white space at the beginning."""
        start = self.position
        self.position = skip_space(self.text, start)
        return self.text[start : self.position]

    def take_prefix(self, *prefixes: str) -> str | None:
        """Take the longest of `prefixes` with which the text begins. Return "" if the text begins
        with none of them, and None if more text is needed to decide."""
        longest = ""
        for prefix in prefixes:
            if self.text.startswith(prefix, self.position):
                longest = max(longest, prefix, key=len)
            elif len(self) < len(prefix) and prefix.startswith(self.text[self.position :]):
                return None
        self.position += len(longest)
        return longest

    def take_all(self) -> str:
        """Take all text."""
        taken = self.text[self.position :]
        self.text, self.position = "", 0
        return taken
