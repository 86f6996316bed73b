"""Parses the draft acceptance rates of --simulated-acceptance, for benchmarks without weights.

If each of K draft tokens is accepted with the probability r, given that the previous one was
accepted, a round emits 1 + r + r^2 + ... + r^K tokens on average.
"""

from __future__ import annotations

_BISECTIONS = 100


def parse_rates(text: str, num_drafts: int) -> tuple[float, ...]:
    """Return the acceptance rates of the draft positions 1 to `num_drafts`, each given that the
    previous position was accepted.

    `text` is one of three: "" for no simulation, which gives no rates; the mean number of tokens of
    a round ("2.6"); or one rate for each position ("0.8,0.6,0.4"). Raises ValueError for anything
    else.
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
    """Return the acceptance rate r in [0, 1] of every draft position for which a round emits `mean`
    tokens on average: r^0 + r^1 + ... + r^num_drafts = mean.

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
