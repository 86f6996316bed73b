"""Stop checker: finds the token at which a stop string ends an answer, as its ids arrive."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_router.requests.output_assembler import OutputAssembler


class StopChecker:
    """Finds the id that completes a stop string of one request.

    A verifier knows no stop strings and emits whole rounds. The ids behind the stop are dropped
    before anything counts, stores or logs them, so that every count ends there as it ends at an
    end-of-turn id.
    """

    def __init__(self, assembler: OutputAssembler) -> None:
        """`assembler` makes the same text as the one that writes for the client, and belongs to the
        checker alone."""
        self._assembler = assembler

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._assembler.stop_string is not None

    def count_tokens(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> int:
        """Take the next ids; how many of them belong to the answer.

        `last_is_stop`: whether the last one is an id that stops the session.
        """
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self._assembler.push_tokens((token_id,), last_is_stop=last_is_stop and index == last)
            if self.is_stopped:
                return index + 1
        return len(token_ids)
