"""Entry point `python -m outrider_bench NAME`, also reachable as `outrider bench NAME`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from outrider.errors import OutriderError
from outrider.extras import explain_missing_packages

# Modules by name: the client processes of `serve` import this one again, and shall not import
# torch and all engines with it.
BENCHMARKS: Final = {
    "local": ("decoding_methods", "speculative, plain and transformers decoding, interleaved"),
    "acceptance": ("quality.acceptance", "tokens emitted per round by task, rule and temperature"),
    "look-ahead": ("quality.look_ahead", "acceptance and hit rates of drafts made one round ahead"),
    "lossless": ("quality.lossless", "token ids with and without a drafter, differences explained"),
    "tool-calls": (
        "quality.tool_calls",
        "required tool calls: valid arguments, and equal answers in streams and with drafts",
    ),
    "load": ("faults.overload", "many concurrent streams, and a full queue"),
    "preemption": (
        "faults.preemption",
        "fewer KV blocks than sessions need: waiting, preempting, growing",
    ),
    "stress": (
        "faults.stress",
        "requests that are cancelled, late or never read: what is held after",
    ),
    "soak": ("faults.soak", "many concurrent streams for minutes: errors, and the slope of memory"),
    "events": ("events.cli", "events a second through one router, and its processor time for each"),
    "exchange": (
        "exchange.cli",
        "idle time of a round by transport between verifier and drafter, without models",
    ),
    "host": ("host.cli", "the host's share of a round in both processes, step by step"),
    "recovery": (
        "faults.recovery",
        "pauses of streams whose verifier or drafter is killed or stopped",
    ),
    "exchange-faults": (
        "faults.exchange_faults",
        "streams while the drafter of an exchange between devices fails or lies",
    ),
    "rolling": (
        "faults.rolling",
        "restarts of every process, one by one, under sessions that ask on",
    ),
    "serve": ("serve.cli", "tokens/s, latencies and efficiency through the router, by placement"),
    "pipeline": ("serve.pipeline", "what look-ahead gives, from the cells of serve"),
    "round-census": (
        "round_census",
        "files that a steady round enters, and kinds of object that it hands over",
    ),
    "timeline": (
        "timelines.merge",
        "what several processes did when, for Perfetto and as a picture",
    ),
    "gpu": ("gpu.cli", "the device engine: kernels, rounds, placements"),
}


def main() -> int:
    """Run the benchmark that the command line names, and return the exit status."""
    try:
        _run(sys.argv[1:])
    except OutriderError as error:
        print(f"outrider bench: {error.message}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="outrider bench")
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    parsers = {name: commands.add_parser(name, help=text) for name, (_, text) in BENCHMARKS.items()}
    asked = next(iter(arguments), "")
    if asked not in BENCHMARKS:
        parser.parse_args(arguments)  # help, or a mistake
        return
    # Only what is asked for: some need packages that others do without.
    with explain_missing_packages(asked):
        module = importlib.import_module(f"outrider_bench.{BENCHMARKS[asked][0]}")
        parsers[asked].description = module.__doc__
        module.add_arguments(parsers[asked])
        module.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
