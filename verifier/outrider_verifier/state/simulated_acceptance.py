"""Parses the draft acceptance rates of --simulated-acceptance, for benchmarks without weights.

If each of K draft tokens is accepted with the probability r, given that the previous one was
accepted, a round emits 1 + r + r^2 + ... + r^K tokens on average.

With a scheduled length L, rounds emit the next smaller or the next larger whole number of tokens,
in the order that keeps their running mean at L.
"""

from __future__ import annotations

LENGTH_PREFIX = "length:"
"""Text in front of a scheduled length."""
_BISECTIONS = 100
_FORMS = f'a mean ("2.6"), a scheduled length ("{LENGTH_PREFIX}2.6") or rates with commas between'


def parse_rates(text: str, num_drafts: int) -> tuple[float, ...]:
    """Return the acceptance rates of the draft positions 1 to `num_drafts`, each given that the
    previous position was accepted.

    `text` is one of four: "" for no simulation, which gives no rates; a scheduled length
    ("length:2.6"), which gives none either; the mean number of tokens of a round ("2.6"); or one
    rate for each position ("0.8,0.6,0.4"). Raises ValueError for anything else.
    """
    if not text or text.startswith(LENGTH_PREFIX):
        return ()
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"simulated_acceptance must be {_FORMS}, not {text!r}") from None
    if len(numbers) == 1:
        return (rate_of_mean(numbers[0], num_drafts),) * num_drafts
    if len(numbers) != num_drafts:
        raise ValueError(
            f"simulated_acceptance gives {len(numbers)} rates for {num_drafts} draft positions"
        )
    if not all(0.0 <= number <= 1.0 for number in numbers):
        raise ValueError(f"simulated_acceptance: rates must be in [0, 1], not {text!r}")
    return numbers


def parse_length(text: str, num_drafts: int) -> float:
    """Return the scheduled mean number of tokens of a round; 0 if `text` schedules no length.
    Raises ValueError unless the length is in [1, num_drafts + 1]."""
    if not text.startswith(LENGTH_PREFIX):
        return 0.0
    try:
        length = float(text.removeprefix(LENGTH_PREFIX))
    except ValueError:
        raise ValueError(f"simulated_acceptance must be {_FORMS}, not {text!r}") from None
    _check_mean(length, num_drafts)
    return length


def rate_of_mean(mean: float, num_drafts: int) -> float:
    """Return the acceptance rate r in [0, 1] of every draft position for which a round emits `mean`
    tokens on average: r^0 + r^1 + ... + r^num_drafts = mean.

    Raises ValueError unless mean is in [1, num_drafts + 1].
    """
    _check_mean(mean, num_drafts)
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2.0
        if sum(rate**position for position in range(num_drafts + 1)) < mean:
            low = rate
        else:
            high = rate
    return high


def _check_mean(mean: float, num_drafts: int) -> None:
    if not 1.0 <= mean <= num_drafts + 1.0:
        raise ValueError(
            f"simulated_acceptance: a mean of {mean:g} tokens a round is not in "
            f"[1, {num_drafts + 1}], what {num_drafts} draft tokens allow"
        )
