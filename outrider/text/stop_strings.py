"""Stop-string filter for streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes text through until a stop string is complete, and cuts the text there.

    The stop string itself is cut off unless `include` is set. If it is cut off, text that could be
    the start of a stop string is held back until more text arrives. The stop string that is
    complete first ends the text; of several that are complete at the same character, the longest.
    The result therefore does not depend on how the text was split into pieces.

    Text that is pushed with `may_end=False` does not end the answer: the filter passes on a stop
    string that is complete within that text. A stop string that begins in that text and is
    complete in later text does end the answer.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Create a filter for one answer.

        `stops`: non-empty strings; without any, all text passes through. `include`: whether the
        stop string that ends the text is part of the text.
        """
        assert all(stops), "empty stop strings are refused with the request"
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include = include
        self._held = ""
        """Text that may be the start of a stop string. With `include` it was returned already."""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push_text(self, text: str, *, may_end: bool = True) -> str:
        """Add text and return the text that can be shown now; "" after a match.

        `may_end`: whether a stop string that `text` completes ends the answer.
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
        keep = self._partial_len(held)
        self._held = held[len(held) - keep :]
        return text if self._include else held[: len(held) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end of an answer without a stop string."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return (end, text) of the stop string that is complete first after `num_old`
        characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        return best

    def _partial_len(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is the beginning of a stop
        string."""
        longest = min(len(text), len(self._stops[0]) - 1)
        for length in range(longest, 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
