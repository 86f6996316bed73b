"""Host time of a round in verifier and drafter, step by step, without models or transport.

Only the device is fake: programs return prepared tensors, and nothing is copied to or from a
device. The time of a step is the processor time of the thread, averaged over the fastest tenth of
the rounds. A step is on the critical path of a round, which means that an idle device waits for it,
unless it is marked `beside`. Such steps run while a device or the other process works.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import Any

import torch
from outrider_drafter.gpu.eagle import GpuEagleProposer
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.server.draft_engine import DraftEngine
from outrider_drafter.state.session import VerdictLimits
from torch import Tensor

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.shm import ShmChannel, make_channel_pair
from outrider.wire.codec import decode_verifier_messages, encode_drafter_message
from outrider.wire.messages import DrafterMessage, SessionEnd, SessionStart, Verdicts
from outrider_bench.host.fake_device import BESIDE, CannedCalls, CannedGraphs, CannedLanding, Steps
from outrider_bench.host.scripted_verifier import LENGTH, SHAPE, WIDTH, VerifierSide
from outrider_bench.report import format_table


class DrafterSide:
    """Work of a drafter's engine thread. The caller's thread runs it."""

    def __init__(self, sessions: int, steps: Steps, head: Any) -> None:
        self._steps = steps
        self._source = GpuEagleProposer(
            head,
            max_rows=sessions * 2048,
            max_context=2048,
            max_sessions=max(8, sessions),
            device="cpu",
            bounded=True,
        )
        canned: Any = self._source
        canned.graphs = CannedGraphs(_drafted, lambda: steps.mark("drafter: batch staged"))
        canned._landing = CannedLanding(lambda: steps.mark("drafter: launched" + BESIDE))
        canned._writer.write_rows = lambda *_: None
        canned._batch._calls = CannedCalls()
        self._engine = DraftEngine(
            [self._source],
            limits=VerdictLimits(vocab_size=SHAPE.vocab_size, feature_size=WIDTH, max_context=2048),
            max_sessions=max(8, sessions),
            metrics=DrafterMetrics(),
        )

    def follow(self, told: ShmChannel) -> list[bytes]:
        """Process the messages received over the channel `told`, draft, and return the encoded
        proposals."""
        steps, engine = self._steps, self._engine
        steps.begin()
        while frames := told.receive_views():
            steps.mark("drafter: verdicts received")
            for message in [each for frame in frames for each in decode_verifier_messages(frame)]:
                steps.mark("drafter: verdicts decoded")
                assert isinstance(message, Verdicts | SessionStart | SessionEnd)
                engine.handle_message(1, message)
                steps.mark("drafter: verdicts taken in")
        written: list[bytes] = []
        steps.begin()
        for answers in engine.draft_wanted():
            steps.mark("drafter: answered")
            for _, answer in answers:
                sent: DrafterMessage = answer
                written.append(encode_drafter_message(sent))
            steps.mark("drafter: proposals to bytes")
        steps.mark("drafter: ended" + BESIDE)
        while engine.has_pending_metrics:
            engine.update_metrics()
        steps.mark("drafter: metrics" + BESIDE)
        return written


def _drafted(key: Any) -> tuple[Tensor, None]:
    shape, size, _, _ = key
    return torch.full((size, shape.depth), 5, dtype=torch.int32), None


def _pause(pause_s: float) -> None:
    """Busy-wait, like a thread that polls for messages."""
    until = time.perf_counter() + pause_s
    while time.perf_counter() < until:
        pass


def measure(
    sessions: int, rounds: int, *, planner: str = "fixed", pause_s: float = 0.0, answers: int = 0
) -> Steps:
    """Run `rounds` rounds of verifier and drafter and return the times of their steps.

    Each side waits `pause_s` for the other one, so that other code may evict its data from the CPU
    caches. If `answers` is not 0, sessions are replaced, oldest first, so often that a session
    emits `answers` tokens on average.
    """
    steps = Steps()
    ours, theirs = make_channel_pair()
    with torch.inference_mode(), closing(ours), closing(theirs):
        verifier = VerifierSide(sessions, steps, planner=planner, shm_channel=ours)
        drafter = DrafterSide(sessions, steps, verifier.head)
        plan = SpeculationPlan(
            method=DraftMethod.EAGLE3, draft_tokens=LENGTH, proposal_timeout_ms=60_000
        )
        verifier.open(sessions, LENGTH * (rounds + 4), plan)
        opened, due = sessions, 0.0
        for count in range(rounds + 2):
            if count == 2:
                steps.taken.clear()
            due += sessions * LENGTH / answers if answers else 0.0
            for _ in range(int(due)):
                verifier.replace(opened, LENGTH * (rounds + 4), plan)
                opened += 1
            due %= 1.0
            _pause(pause_s)
            proposals = drafter.follow(theirs)
            _pause(pause_s)
            verifier.offer(proposals)
            verifier.round()
            steps.end_round()
    return steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--sessions", default="1,64", help="sessions a round, several with commas")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--planner", default="fixed", choices=("automatic", "fixed"))
    parser.add_argument(
        "--look-ahead",
        type=int,
        default=0,
        metavar="N",
        help="the verifier where every round is a hit, of N drafts for outcomes a session",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="the verifier where nothing is drafted: sessions that pause beside sessions without",
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=0,
        metavar="N",
        help="answers have N tokens about, and others take their places: means of all rounds",
    )
    parser.add_argument(
        "--own",
        type=int,
        default=0,
        metavar="N",
        help="the verifier where its in-process drafter drafts chains of N tokens",
    )
    parser.add_argument(
        "--routers",
        type=int,
        default=0,
        metavar="N",
        help="its whole process, with so many routers that listen: rounds a second",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="time measured, with --routers")
    parser.add_argument(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="events reach those routers without the network",
    )
    parser.add_argument(
        "--pause-ms",
        type=float,
        default=0.0,
        help="how long each process waits in a round, with --look-ahead how long the device works",
    )


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print a table of microseconds by step."""
    counts = [int(sessions) for sessions in args.sessions.split(",")]
    if args.routers:
        from outrider_bench.host import router_rounds

        router_rounds.run(args)
        return
    if args.own:
        from outrider_bench.host import in_process

        in_process.run(counts, args.rounds, args.own)
        return
    if args.plain:
        from outrider_bench.host import plain, session_churn

        if args.answers:
            session_churn.run(counts, args.rounds, args.answers)
        else:
            plain.run(counts, args.rounds)
        return
    found = [_measure(count, args) for count in counts]
    typical = Steps.mean if args.answers else Steps.lowest
    names = list(dict.fromkeys(name for steps in found for name in steps.taken))
    sides = [side for side in ("verifier", "drafter") if any(n.startswith(side) for n in names)]
    rows = [[name, *(f"{typical(steps, name):.0f}" for steps in found)] for name in names]
    for side in sides:
        critical = [name for name in names if name.startswith(side) and BESIDE not in name]
        totals = [sum(typical(steps, name) for name in critical) for steps in found]
        rows.append([f"**{side}, critical**", *(f"{total:.0f}" for total in totals)])
    print(format_table(["us", *(f"{count} sessions" for count in counts)], rows))


def _measure(sessions: int, args: argparse.Namespace) -> Steps:
    if not args.look_ahead:
        return measure(
            sessions,
            args.rounds,
            planner=args.planner,
            pause_s=args.pause_ms / 1e3,
            answers=args.answers,
        )
    from outrider_bench.host import look_ahead

    return look_ahead.measure(
        sessions, args.rounds, offered=args.look_ahead, pause_s=args.pause_ms / 1e3
    )
