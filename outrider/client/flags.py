"""Argparse types for command-line flags, and groups of flags that several commands share.

Argparse prints the text of a type's error and exits with status 2.
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
"""Flag value that leaves the choice to the server."""
CA_HELP = "Certificate of the authority that signed the router's certificate; enables TLS."


def integer_at_least(low: int) -> Callable[[str], int]:
    """Return an argparse type that accepts integers of at least `low`."""

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
    """Return an argparse type that accepts finite numbers of at least `low`."""

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
    """Parse a number that is greater than 0 and at most 1."""
    value = number_at_least(0.0)(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def parse_look_ahead(text: str) -> int | None:
    """Parse "0", "1" or "auto"; "auto" gives None."""
    if text == AUTO:
        return None
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"must be 0, 1 or auto, got {text!r}")
    return int(text)


def parse_fan_out(text: str) -> int:
    """Parse the fan-out: the number of outcomes of a round for which look-ahead makes drafts."""
    value = integer_at_least(0)(text)
    if value > MAX_FAN_OUT:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_FAN_OUT}, got {value}")
    return value


def add_look_ahead_arguments(add: Callable[..., object]) -> None:
    """Add the flags --look-ahead and --fan-out to a parser; `add` is its `add_argument` method."""
    add(
        "--look-ahead",
        metavar="0|1|auto",
        type=parse_look_ahead,
        help="Look-ahead, drafting before the verdict arrives; 0: never, 1: when the planner "
        "expects a gain, auto: as the router is configured (default: auto).",
    )
    add(
        "--fan-out",
        metavar="N",
        type=parse_fan_out,
        help="Number of outcomes drafted ahead in each round; 0: chosen by the drafter.",
    )


def parse_bias(text: str) -> tuple[int, float]:
    """Parse "ID=AMOUNT": a token id and the value that is added to its logit."""
    id_, sign, amount = text.partition("=")
    try:
        return integer_at_least(0)(id_), float(amount if sign else "")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be ID=AMOUNT, such as 42=-1.5, got {text!r}"
        ) from None


def parse_priority(text: str) -> int:
    """Parse the priority of a request, an integer."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if abs(value) > MAX_PRIORITY:
        raise argparse.ArgumentTypeError(
            f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {value}"
        )
    return value


def parse_top_logprobs(text: str) -> int:
    """Parse the number of most probable tokens whose log-probabilities are returned at each
    position."""
    value = integer_at_least(0)(text)
    if value > MAX_TOP_LOGPROBS:
        raise argparse.ArgumentTypeError(f"must be in [0, {MAX_TOP_LOGPROBS}], got {value}")
    return value


def parse_seed(text: str) -> int:
    """Parse a seed, which is an unsigned 64-bit integer."""
    value = integer_at_least(0)(text)
    if value > UINT64_MAX:
        raise argparse.ArgumentTypeError(f"must fit in 64 bits, got {value}")
    return value


def add_connecting_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the TLS flags of commands that connect to a router. A client certificate turns on mutual
    TLS.

    There is no flag for the API key, because other users of the machine can read command lines. The
    key comes from the environment variable OUTRIDER_API_KEY.
    """
    add = parser.add_argument_group("connection").add_argument
    add("--tls-ca", metavar="FILE.pem", type=Path, help=CA_HELP)
    add("--tls-cert", metavar="FILE.pem", type=Path, help="Client certificate.")
    add("--tls-key", metavar="FILE.pem", type=Path, help="Private key of --tls-cert.")


def tls_of(args: argparse.Namespace) -> TlsConfig | None:
    """Return the TLS configuration that the given flags set, or None for plain text.

    Raises InvalidRequestError.
    """
    try:
        tls = TlsConfig(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key)
    except ValueError as error:
        raise InvalidRequestError(str(error), reason="INVALID_FLAG") from None
    return tls if tls.enabled else None
