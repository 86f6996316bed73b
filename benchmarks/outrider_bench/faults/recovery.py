"""`outrider bench recovery`: stream pauses while processes are killed, stopped and drained.

A router serves streams with two verifiers and two or more drafters. The benchmark reports the
longest pause of the streams, and the numbers of changed texts and failed requests. For each
injection it starts streams (half of them greedy, the others sampled with the acceptance rule
`coupled`), waits for their first tokens, sends a signal to one process, and waits for the streams
to end. Then it repairs the fleet. Texts are compared with those of a run without faults.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from outrider.client import Client, OutriderError, user
from outrider.client.flags import integer_at_least
from outrider.client.local.child_process import ChildProcess
from outrider.client.local.cluster import START_TIMEOUT_S, LocalCluster
from outrider.transport.tls import CertificateRole
from outrider_bench.environment import describe
from outrider_bench.faults.repair import (
    repair_fleet,
    restart_process,
    spare_fleet_config,
    wait_drafters,
    wait_idle,
)
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import load_prompts
from outrider_bench.report import percentiles, print_progress, print_result

BEGUN = 8
"""Number of tokens that every stream has received when the fault is caused."""


@dataclass(frozen=True, slots=True)
class RecoveryFault:
    """Signal that causes a fault, and the role of the process that receives it."""

    victim: CertificateRole
    number: signal.Signals


FAULTS: Final = {
    "verifier-killed": RecoveryFault(CertificateRole.VERIFIER, signal.SIGKILL),
    "verifier-stopped": RecoveryFault(CertificateRole.VERIFIER, signal.SIGSTOP),
    "verifier-drained": RecoveryFault(CertificateRole.VERIFIER, signal.SIGTERM),
    "drafter-killed": RecoveryFault(CertificateRole.DRAFTER, signal.SIGKILL),
    "drafter-stopped": RecoveryFault(CertificateRole.DRAFTER, signal.SIGSTOP),
    "router-killed": RecoveryFault(CertificateRole.ROUTER, signal.SIGKILL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredStream:
    """Answer of one stream as its client received it."""

    code: str
    token_ids: tuple[int, ...]
    pause_s: float
    """Longest time between two messages, in seconds."""
    drafted: int
    """Number of draft tokens that were verified for the stream."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    parser.add_argument(
        "--faults",
        default="verifier-killed",
        help=f"comma-separated, of {', '.join(FAULTS)}; default: verifier-killed",
    )
    parser.add_argument("--injections", type=int, default=100, help="of each fault; default: 100")
    parser.add_argument(
        "--drafters",
        type=integer_at_least(2),
        default=2,
        help="of the fleet; of more than two, those that were killed start again beside further "
        "injections; default: 2",
    )
    parser.add_argument("--streams", type=int, default=4, help="at once; default: 4")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--kv-tokens", type=int, help="of each verifier; needed where they share a GPU"
    )


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
    names = [name.strip() for name in args.faults.split(",")]
    config = replace(local_config(args, max_sessions=4 * args.streams), planner="automatic")
    config = replace(config, kv_tokens=args.kv_tokens)
    cases: dict[str, object] = {}
    with spare_fleet_config(config, args.drafters) as fleet:
        lab = _RecoveryRun(fleet, args)
        for name in names:
            cases[name] = lab.inject(name, FAULTS[name])
            print_progress(f"{name}: {cases[name]}")
    result = {"benchmark": "recovery", **describe(), "model": config.model_name}
    result |= describe_placement(config)
    result |= {"planner": config.planner, "drafters": args.drafters}
    result |= {"streams": args.streams, "max_tokens": args.max_tokens}
    result |= {"load_1min": round(os.getloadavg()[0], 1), "calm": lab.calm_pauses, "faults": cases}
    print_result(args, result)


class _RecoveryRun:
    """Runs streams over a fleet, with and without faults."""

    def __init__(self, fleet: LocalCluster, args: argparse.Namespace) -> None:
        self._fleet, self._args = fleet, args
        prompts = load_prompts(args.prompts, args.limit)
        self._prompts = [prompts[i % len(prompts)].text for i in range(args.streams)]
        self._calm = self._streams(lambda: None)
        self.calm_pauses = percentiles([seen.pause_s for seen in self._calm])
        """Percentiles of the longest pause of a stream without faults, in seconds."""

    def inject(self, name: str, fault: RecoveryFault) -> dict[str, object]:
        """Cause a fault `--injections` times. Return the percentiles of the longest pause, and the
        numbers of failed requests and of changed texts."""
        pauses: list[float] = []
        failed: list[str] = []
        changed = drafting = 0
        for turn in range(self._args.injections):
            victims = self._fleet.members[fault.victim]
            victim = victims[turn % len(victims)]
            if self._several(fault):
                wait_drafters(self._fleet, victim)
            seen = self._streams(lambda hit=victim: self._hit(hit, fault))  # type: ignore[misc]
            pauses.append(max(stream.pause_s for stream in seen))
            failed += [stream.code for stream in seen if stream.code != "OK"]
            drafting += sum(stream.drafted > 0 for stream in seen)
            changed += sum(
                stream.token_ids != calm.token_ids
                for stream, calm in zip(seen, self._calm, strict=True)
                if stream.code == "OK"
            )
            print_progress(f"{name} {turn + 1}: longest pause {pauses[-1]:.3f} s")
            if self._several(fault):
                restart_process(victim)
            else:
                repair_fleet(self._fleet, victim)
        wait_idle(self._fleet)
        return {
            "injections": len(pauses),
            "longest_pause_s": percentiles(pauses) | {"max": round(max(pauses), 4)},
            "requests": len(pauses) * self._args.streams,
            # A drafter without whose drafts its streams went on anyway proves nothing.
            "requests_with_drafts": drafting,
            "failed": failed,
            "changed_texts": changed,
        }

    def _several(self, fault: RecoveryFault) -> bool:
        """Return whether other processes of the same kind continue while one of them restarts."""
        return fault.victim is CertificateRole.DRAFTER and self._args.drafters > 2

    def _hit(self, victim: ChildProcess, fault: RecoveryFault) -> None:
        assert victim.pid is not None
        os.kill(victim.pid, fault.number)
        if fault.victim is CertificateRole.ROUTER:
            # What a keeper does at once.
            victim.start()
            victim.wait_ready(START_TIMEOUT_S)

    def _streams(self, fault: Callable[[], None]) -> list[RecoveredStream]:
        """Run all streams, and cause the fault once each of them has begun."""
        begun = threading.Semaphore(0)
        with (
            Client(self._fleet.address, timeout_s=300.0) as client,
            concurrent.futures.ThreadPoolExecutor(self._args.streams) as pool,
        ):
            futures = [
                pool.submit(self._one, client, index, begun) for index in range(len(self._prompts))
            ]
            for _ in futures:
                begun.acquire()
            fault()
            return [future.result() for future in futures]

    def _one(self, client: Client, index: int, begun: threading.Semaphore) -> RecoveredStream:
        options = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0.0}
        ids: list[int] = []
        longest, last, code, told, drafted = 0.0, 0.0, "OK", False, 0
        try:
            with client.stream(
                [user(self._prompts[index])],
                max_tokens=self._args.max_tokens,
                ignore_eos=True,
                **options,  # type: ignore[arg-type]
            ) as stream:
                for delta in stream:
                    now = time.perf_counter()
                    longest, last = max(longest, now - (last or now)), now
                    ids += delta.token_ids
                    if len(ids) >= BEGUN and not told:
                        told = True
                        begun.release()
                drafted = stream.result().finish.stats.proposed
        except OutriderError as error:
            code = error.reason
        finally:
            if not told:
                begun.release()
        return RecoveredStream(code=code, token_ids=tuple(ids), pause_s=longest, drafted=drafted)
