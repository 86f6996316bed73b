"""From the ids of a session to the text of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.text.detokenizer import Detokenizer
from outrider.text.pieces import PieceTable
from outrider.text.stops import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step adds to the stream."""

    text: str
    token_ids: tuple[int, ...]


class OutputAssembler:
    """Detokenizes one session and watches for stop strings.

    With stop strings the ids are taken one by one, and those after the id that completed a stop
    string are dropped: the stream is the same however many ids a round emits.
    """

    def __init__(
        self, pieces: PieceTable, stops: Sequence[str], *, include_stop: bool = False
    ) -> None:
        """`include_stop`: whether what ends the text, string or id, is part of it."""
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStrings(stops, include=include_stop)
        self._include_stop = include_stop
        self._one_by_one = bool(stops)
        self.num_tokens = 0
        """Ids passed on so far."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> Piece:
        """Add ids. The id that stops a session (`last_is_stop`) contributes no text, unless it is
        included."""
        text: list[str] = []
        used = 0
        silent = last_is_stop and not self._include_stop
        spoken = len(token_ids) - 1 if silent else len(token_ids)
        if self._one_by_one:
            while used < spoken and self._stops.matched is None:
                text.append(self._stops.push(self._detokenizer.push((token_ids[used],))))
                used += 1
        else:
            text.append(self._detokenizer.push(token_ids[:spoken]))
            used = spoken
        if used == spoken and self._stops.matched is None:
            used = len(token_ids)
        self.num_tokens += used
        return Piece(text="".join(text), token_ids=tuple(token_ids[:used]))

    def finish(self) -> str:
        """Text that was held back, at the end of a session that no stop string ended."""
        if self._stops.matched is not None:
            return ""
        text = self._stops.push(self._detokenizer.finish())
        return text + (self._stops.finish() if self._stops.matched is None else "")
