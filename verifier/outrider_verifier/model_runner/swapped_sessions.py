"""Keeps copies of the KV of preempted sessions in host memory."""

from __future__ import annotations

from outrider.engine.swap import SavedKV, SwapSpace
from outrider_verifier.state.session import Session


class SwappedSessions:
    """Copies the KV of preempted sessions to host memory and back."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[SwapSpace, SavedKV]] = {}
        """Swap space and KV copy of each swapped session, keyed by `Session.ticket`."""

    def __len__(self) -> int:
        return len(self._copies)

    def swap_out(self, session: Session, swap: SwapSpace | None) -> bool:
        """Copy a session's KV to host memory, free its blocks, and return whether the KV was
        copied.

        The KV is not copied if `swap` is None or full, or if the session has no KV. The blocks are
        freed in any case.
        """
        saved = swap.swap_out_sequence(session.kv) if swap is not None and session.kv.len else None
        if swap is not None and saved is not None:
            self._copies[session.ticket] = (swap, saved)
        session.kv.reset()
        return saved is not None

    def prefetch(self, session: Session) -> bool:
        """Start to copy a session's KV back to the device while rounds run.

        Returns whether `swap_in` would now run without delaying a round; True for a session without
        a copy. Call this again until it returns True (see `SwapSpace.prefetch`).
        """
        held = self._copies.get(session.ticket)
        return held is None or held[0].prefetch(held[1])

    def swap_in(self, session: Session) -> bool:
        """Restore a session's KV from its copy in host memory, and drop the copy. Return whether
        there was a copy."""
        held = self._copies.get(session.ticket)
        if held is None:
            return False
        swap, saved = held
        swap.swap_in_sequence(saved, session.kv)
        del self._copies[session.ticket]
        return True

    def drop_copy(self, session: Session) -> None:
        """Drop the copy of a session's KV, if there is one."""
        held = self._copies.pop(session.ticket, None)
        if held is not None:
            held[0].drop_copy(held[1])
