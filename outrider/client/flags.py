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
"""Value of flags whose choice is left to the server."""
CA_HELP = "Certificate of the authority that signed the router's certificate; enables TLS."


def integer_at_least(low: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `low`."""

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
    """Return an argparse type for finite numbers of at least `low`."""

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
    """Parse a number above 0 and at most 1."""
    value = number_at_least(0.0)(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def parse_look_ahead(text: str) -> int | None:
    """Parse 0, 1 or auto; auto becomes None."""
    if text == AUTO:
        return None
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"must be 0, 1 or auto, got {text!r}")
    return int(text)


def parse_fan_out(text: str) -> int:
    """Parse the number of outcomes per round for which drafts are made ahead."""
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
    """Parse ID=AMOUNT of a logit bias."""
    id_, sign, amount = text.partition("=")
    try:
        return integer_at_least(0)(id_), float(amount if sign else "")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be ID=AMOUNT, such as 42=-1.5, got {text!r}"
        ) from None


def parse_priority(text: str) -> int:
    """Parse the priority of a request."""
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
    """Parse the number of most probable token ids that are returned with each token."""
    value = integer_at_least(0)(text)
    if value > MAX_TOP_LOGPROBS:
        raise argparse.ArgumentTypeError(f"must be in [0, {MAX_TOP_LOGPROBS}], got {value}")
    return value


def parse_seed(text: str) -> int:
    """Parse a seed: an unsigned integer of 64 bits."""
    value = integer_at_least(0)(text)
    if value > UINT64_MAX:
        raise argparse.ArgumentTypeError(f"must fit in 64 bits, got {value}")
    return value


def add_connecting_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the TLS flags of commands that connect to a router; a certificate enables mutual TLS.

    The API key comes from the environment variable OUTRIDER_API_KEY, because other users of the
    machine can read command lines.
    """
    add = parser.add_argument_group("connection").add_argument
    add("--tls-ca", metavar="FILE.pem", type=Path, help=CA_HELP)
    add("--tls-cert", metavar="FILE.pem", type=Path, help="Client certificate.")
    add("--tls-key", metavar="FILE.pem", type=Path, help="Private key of --tls-cert.")


def tls_of(args: argparse.Namespace) -> TlsConfig | None:
    """Return the TLS configuration that the flags set, or None for plain text.

    Raises InvalidRequestError.
    """
    try:
        tls = TlsConfig(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key)
    except ValueError as error:
        raise InvalidRequestError(str(error), reason="INVALID_FLAG") from None
    return tls if tls.enabled else None
