"""KV copies of preempted sessions in host memory."""

from __future__ import annotations

from outrider.engine.swap import SavedKV, SwapSpace
from outrider_verifier.state.session import Session


class SwappedSessions:
    """Swaps the KV of preempted sessions out, prefetches it and swaps it in."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[SwapSpace, SavedKV]] = {}
        """Swap space and copy of each swapped session, by `Session.ticket`."""

    def __len__(self) -> int:
        return len(self._copies)

    def swap_out(self, session: Session, swap: SwapSpace | None) -> bool:
        """Copy a session's KV to host memory, free its blocks, and return whether KV was copied.

        Nothing is copied without a swap space, without KV, or if the swap space is full. The
        blocks are freed in any case.
        """
        saved = swap.swap_out_sequence(session.kv) if swap is not None and session.kv.len else None
        if swap is not None and saved is not None:
            self._copies[session.ticket] = (swap, saved)
        session.kv.reset()
        return saved is not None

    def prefetch(self, session: Session) -> bool:
        """Start to copy a session's KV back to the device, in parallel with the rounds.

        Returns whether `swap_in` would delay no round; True for a session without a copy. Call this
        again until it returns True (see `SwapSpace.prefetch`).
        """
        held = self._copies.get(session.ticket)
        return held is None or held[0].prefetch(held[1])

    def swap_in(self, session: Session) -> bool:
        """Restore a session's KV from its copy, drop the copy, and return whether there was one."""
        held = self._copies.get(session.ticket)
        if held is None:
            return False
        swap, saved = held
        swap.swap_in_sequence(saved, session.kv)
        del self._copies[session.ticket]
        return True

    def drop_copy(self, session: Session) -> None:
        """Drop a session's copy, if there is one."""
        held = self._copies.pop(session.ticket, None)
        if held is not None:
            held[0].drop_copy(held[1])
