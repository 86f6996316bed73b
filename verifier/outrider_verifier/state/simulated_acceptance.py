"""Parses the draft acceptance rates of --simulated-acceptance, for benchmarks without weights.

A round over K draft positions whose nodes are accepted with the same probability r, each given the
one before it, emits 1 + r + r^2 + ... + r^K tokens on average.
"""

from __future__ import annotations

_BISECTIONS = 100


def parse_rates(text: str, num_drafts: int) -> tuple[float, ...]:
    """Return the conditional acceptance rates of the draft positions 1 .. num_drafts.

    `text` is "" (no simulation: no rates), a mean number of tokens a round ("2.6"), or the rates
    themselves, one for each position ("0.8,0.6,0.4"). Raises ValueError for anything else.
    """
    if not text:
        return ()
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"simulated_acceptance must be a mean or rates with commas between, not {text!r}"
        ) from None
    if len(numbers) == 1:
        return (rate_of_mean(numbers[0], num_drafts),) * num_drafts
    if len(numbers) != num_drafts:
        raise ValueError(
            f"simulated_acceptance gives {len(numbers)} rates for {num_drafts} draft positions"
        )
    if not all(0.0 <= number <= 1.0 for number in numbers):
        raise ValueError(f"simulated_acceptance: rates must be in [0, 1], not {text!r}")
    return numbers


def rate_of_mean(mean: float, num_drafts: int) -> float:
    """Return the rate r in [0, 1] with r^0 + r^1 + .. + r^num_drafts = mean.

    Raises ValueError unless mean is in [1, num_drafts + 1].
    """
    if not 1.0 <= mean <= num_drafts + 1.0:
        raise ValueError(
            f"simulated_acceptance: a mean of {mean:g} tokens a round is not in "
            f"[1, {num_drafts + 1}], what {num_drafts} draft tokens allow"
        )
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2.0
        if sum(rate**position for position in range(num_drafts + 1)) < mean:
            low = rate
        else:
            high = rate
    return high
