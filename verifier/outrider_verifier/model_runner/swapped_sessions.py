"""The K/V of suspended sessions that was swapped out."""

from __future__ import annotations

from outrider.engine.swap import Saved, SwapSpace
from outrider_verifier.state.session import Session


class Suspended:
    """Which sessions have a copy, and where."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[SwapSpace, Saved]] = {}
        """By the session's ticket."""

    def __len__(self) -> int:
        return len(self._copies)

    def take(self, session: Session, swap: SwapSpace | None) -> bool:
        """Copy a session's K/V if there is room for it, and give its blocks back in any case;
        whether it was copied."""
        saved = swap.save(session.kv) if swap is not None and session.kv.len else None
        if swap is not None and saved is not None:
            self._copies[session.ticket] = (swap, saved)
        session.kv.clear()
        return saved is not None

    def fetch(self, session: Session) -> bool:
        """See `SwapSpace.fetch`; True without a copy."""
        held = self._copies.get(session.ticket)
        return held is None or held[0].fetch(held[1])

    def give(self, session: Session) -> bool:
        """Put a copy back into the session's K/V; whether there was one."""
        held = self._copies.get(session.ticket)
        if held is None:
            return False
        swap, saved = held
        swap.restore(saved, session.kv)
        del self._copies[session.ticket]
        return True

    def drop(self, session: Session) -> None:
        """Forget a session's copy, if there is one."""
        held = self._copies.pop(session.ticket, None)
        if held is not None:
            held[0].drop(held[1])
