"""Command `outrider chaos`: run a fleet under faults and check texts and guarantees.

Exit status: 0 all guarantees held; 1 one was violated; 2 wrong usage, or it could not run.
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
    """Run what the flags ask for; the exit status."""
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
    mode.add_argument("--seeds", metavar="A-B", type=_range, help="run these seeds, in processes")
    mode.add_argument("--replay", metavar="SEED", type=int, help="run one seed and show all of it")
    mode.add_argument("--fuzz", metavar="N", type=int, help="frames for every decoder")
    mode.add_argument("--router", metavar="HOST:PORT", help="load and faults for a running fleet")
    seeds = parser.add_argument_group("of seeds")
    seeds.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1)
    seeds.add_argument("--shrink", action="store_true", help="find the least that still fails")
    seeds.add_argument(
        "--model", metavar="NAME|DIR", default=_TINY, help="default: a tiny random one"
    )
    seeds.add_argument(
        "--slowness", metavar="F", type=float, default=1.0, help="times are longer by so much"
    )
    seeds.add_argument("--head", metavar="DIR", type=Path, help="default: that of the model")
    fuzzing = parser.add_argument_group("of frames")
    fuzzing.add_argument("--ports", metavar="A,B", default="", help="decoders; default: all")
    running = parser.add_argument_group("of a running fleet")
    running.add_argument(
        "--process",
        metavar="ROLE=PID",
        action="append",
        default=[],
        help="a process on this machine that may be hit; repeatable",
    )
    running.add_argument("--faults", metavar="A,B", default="stop", help="kill, terminate, stop")
    running.add_argument("--duration-s", metavar="S", type=float, default=30.0)
    running.add_argument("--every-s", metavar="S", type=float, default=5.0)
    running.add_argument("--concurrency", metavar="N", type=int, default=8)
    running.add_argument("--max-tokens", metavar="N", type=int, default=64)
    running.add_argument("--seed", metavar="N", type=int, default=0)
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
    """Target and head."""
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
