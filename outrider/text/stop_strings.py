"""Stop-string filter for text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Passes text through until a stop string is complete, and cuts the text before it or, where it
    is to be included, behind it.

    Text that could be the start of a stop string is held back, if that is to be cut off. Of several
    stop strings the one that is complete first wins, the longest if several are complete at once,
    so the outcome does not depend on how the text was split into pieces.

    Text may be pushed that cannot end the whole (`may_end=False`): a stop string that is complete
    within it is passed through, one that begins there and is complete later counts.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops` are non-empty; none at all passes everything through. `include`: whether the one
        that ends the text is part of it."""
        assert all(stops), "empty stop strings are refused with the request"
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include = include
        self._held = ""
        """What may begin a stop string; shown already where these are included."""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push_text(self, text: str, *, may_end: bool = True) -> str:
        """Text that is safe to show now. After a match nothing more comes out.

        `may_end`: whether a stop string that `text` completes ends the whole.
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
        """The text held back, once no more can follow."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """End and text of the first stop string that ends behind the first `num_old` characters."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        return best

    def _partial_len(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        longest = min(len(text), len(self._stops[0]) - 1)
        for length in range(longest, 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
