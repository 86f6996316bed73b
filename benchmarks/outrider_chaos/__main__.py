"""Run a fleet under faults, and check answers and guarantees (`outrider chaos`).

The exit status is 0 if all guarantees held, 1 if a guarantee was violated, and 2 if the arguments
are invalid or the run could not start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.errors import OutriderError

_TINY = "tiny"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mode that the arguments select and return the exit status."""
    args = make_parser().parse_args(argv)
    try:
        if args.fuzz is not None:
            from outrider_chaos.fuzz_runner import parse_ports, run_fuzz

            ports = parse_ports(args.ports)
            return run_fuzz(args.fuzz, seed=args.seed, jobs=args.jobs, ports=ports)
        if args.router is not None:
            return _run_siege(args)
        return _run_seeds(args)
    except OutriderError as error:
        sys.stderr.write(f"outrider chaos: {error.message}\n")
        return 2


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outrider chaos", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument(
        "--seeds", metavar="A-B", type=_range, help="Run the fault schedules of these seeds."
    )
    mode.add_argument(
        "--replay", metavar="SEED", type=int, help="Run one seed and print its full report."
    )
    mode.add_argument(
        "--fuzz", metavar="N", type=int, help="Send N malformed frames to every decoder."
    )
    mode.add_argument(
        "--router",
        metavar="HOST:PORT",
        help="Send load to the running fleet of this router, and inject faults.",
    )
    seeds = parser.add_argument_group("options of --seeds and --replay")
    seeds.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=os.cpu_count() or 1,
        help="Number of parallel processes, also of --fuzz (default: number of CPUs).",
    )
    seeds.add_argument(
        "--shrink",
        action="store_true",
        help="With --replay: reduce a failing schedule to a minimal one.",
    )
    seeds.add_argument(
        "--model",
        metavar="NAME|DIR",
        default=_TINY,
        help="Target model (default: a tiny random model).",
    )
    seeds.add_argument(
        "--slowness",
        metavar="F",
        type=float,
        default=1.0,
        help="Factor by which all times are longer (default: %(default)s).",
    )
    seeds.add_argument(
        "--head", metavar="DIR", type=Path, help="Draft head (default: the model's own head)."
    )
    fuzzing = parser.add_argument_group("options of --fuzz")
    fuzzing.add_argument(
        "--ports",
        metavar="A,B",
        default="",
        help="Ports whose decoders receive frames (default: all ports).",
    )
    running = parser.add_argument_group("options of --router")
    running.add_argument(
        "--process",
        metavar="ROLE=PID",
        action="append",
        default=[],
        help="Process on this machine that faults may hit. Repeatable.",
    )
    running.add_argument(
        "--faults",
        metavar="A,B",
        default="stop",
        help="Kinds of faults: kill, terminate, stop (default: %(default)s).",
    )
    running.add_argument(
        "--duration-s",
        metavar="S",
        type=float,
        default=30.0,
        help="Duration of the run, in seconds (default: %(default)s).",
    )
    running.add_argument(
        "--every-s",
        metavar="S",
        type=float,
        default=5.0,
        help="Time between two faults, in seconds (default: %(default)s).",
    )
    running.add_argument(
        "--concurrency",
        metavar="N",
        type=int,
        default=8,
        help="Number of clients (default: %(default)s).",
    )
    running.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=64,
        help="Maximum number of output tokens of a request (default: %(default)s).",
    )
    running.add_argument(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="Random seed of --router and --fuzz (default: %(default)s).",
    )
    return parser


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not A-B") from None


def _run_siege(args: argparse.Namespace) -> int:
    from outrider.chaos.signals import parse_kinds, parse_target
    from outrider_chaos.live_run import LiveRun, run_live

    return run_live(
        LiveRun(
            router=args.router,
            targets=tuple(parse_target(text) for text in args.process),
            kinds=parse_kinds(args.faults),
            duration_s=args.duration_s,
            every_s=args.every_s,
            clients=args.concurrency,
            max_tokens=args.max_tokens,
            seed=args.seed,
        )
    )


def _run_seeds(args: argparse.Namespace) -> int:
    from outrider_chaos.schedule_run import RunOutcome
    from outrider_chaos.seed_runs import SeedTally, print_progress, replay, run_seeds

    with _models(args) as (target, head):
        if args.replay is not None:
            outcome = replay(args.replay, target, head, shrinks=args.shrink, slowness=args.slowness)
            sys.stdout.write(f"{outcome}\n")
            return 1 if outcome.violations else 0
        tally = SeedTally()

        def note(outcome: RunOutcome) -> None:
            tally.add(outcome)
            if outcome.violations:
                print_progress(str(outcome))
            elif tally.runs % 50 == 0:
                print_progress(f"{tally.runs} runs, {len(tally.failed)} failed")

        run_seeds(
            args.seeds,
            target,
            head,
            jobs=args.jobs,
            on_outcome=note,
            slowness=args.slowness,
        )
    sys.stdout.write(f"{tally}\n")
    return 1 if tally.failed else 0


@contextlib.contextmanager
def _models(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Yield the directories of the target model and of the draft head."""
    from outrider.client.local.model_files import find_model
    from outrider.errors import InvalidRequestError
    from outrider_chaos.seed_runs import tiny_models

    if args.model == _TINY:
        with tiny_models() as found:
            yield found
        return
    files = find_model(args.model, head=args.head)
    if files.head is None:
        raise InvalidRequestError(f"no head ships for {files.name}; give --head", reason="NO_HEAD")
    yield files.path, files.head


if __name__ == "__main__":
    sys.exit(main())
