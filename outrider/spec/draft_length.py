"""How long a session's draft should be: most tokens per unit of time (pure)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

HYSTERESIS: Final = 0.05
"""What another length must gain before it replaces the present one."""


def choose_length(
    reached: NDArray[np.float64],
    seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    extra_s: float = 0.0,
    step_s: float = 0.0,
    present: int = 0,
) -> int:
    """The length of a session's draft, 0 .. len(reached), with the most tokens per second.

    reached: P(the token of depth d stands), by depth. seconds: what a round takes by the length of
    its drafts, float64 [n] -> [n]; a nan says that it is not known, and then the longest draft
    stands. extra_s: time that any draft adds to a round (the exchange, as far as it is waited
    for); step_s: time that each token of it adds (drafting). `present`, the length in force, stays
    unless another one is clearly better.
    """
    longest = len(reached)
    lengths = np.arange(longest + 1, dtype=np.float64)
    times = seconds(lengths) + step_s * lengths + extra_s * (lengths > 0)
    if not np.isfinite(times).all() or not (times > 0.0).all():
        return longest
    rates = (1.0 + np.concatenate(([0.0], np.cumsum(reached)))) / times
    best = int(np.argmax(rates))
    if 0 <= present <= longest and rates[best] < (1.0 + HYSTERESIS) * rates[present]:
        return present
    return best
