"""Cost limits of grammars: `CompileLimits` for compiling, `MaskLimits` for computing masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MAX_TIMEOUT_S: Final = 600.0
MIN_MEMORY_MB: Final = 64
MAX_PROCESSES: Final = 64
MAX_FIRST_TRY_S: Final = 0.25
"""Maximum processor time, in seconds, of the first try to compile a grammar that a client sends to
a router. A grammar that needs more is compiled again, with the full limits, in a separate queue."""
MAX_FIRST_TRY_WALL_S: Final = 1.0
"""Maximum wall-clock time of the first try in seconds. It is longer than the processor time because
other processes may use the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileLimits:
    """Limits of compiling one grammar in a process of its own; keys of `[grammar_compile]`."""

    timeout_s: float = 5.0
    """Maximum time for compiling one grammar, in seconds; a grammar that needs longer is
    refused."""
    memory_mb: int = 512
    """Maximum memory for compiling one grammar, in MiB; a grammar that needs more is refused."""
    processes: int = 2
    """Maximum number of grammars that are compiled at the same time, each in a separate process."""

    def __post_init__(self) -> None:
        if not 0.0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be in (0, {MAX_TIMEOUT_S:g}], got {self.timeout_s}")
        if self.memory_mb < MIN_MEMORY_MB:
            raise ValueError(f"memory_mb must be at least {MIN_MEMORY_MB}, got {self.memory_mb}")
        if not 1 <= self.processes <= MAX_PROCESSES:
            raise ValueError(f"processes must be in [1, {MAX_PROCESSES}], got {self.processes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLimits:
    """Limits of computing the masks of one session; keys of `[grammar_masks]`."""

    mask_ms: float = 50.0
    """Maximum processor time of one token mask, in milliseconds; a session whose mask takes longer
    ends with STRUCTURE_FAILED."""
    session_s: float = 5.0
    """Maximum processor time of all slow masks of one session together, in seconds. Slow masks take
    more than a tenth of `mask_ms` each. A session that takes longer ends with STRUCTURE_FAILED."""

    def __post_init__(self) -> None:
        for name in ("mask_ms", "session_s"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
