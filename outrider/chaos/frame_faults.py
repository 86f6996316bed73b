"""Frame faults of a link: frames are dropped, duplicated, reordered, corrupted or truncated."""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.chaos.faults import FRAME_FAULTS, FaultKind

MAX_FLIPS = 4


@dataclass(slots=True, kw_only=True)
class FrameFaults:
    """Applies frame faults to one direction of a link."""

    kind: FaultKind
    share: float
    """Share of the frames to which the fault is applied."""
    rng: random.Random
    held: bytes | None = None
    """Frame that is held back so that the next one overtakes it."""

    def __post_init__(self) -> None:
        assert self.kind in FRAME_FAULTS, self.kind

    def frames(self, frame: bytes) -> list[bytes]:
        """Return the frames that the receiver gets when the sender sends `frame`."""
        held, self.held = self.held, None
        if held is not None:
            return [frame, held]
        if self.rng.random() >= self.share:
            return [frame]
        match self.kind:
            case FaultKind.LOSE:
                return []
            case FaultKind.DUPLICATE:
                return [frame, frame]
            case FaultKind.REORDER:
                self.held = frame
                return []
            case FaultKind.CORRUPT:
                return [flip_bits(frame, self.rng)]
            case _:
                return [frame[: self.rng.randrange(len(frame) + 1)]]


def flip_bits(frame: bytes, rng: random.Random) -> bytes:
    """Return a copy of a frame with a few bits flipped."""
    changed = bytearray(frame)
    for _ in range(rng.randint(1, MAX_FLIPS) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)
