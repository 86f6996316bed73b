"""Stop-string filter for streamed text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def partial_match_len(text: str, strings: Collection[str]) -> int:
    """Return the length of the longest suffix of `text` that is the beginning of one of `strings`,
    and shorter than the longest of them."""
    longest = max(map(len, strings), default=1) - 1
    for length in range(min(len(text), longest), 0, -1):
        suffix = text[-length:]
        if any(string.startswith(suffix) for string in strings):
            return length
    return 0


class StopStringFilter:
    """Passes text through until a stop string is complete, and cuts the text there.

    The stop string itself is cut off, too, unless `include` is set. If it is cut off, text that
    could be the start of a stop string is held back until more text arrives. The first stop string
    that is complete ends the text. If several are complete at the same character, the longest of
    them counts. The result therefore does not depend on how the text was split into pieces.

    A stop string that is complete within text that is pushed with `may_end=False` does not end the
    answer and is passed on. A stop string that begins in such text and is complete in later text
    ends the answer.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Create a filter for one answer.

        `stops` are non-empty strings; if there are none, all text passes through. `include` says
        whether the stop string that ends the answer is part of the returned text.
        """
        assert all(stops), "empty stop strings are refused with the request"
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include = include
        self._held = ""
        """Text that may be the start of a stop string. With `include` it was returned already."""
        self.matched: str | None = None
        """The stop string that ended the text; None before that."""

    def push_text(self, text: str, *, may_end: bool = True) -> str:
        """Add text, and return the text that can be shown now. It is empty after a stop string has
        ended the answer.

        `may_end` says whether a stop string that `text` completes ends the answer.
        """
        if not self._stops or self.matched is not None:
            return text if not self._stops else ""
        shown = len(self._held) if self._include else 0
        held = self._held + text
        match = self._first_match(held, len(self._held)) if may_end else None
        if match is not None:
            end, self.matched = match
            self._held = ""
            return held[shown : end if self._include else end - len(self.matched)]
        keep = partial_match_len(held, self._stops)
        self._held = held[len(held) - keep :]
        return text if self._include else held[: len(held) - keep]

    def flush(self) -> str:
        """Return the text that is held back. Call this at the end of an answer that no stop string
        has ended."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return the end index and the stop string of the first match that ends after the first
        `num_old` characters, or None."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        return best
