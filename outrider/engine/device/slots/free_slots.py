"""Free list of session slots. Pure."""

from __future__ import annotations

from outrider.errors import ResourceExhaustedError


class FreeSlots:
    """Free list of the slots 0 .. count - 1; slot `count` is padding and never handed out."""

    def __init__(self, count: int, *, reason: str) -> None:
        """`count`: slots for sessions; `reason`: of the error when all are taken."""
        self.padding = count
        self.total = count + 1
        """Slots, the padding one included."""
        self._reason = reason
        self._free = list(reversed(range(count)))

    def take_slot(self) -> int:
        """A free slot. Raises ResourceExhaustedError when all are taken."""
        if not self._free:
            raise ResourceExhaustedError(
                f"all {self.padding} session slots are taken", reason=self._reason
            )
        return self._free.pop()

    def return_slot(self, slot: int) -> None:
        """Return a slot. One that is free already, or padding, is a bug of the caller."""
        assert 0 <= slot < self.padding, f"slot {slot} is no session's"
        assert slot not in self._free, f"slot {slot} is free already"
        self._free.append(slot)
