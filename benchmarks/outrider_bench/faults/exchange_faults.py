"""`outrider bench exchange-faults`: faults of a device exchange while clients stream answers.

A local fleet of a router, a verifier and a drafter serves greedy streams. Each client sends the
same request again and again. Meanwhile faults are injected one after another: the drafter is
killed, or stopped for a while; garbage is written into one of the two buffers of the exchange, with
or without a wrong round number; half of the streams are cancelled. Before each fault the exchange
must be open again, and half of the streams must have begun a request since. Sessions that begin
while the exchange is lost receive their drafts in messages.

With `--planner fixed` a round waits for these drafts as long as plans allow, which is one second.
To measure the pauses that users see, run `--planner automatic` with a model that drafts make
faster. Each text is compared with the text that the verifier generates alone. The first tokens that
differ may be a near tie of the target; such texts are counted separately.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from outrider.client import Client, GenerateResult, OutriderError, RetryPolicy, user
from outrider.client.flags import integer_at_least
from outrider.client.local.cluster import START_TIMEOUT_S, LocalCluster
from outrider.client.local.config import CPU
from outrider.errors import InternalError
from outrider.spec.exchange_mode import ON
from outrider.transport.tls import CertificateRole
from outrider_bench.environment import describe
from outrider_bench.faults.repair import poll_until, wait_idle
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.prompts import load_prompts
from outrider_bench.report import percentiles, print_progress, print_result

GARBAGE: Final = {
    "garbage-drafts": "buffer=drafts,number=false",
    "garbage-draft-numbers": "buffer=drafts,number=true",
    "garbage-verdicts": "buffer=verdicts,number=false",
    "garbage-verdict-numbers": "buffer=verdicts,number=true",
}
"""Options of the hook `outrider_bench.hooks.exchange_garbage`, by kind of fault."""
KINDS: Final = (*GARBAGE, "stop", "cancel", "kill")
NEAR_TIE: Final = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference between the log-probabilities of two tokens at which another order of
summation may swap them, by dtype."""
KV_TOKENS: Final = 65536
"""KV cache size of a verifier on a GPU, in tokens. The default size would take all GPU memory and
leave none for the drafter."""
_OPENED, _LOST = "exchanging between devices", "the exchange between devices is lost"
_MAX_STOP_S, _MAX_GARBAGE_S = 1.0, 0.5
_POLL_S: Final = 0.02
_HEARTBEAT_S: Final = 0.005
_SETTLE_S: Final = 0.2
"""Seconds in which a verifier notices that an exchange is lost."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--faults", type=integer_at_least(1), default=200, help="number of faults; default: 200")
    add("--kinds", default=",".join(KINDS), help=f"comma-separated; default: {','.join(KINDS)}")
    add(
        "--kill-every",
        type=integer_at_least(1),
        default=10,
        help="faults of which one kills the drafter, which takes a while to start; default: 10",
    )
    add("--streams", type=integer_at_least(1), default=8, help="streams at a time; default: 8")
    add("--max-tokens", type=int, default=96, help="tokens of a stream; default: 96")
    add("--kv-tokens", type=int, help=f"of the verifier; default on a GPU: {KV_TOKENS}")
    add("--near-tie", type=float, help="largest difference of log-probabilities of a near tie")
    add(
        "--planner",
        choices=("fixed", "automatic"),
        default="fixed",
        help="fixed: all sessions draft throughout; default: fixed",
    )
    add("--trace-dir", type=Path, help="where verifier and drafter leave their timelines")
    add("--max-seconds", type=float, default=0.0, help="ends the faults early; default: 0, never")
    add("--seed", type=int, default=0, help="seed of the order and the times of faults")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result. Raises InternalError if a text changed, a request
    failed, or the exchange was not opened again after a fault."""
    kinds = [name.strip() for name in args.kinds.split(",")]
    if unknown := set(kinds) - set(KINDS):
        raise SystemExit(f"--kinds: there is no {', '.join(sorted(unknown))}")
    config = local_config(args, max_sessions=2 * args.streams, queue_limit=4 * args.streams)
    kv_tokens = args.kv_tokens or (None if config.device == CPU else KV_TOKENS)
    with tempfile.TemporaryDirectory(prefix="outrider-") as directory:
        switches = {kind: Path(directory) / kind for kind in GARBAGE}
        hooks = tuple(
            f"outrider_bench.hooks.exchange_garbage:switch={switches[kind]},{options}"
            for kind, options in GARBAGE.items()
        )
        config = replace(
            config,
            kv_tokens=kv_tokens,
            planner=args.planner,
            device_exchange=ON,
            drafter_hooks=hooks,
            log_dir=Path(directory) / "logs",
            trace_dir=args.trace_dir,
        )
        with LocalCluster(config, progress=print_progress) as fleet:
            wait_idle(fleet)
            figures = _FaultRun(fleet, Path(directory) / "logs", switches, args).run(kinds)
    near_tie = NEAR_TIE[config.element_type] if args.near_tie is None else args.near_tie
    gaps = figures.pop("gaps")
    assert isinstance(gaps, list)
    figures |= {
        "near_ties": sum(gap <= near_tie for gap in gaps),
        "changed_texts": sum(gap > near_tie for gap in gaps),
        "largest_near_tie": max((gap for gap in gaps if gap <= near_tie), default=0.0),
        "changed_gaps": [round(gap, 4) for gap in gaps if gap > near_tie][:20],
    }
    result = {"benchmark": "exchange-faults", **describe(), "model": config.model_name}
    result |= describe_placement(config)
    result |= {"planner": args.planner, "streams": args.streams, "max_tokens": args.max_tokens}
    result |= figures
    print_result(args, result)
    if figures["changed_texts"] or figures["failed"] or figures["not_reopened"]:
        raise InternalError("the exchange did not withstand all faults", reason="FAULTS")


class _Gap(NamedTuple):
    """Time between two messages of a request, in seconds."""

    gap_s: float
    after_fault_s: float
    """Seconds from the last fault to the end of the gap."""
    tokens: int
    """Number of tokens that the request had before the gap."""


@dataclass(slots=True, eq=False)
class _Stream:
    """Results of one client over all its requests. Only this client's thread writes them."""

    prompt: str
    expected: GenerateResult
    begun_at: float = 0.0
    """Monotonic time at which the running request began."""
    cancel: threading.Event = field(default_factory=threading.Event)
    """Event that ends the running request when it is set."""
    longest_gaps: dict[str, _Gap] = field(default_factory=dict)
    """Longest gap between two messages of a request, by the last fault before the second
    message."""
    first_message_s: float = 0.0
    """Longest time to the first message of a request, in seconds."""
    requests: int = 0
    """Number of requests that ended normally."""
    drafted: int = 0
    """Number of these requests for which drafts were verified."""
    cancelled: int = 0
    failed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Differences found by `_first_gap` in the requests whose text changed."""


class _FaultRun:
    """Runs streams over a fleet and injects faults meanwhile."""

    def __init__(
        self, fleet: LocalCluster, logs: Path, switches: dict[str, Path], args: argparse.Namespace
    ) -> None:
        self._fleet, self._switches, self._args = fleet, switches, args
        (self._drafter,) = fleet.members[CertificateRole.DRAFTER]
        (verifier,) = fleet.members[CertificateRole.VERIFIER]
        self._log = logs / f"{verifier.name}.log"
        self._random = random.Random(args.seed)
        self._fault, self._fault_at = "none", time.monotonic()
        """The last fault and its time."""
        self._is_over = threading.Event()
        self._not_reopened = 0
        self._reopened_s: list[float] = []
        self._streams: list[_Stream] = []
        self._stalls: dict[str, float] = {}
        """Largest delay of a sleep of this process, in seconds, by the last fault before its end.
        Gaps of the streams up to this time may be caused by the benchmark itself."""

    def run(self, kinds: Sequence[str]) -> dict[str, object]:
        """Inject the faults; return the figures of the streams."""
        self._streams = self._expect()
        threads = [
            threading.Thread(target=self._follow, args=(stream,), daemon=True)
            for stream in self._streams
        ]
        threads.append(threading.Thread(target=self._measure_stalls, daemon=True))
        for thread in threads:
            thread.start()
        done: Counter[str] = Counter()
        began = time.monotonic()
        try:
            for number in range(self._args.faults):
                self._wait_drafting()
                passed = time.monotonic() - began
                if 0.0 < self._args.max_seconds < passed:
                    break
                self._fault, self._fault_at = self._choose(kinds, number), time.monotonic()
                print_progress(f"{number + 1}: {self._fault} at {passed:.1f} s")
                self._inject(self._fault)
                done[self._fault] += 1
            self._wait_drafting()
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join(START_TIMEOUT_S)
        wait_idle(self._fleet)
        streams, opened = self._streams, self._count(_OPENED)
        gaps = [pair for stream in streams for pair in stream.longest_gaps.items()]
        longest: dict[str, list[dict[str, float]]] = {}
        for kind, gap in sorted(gaps, key=itemgetter(1), reverse=True):
            facts = {name: round(value, 4) for name, value in gap._asdict().items()}
            longest.setdefault(kind, []).append(facts)
        return {
            "faults": dict(sorted(done.items())),
            "seconds": round(time.monotonic() - began, 1),
            "requests": sum(stream.requests for stream in streams),
            "requests_with_drafts": sum(stream.drafted for stream in streams),
            "cancelled": sum(stream.cancelled for stream in streams),
            "failed": [code for stream in streams for code in stream.failed],
            "gaps": [gap for stream in streams for gap in stream.gaps],
            "longest_gap_s": max(gaps_of[0]["gap_s"] for gaps_of in longest.values()),
            "longest_gaps_by_fault": longest,
            "client_stalls_by_fault": {kind: round(s, 4) for kind, s in self._stalls.items()},
            "longest_first_message_s": round(max(each.first_message_s for each in streams), 4),
            "exchanges_opened": opened,
            "exchanges_lost": self._count(_LOST),
            "reopened_s": percentiles(self._reopened_s),
            "not_reopened": self._not_reopened,
        }

    def _expect(self) -> list[_Stream]:
        """Return the streams, with the texts that the verifier generates without drafts."""
        prompts = load_prompts(self._args.prompts, self._args.limit)
        found = []
        with self._client() as client:
            for number in range(self._args.streams):
                text = prompts[number % len(prompts)].text
                expected = client.generate(
                    [user(text)],
                    drafter="none",
                    temperature=0.0,
                    top_logprobs=5,
                    max_tokens=self._args.max_tokens,
                    ignore_eos=True,
                )
                found.append(_Stream(text, expected))
        return found

    def _client(self) -> Client:
        retry = RetryPolicy(max_attempts=1)
        return Client(self._fleet.address, timeout_s=300.0, retry=retry)

    def _measure_stalls(self) -> None:
        while not self._is_over.is_set():
            begun = time.monotonic()
            time.sleep(_HEARTBEAT_S)
            stall_s = time.monotonic() - begun - _HEARTBEAT_S
            self._stalls[self._fault] = max(stall_s, self._stalls.get(self._fault, 0.0))

    def _follow(self, stream: _Stream) -> None:
        with self._client() as client:
            while not self._is_over.is_set():
                try:
                    self._request(client, stream)
                except OutriderError as error:
                    stream.failed.append(error.reason or error.code)
                    time.sleep(_POLL_S)

    def _request(self, client: Client, stream: _Stream) -> None:
        stream.cancel.clear()
        stream.begun_at = last = time.monotonic()
        ids: list[int] = []
        with client.stream(
            [user(stream.prompt)],
            drafter="eagle3",
            temperature=0.0,
            max_tokens=self._args.max_tokens,
            ignore_eos=True,
        ) as answer:
            for delta in answer:
                now = time.monotonic()
                if ids:
                    gap = _Gap(now - last, now - self._fault_at, len(ids))
                    known = stream.longest_gaps.get(self._fault, gap)
                    stream.longest_gaps[self._fault] = max(known, gap)
                else:
                    stream.first_message_s = max(stream.first_message_s, now - last)
                last = now
                ids += delta.token_ids
                if stream.cancel.is_set():
                    stream.cancelled += 1
                    return
            stats = answer.result().finish.stats
        stream.requests += 1
        stream.drafted += stats.proposed > 0
        if tuple(ids) != stream.expected.token_ids:
            stream.gaps.append(_first_gap(stream.expected, ids))

    def _choose(self, kinds: Sequence[str], number: int) -> str:
        others = [kind for kind in kinds if kind != "kill"]
        if "kill" in kinds and (not others or (number + 1) % self._args.kill_every == 0):
            return "kill"
        return self._random.choice(others)

    def _inject(self, kind: str) -> None:
        pid = self._drafter.pid
        assert pid is not None
        match kind:
            case "kill":
                os.kill(pid, signal.SIGKILL)
                self._drafter.start()
                self._drafter.wait_ready(START_TIMEOUT_S)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._random.uniform(0.02, _MAX_STOP_S))
                os.kill(pid, signal.SIGCONT)
            case "cancel":
                for stream in self._streams[::2]:
                    stream.cancel.set()
            case _:
                self._switches[kind].touch()
                time.sleep(self._random.uniform(0.02, _MAX_GARBAGE_S))
                self._switches[kind].unlink()

    def _wait_drafting(self) -> None:
        """Wait until the exchange is open and half of the streams have begun a request since."""
        time.sleep(_SETTLE_S)
        began = time.monotonic()
        if not poll_until(lambda: self._count(_OPENED) > self._count(_LOST)):
            self._not_reopened += 1
            return
        opened = time.monotonic()
        self._reopened_s.append(opened - began)

        def have_begun() -> bool:
            begun = sum(stream.begun_at > opened for stream in self._streams)
            return 2 * begun >= len(self._streams)

        poll_until(have_begun)

    def _count(self, event: str) -> int:
        """Return how often the verifier has logged an event."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return sum(_event_of(line) == event for line in lines)


def _event_of(line: str) -> str:
    try:
        said = json.loads(line)
    except json.JSONDecodeError:
        return ""
    return str(said.get("event", "")) if isinstance(said, dict) else ""


def _first_gap(expected: GenerateResult, ids: Sequence[int]) -> float:
    """Return the difference of the log-probabilities of the two tokens where two texts first
    differ; infinite if the second token is not among the most probable ones there."""
    pairs = zip(expected.token_ids, ids, strict=False)
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if place is None or place >= len(expected.logprobs):
        return float("inf")
    found = expected.logprobs[place]
    return abs(found.logprob - dict(found.top).get(ids[place], float("-inf")))
