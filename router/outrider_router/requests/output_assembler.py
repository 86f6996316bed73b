"""Output assembler: turns a session's token ids into text, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.text.detokenizer import Detokenizer
from outrider.text.stop_strings import StopStringFilter
from outrider.text.token_bytes import TokenByteTable


class OutputAssembler:
    """Detokenizes one session and cuts its text at the first stop string.

    The text is the same however many ids are pushed at once. Ids behind the one that completes a
    stop string must not be pushed: `outrider_router.requests.stop_checker` finds that id.
    """

    def __init__(
        self,
        pieces: TokenByteTable,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop`: whether what ends the text, string or id, is part of it; `min_tokens`:
        stop strings that the first so many ids complete do not end the text."""
        self._detokenizer = Detokenizer(pieces)
        self._stops = StopStringFilter(stops, include=include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens if stops else 0
        self.num_tokens = 0
        """Ids passed on so far."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.matched

    def push_tokens(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> str:
        """Add ids; the text that can be shown now.

        The id that stops a session (`last_is_stop`) contributes no text, unless it is included.
        """
        silent = last_is_stop and not self._include_stop
        spoken = token_ids[:-1] if silent else token_ids
        early = max(0, self._min_tokens - self.num_tokens)
        self.num_tokens += len(token_ids)
        text = ""
        if early:
            text = self._stops.push_text(
                self._detokenizer.push_tokens(spoken[:early]), may_end=False
            )
            spoken = spoken[early:]
        return text + self._stops.push_text(self._detokenizer.push_tokens(spoken))

    def flush(self) -> str:
        """Text that was held back, at the end of a session that no stop string ended."""
        if self._stops.matched is not None:
            return ""
        text = self._stops.push_text(self._detokenizer.flush())
        return text + (self._stops.flush() if self._stops.matched is None else "")
