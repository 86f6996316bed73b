"""Choice of a session's draft length: most expected tokens per unit of time. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

MIN_SWITCH_GAIN: Final = 0.05
"""What another length must gain before it replaces the present one."""


def choose_draft_length(
    reached: NDArray[np.float64],
    seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    extra_s: float = 0.0,
    step_s: float = 0.0,
    present: int = 0,
) -> int:
    """The length of a session's draft, 1 .. len(reached), with the most tokens per second; 0 where
    there is none to choose. Whether to draft at all is for the speculation controller: what any
    draft costs speaks for a long one, not for none.

    reached: P(the token of depth d stands), by depth. seconds: what a round takes by the length of
    its drafts, float64 [n] -> [n]; a nan says that it is not known, and then the longest draft
    stands. extra_s: time that any draft adds to a round (the exchange, as far as it is waited
    for); step_s: time that each token of it adds (drafting). `present`, the length in force, stays
    unless another one is clearly better.
    """
    longest = len(reached)
    if not longest:
        return 0
    lengths = np.arange(1, longest + 1, dtype=np.float64)
    times = seconds(lengths) + step_s * lengths + extra_s
    if not np.isfinite(times).all() or not (times > 0.0).all():
        return longest
    rates = (1.0 + np.cumsum(reached)) / times
    best = int(np.argmax(rates)) + 1
    if 1 <= present <= longest and rates[best - 1] < (1.0 + MIN_SWITCH_GAIN) * rates[present - 1]:
        return present
    return best
