"""Free list of session slots."""

from __future__ import annotations

from outrider.errors import ResourceExhaustedError


class FreeSlots:
    """Free list of the session slots 0 to count - 1. Slot `count` is the padding slot, which is
    never returned by `take_slot`."""

    def __init__(self, count: int, *, reason: str) -> None:
        """`count`: number of session slots. `reason`: reason of the error that is raised when all
        slots are taken."""
        self.padding = count
        self.total = count + 1
        """Number of slots, including the padding slot."""
        self._reason = reason
        self._free = list(reversed(range(count)))

    def take_slot(self) -> int:
        """Take a free slot and return it. Raises ResourceExhaustedError if all slots are taken."""
        if not self._free:
            raise ResourceExhaustedError(
                f"all {self.padding} session slots are taken", reason=self._reason
            )
        return self._free.pop()

    def return_slot(self, slot: int) -> None:
        """Return a slot to the free list. The caller must have taken it. An assertion fails for
        slots that are free and for the padding slot."""
        assert 0 <= slot < self.padding, f"slot {slot} is no session's"
        assert slot not in self._free, f"slot {slot} is free already"
        self._free.append(slot)
