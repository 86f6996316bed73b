"""Types of command-line flags; a ValueError's text is argparse's message, exit status 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from outrider.spec.sampling import UINT64_MAX


def at_least(low: int) -> Callable[[str], int]:
    """An integer that is not below `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value

    return parse


def bias(text: str) -> tuple[int, float]:
    """ID=AMOUNT of a logit bias."""
    id_, sign, amount = text.partition("=")
    try:
        return at_least(0)(id_), float(amount if sign else "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=AMOUNT") from None


def seed(text: str) -> int:
    """An integer that fits in 64 bits."""
    value = at_least(0)(text)
    if value > UINT64_MAX:
        raise argparse.ArgumentTypeError("must fit in 64 bits")
    return value
