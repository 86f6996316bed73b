"""`python -m outrider_bench NAME`, also reachable as `outrider bench NAME`."""

from __future__ import annotations

import argparse
import sys

from outrider.errors import OutriderError
from outrider_bench import acceptance, exchange, load, lossless, speed
from outrider_bench.gpu import cli as gpu

BENCHMARKS = {
    "local": (speed, "speculative, plain and transformers decoding, interleaved"),
    "acceptance": (acceptance, "tokens emitted per round by task, rule and temperature"),
    "lossless": (lossless, "token ids with and without a drafter, differences explained"),
    "load": (load, "many concurrent streams, and a full queue"),
    "exchange": (exchange, "round trips between verifier and drafter, without models"),
    "gpu": (gpu, "the device engine: kernels, rounds, placements"),
}


def main() -> int:
    """Run one benchmark; the exit status."""
    parser = argparse.ArgumentParser(prog="outrider bench")
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    for name, (module, text) in BENCHMARKS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=module.__doc__))
    args = parser.parse_args()
    try:
        BENCHMARKS[args.name][0].run(args)
    except OutriderError as error:
        print(f"outrider bench: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
