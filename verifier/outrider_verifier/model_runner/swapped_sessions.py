"""K/V of preempted sessions that was swapped to host memory."""

from __future__ import annotations

from outrider.engine.swap import SavedKV, SwapSpace
from outrider_verifier.state.session import Session


class SwappedSessions:
    """Swapped K/V by session: swaps it out, prefetches it and swaps it in."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[SwapSpace, SavedKV]] = {}
        """By the session's ticket."""

    def __len__(self) -> int:
        return len(self._copies)

    def swap_out(self, session: Session, swap: SwapSpace | None) -> bool:
        """Copy a session's K/V if there is room for it, and give its blocks back in any case;
        whether it was copied."""
        saved = swap.swap_out_sequence(session.kv) if swap is not None and session.kv.len else None
        if swap is not None and saved is not None:
            self._copies[session.ticket] = (swap, saved)
        session.kv.reset()
        return saved is not None

    def prefetch(self, session: Session) -> bool:
        """See `SwapSpace.prefetch`; True without a copy."""
        held = self._copies.get(session.ticket)
        return held is None or held[0].prefetch(held[1])

    def swap_in(self, session: Session) -> bool:
        """Put a copy back into the session's K/V; whether there was one."""
        held = self._copies.get(session.ticket)
        if held is None:
            return False
        swap, saved = held
        swap.swap_in_sequence(saved, session.kv)
        del self._copies[session.ticket]
        return True

    def drop_copy(self, session: Session) -> None:
        """Forget a session's copy, if there is one."""
        held = self._copies.pop(session.ticket, None)
        if held is not None:
            held[0].drop_copy(held[1])
