"""Types of command-line flags for argparse, and flag groups that several commands share.

The text of a ValueError is argparse's error message (exit status 2).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from outrider.errors import InvalidRequestError
from outrider.spec.plan import MAX_FAN_OUT
from outrider.spec.sampling import UINT64_MAX
from outrider.transport.tls import TlsConfig
from outrider.wire.limits import MAX_PRIORITY, MAX_TOP_LOGPROBS

AUTO = "auto"
"""A choice that is left to the server."""


def integer_at_least(low: int) -> Callable[[str], int]:
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


def number_at_least(low: float) -> Callable[[str], float]:
    """A finite number that is not below `low`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {low:g}, got {text}")
        return value

    return parse


def fraction(text: str) -> float:
    """A number above 0 that is at most 1."""
    value = number_at_least(0.0)(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def parse_look_ahead(text: str) -> int | None:
    """0, 1, or auto: None."""
    if text == AUTO:
        return None
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"must be 0, 1 or auto, got {text!r}")
    return int(text)


def parse_fan_out(text: str) -> int:
    """A number of outcomes that are drafted ahead."""
    value = integer_at_least(0)(text)
    if value > MAX_FAN_OUT:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_FAN_OUT}, got {value}")
    return value


def add_look_ahead_arguments(add: Callable[..., object]) -> None:
    """Declare --look-ahead and --fan-out; `add` is a parser's `add_argument`."""
    add(
        "--look-ahead",
        metavar="0|1|auto",
        type=parse_look_ahead,
        help="draft ahead of verdicts: never, where the planner finds that it pays, or as the "
        "router says (default)",
    )
    add(
        "--fan-out",
        metavar="N",
        type=parse_fan_out,
        help="outcomes drafted ahead; 0: drafter's choice",
    )


def parse_bias(text: str) -> tuple[int, float]:
    """ID=AMOUNT of a logit bias."""
    id_, sign, amount = text.partition("=")
    try:
        return integer_at_least(0)(id_), float(amount if sign else "")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=AMOUNT") from None


def parse_priority(text: str) -> int:
    """A request's priority."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if abs(value) > MAX_PRIORITY:
        raise argparse.ArgumentTypeError(f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    return value


def parse_top_logprobs(text: str) -> int:
    """How many of the most probable ids to give with each token."""
    value = integer_at_least(0)(text)
    if value > MAX_TOP_LOGPROBS:
        raise argparse.ArgumentTypeError(f"must be in [0, {MAX_TOP_LOGPROBS}]")
    return value


def parse_seed(text: str) -> int:
    """An integer that fits in 64 bits."""
    value = integer_at_least(0)(text)
    if value > UINT64_MAX:
        raise argparse.ArgumentTypeError("must fit in 64 bits")
    return value


def add_connecting_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how a command connects to a router: by TLS, mutually if it has a certificate. An API
    key comes from the variable OUTRIDER_API_KEY: the command line is no place for secrets."""
    add = parser.add_argument_group("connection").add_argument
    add("--tls-ca", metavar="FILE.pem", type=Path, help="authority of the router's certificate")
    add("--tls-cert", metavar="FILE.pem", type=Path, help="our own certificate")
    add("--tls-key", metavar="FILE.pem", type=Path, help="private key of it")


def tls_of(args: argparse.Namespace) -> TlsConfig | None:
    """What these flags say; None: plain text. Raises InvalidRequestError."""
    try:
        tls = TlsConfig(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key)
    except ValueError as error:
        raise InvalidRequestError(str(error), reason="INVALID_FLAG") from None
    return tls if tls.enabled else None
