"""Runs of many seeds in worker processes, replay of one seed, and shrinking of a failing
schedule."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import grpc
import torch

from outrider.chaos.faults import Fault
from outrider.chaos.schedule import FaultSchedule
from outrider.chaos.shrink import shrink_schedule
from outrider.errors import InternalError
from outrider.process_tuning import run_event_loop, tune_process
from outrider_chaos.killable_parts import ChaosModels
from outrider_chaos.parent_watch import end_with_parent
from outrider_chaos.schedule_run import Baseline, RunOutcome, record_baseline, run_schedule
from outrider_chaos.tiny_models import make_eagle3_head, make_target

_LAYERS = 4
"""Number of layers of the tiny model. Its forward takes as long as its number of operators
requires."""
_TRIES = 3
"""Number of runs of each schedule while a failing one is shrunk. A schedule does not fail in every
run, because times vary and some faults are injected outside their phase."""

OnOutcome = Callable[[RunOutcome], None]


@contextmanager
def tiny_models() -> Iterator[tuple[Path, Path]]:
    """Context that yields the directories of a tiny random target and of its head, and removes them
    at the end."""
    with tempfile.TemporaryDirectory(prefix="outrider-chaos-") as folder:
        yield make_tiny(Path(folder))


def make_tiny(folder: Path) -> tuple[Path, Path]:
    """Write a tiny random target and its head to a folder, and return the two directories."""
    target = make_target(folder / "target", layers=_LAYERS)
    return target, make_eagle3_head(folder / "head", target_layers=_LAYERS)


def run_seeds(
    seeds: Sequence[int],
    target: Path,
    head: Path,
    *,
    jobs: int,
    on_outcome: OnOutcome,
    slowness: float = 1.0,
) -> None:
    """Run the schedule of each seed in `jobs` worker processes, and call `on_outcome` with the
    results in the order of the seeds.

    `slowness` is the factor by which time limits are longer than for a tiny model. Raises
    InternalError if a worker process dies, for instance because it cannot generate the expected
    answers.
    """
    # Forked children of a process with threads hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(seeds)),
        mp_context=context,
        initializer=_prepare_worker,
        initargs=(target, head, slowness),
    ) as pool:
        try:
            for outcome in pool.map(_run_here, map(FaultSchedule.from_seed, seeds)):
                on_outcome(outcome)
        except BrokenProcessPool as error:
            detail = "a process that runs seeds died; what it logged is above"
            raise InternalError(detail, reason="WORKER_DIED") from error


def replay(
    seed: int, target: Path, head: Path, *, shrinks: bool, slowness: float = 1.0
) -> RunOutcome:
    """Run the schedule of a seed in this process and return the result. If `shrinks` is set and the
    run fails, return the result of the smallest schedule that was found to fail."""
    _prepare(target, head, slowness)
    outcome = _run_here(FaultSchedule.from_seed(seed))
    if not shrinks or not outcome.violations:
        return outcome
    failed = {outcome.schedule: outcome}

    def fails(schedule: FaultSchedule) -> bool:
        for _ in range(_TRIES):
            again = _run_here(schedule)
            if again.violations:
                failed[schedule] = again
                return True
        return False

    return failed[shrink_schedule(outcome.schedule, fails)]


class SeedTally:
    """Counts over the results of many runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.failed: list[RunOutcome] = []
        self.hits: Counter[str] = Counter()
        """Number of injected faults, by the role of the target and the phase of the fleet."""
        self.promises: Counter[str] = Counter()
        """Number of violations, by the name of the violated guarantee."""
        self.ends: Counter[str] = Counter()
        """Number of requests, by the way in which they ended."""
        self.preemptions = 0
        self.seconds = 0.0

    def add(self, outcome: RunOutcome) -> None:
        """Add the counts of one run."""
        self.runs += 1
        self.seconds += outcome.seconds
        self.preemptions += outcome.preemptions
        self.hits.update(_cells(outcome.hit, outcome.missed))
        self.ends.update(str(history.end) for history in outcome.histories)
        self.promises.update(violation.promise for violation in outcome.violations)
        if outcome.violations:
            self.failed.append(outcome)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        lines = [
            f"{self.runs} runs, {len(self.failed)} failed, {self.preemptions} preemptions, "
            f"{self.seconds:.0f} s; requests: {ends}"
        ]
        lines += [f"  hit: {count} {cell}" for cell, count in sorted(self.hits.items())]
        lines += [f"  broken: {count} x {promise}" for promise, count in self.promises.items()]
        if self.failed:
            lines.append(f"  seeds: {' '.join(str(o.schedule.seed) for o in self.failed)}")
        return "\n".join(lines)


def _cells(hit: Sequence[Fault], missed: Sequence[Fault]) -> Iterator[str]:
    for fault in hit:
        yield f"{fault.role} {'outside its phase' if fault in missed else fault.phase}"


class _SeedProcess:
    """Models and expected answers that all runs of this process use."""

    models: ChaosModels
    oracle: Baseline


def _prepare_worker(target: Path, head: Path, slowness: float) -> None:
    # Loading takes long enough for a driver to die meanwhile.
    end_with_parent()
    _prepare(target, head, slowness)


def _prepare(target: Path, head: Path, slowness: float = 1.0) -> None:
    """Load the models, generate the expected answers, and set up this process for all runs."""
    torch.set_num_threads(1)
    _SeedProcess.models = ChaosModels.load(target, head, slowness)
    _SeedProcess.oracle = run_event_loop(record_baseline(_SeedProcess.models))
    # A process whose peers die all the time logs nothing else; what goes wrong in calm is logged.
    logging.disable(logging.CRITICAL)
    tune_process()


def _run_here(schedule: FaultSchedule) -> RunOutcome:
    return run_event_loop(_holding_grpc(schedule))


async def _holding_grpc(schedule: FaultSchedule) -> RunOutcome:
    # As long as there is a channel gRPC keeps its descriptors, and none of them seems leaked.
    async with grpc.aio.insecure_channel("127.0.0.1:1"):
        return await run_schedule(schedule, _SeedProcess.models, _SeedProcess.oracle)


def print_progress(line: str) -> None:
    """Print a line of progress to stderr."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
