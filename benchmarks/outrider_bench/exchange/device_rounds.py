"""Rounds of two processes on two GPUs over exchange buffers, without models.

Each side replays one CUDA graph a round, two rounds ahead of its device, as verifier and drafter
do: the verifier waits for drafts, takes them, works and puts accepted tokens and features; the
drafter waits for these, takes them, works and puts drafts. Work is a sleeping kernel, so what a
round takes beyond both works is what the exchange costs. Each side checks what the other one wrote.

python -m outrider_bench.exchange.device_rounds [--rows 64] [--same-device] [--only device]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from typing import Any, Final, NamedTuple

import torch

from outrider.engine.device.exchange.layout import ExchangeShape
from outrider.engine.device.exchange.memory import (
    SharedMemory,
    allocate_on_device,
    allocate_on_host,
    attach_buffer,
    map_device_memory,
    map_host_memory,
    new_buffer,
)
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.kernels.exchange.buffers import DECODE_ROWS, ExchangeBuffer, new_state
from outrider.engine.kernels.exchange.drafts import (
    advance_digests,
    new_taken_tokens,
    put_drafts,
    take_drafts,
)
from outrider.engine.kernels.exchange.drafts_ahead import new_chosen_drafts
from outrider.engine.kernels.exchange.numbers import (
    publish_number,
    reserve_bank,
    wait_drafts,
    wait_round,
)
from outrider.engine.kernels.exchange.verdicts import (
    FollowedSlots,
    new_taken_rows,
    put_rows,
    take_rows,
)

VOCAB: Final = 32_000
CHAIN: Final = 4
WIDTH: Final = 4096
AHEAD: Final = 2
"""Rounds that a side launches before it waits for the first of them."""
BOUND_US: Final = 30_000
WARM_ROUNDS: Final = 20


class RoundSettings(NamedTuple):
    """What both sides of a measurement agree on."""

    rows: int
    rounds: int
    verify_us: int
    """Time of the verifier's work, microseconds; 0: none."""
    draft_us: int
    """The same of the drafter's."""

    @property
    def shape(self) -> ExchangeShape:
        """The buffers."""
        return ExchangeShape(
            num_slots=self.rows + 1,
            max_rows=self.rows,
            draft_length=CHAIN,
            max_chunks=1,
            chunk_tokens=32,
            feature_size=WIDTH,
            feature_dtype=torch.bfloat16,
            distribution_entries=0,
        )


def _work(us: int, clock_mhz: float) -> None:
    if us:
        torch.cuda._sleep(int(us * clock_mhz))  # type: ignore[no-untyped-call]


class _Verifier:
    """The verifier's graph."""

    def __init__(
        self,
        settings: RoundSettings,
        device: torch.device,
        clock: float,
        drafts: ExchangeBuffer,
        verdicts: ExchangeBuffer,
    ) -> None:
        self.settings, self._clock = settings, clock
        self._drafts, self._verdicts = drafts, verdicts
        rows = settings.rows
        self.state = new_state(device)
        self._slots = torch.arange(rows, dtype=torch.int32, device=device)
        self._counts = torch.ones(rows, dtype=torch.int32, device=device)
        self._starts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._digests = torch.full((rows + 1,), 7, dtype=torch.int64, device=device)
        self._tokens = torch.zeros((rows, CHAIN + 1), dtype=torch.int32, device=device)
        self._features = torch.zeros((rows, CHAIN + 1, WIDTH), dtype=torch.bfloat16, device=device)
        self._drafted = new_taken_tokens(rows + 1, CHAIN, device)
        self._chosen = new_chosen_drafts(rows + 1, CHAIN, device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._steps = torch.arange(CHAIN, dtype=torch.int32, device=device)
        self.mismatches = torch.zeros(2, dtype=torch.int32, device=device)
        """Drafts that were not what they should have been; rounds."""

    def run_round(self) -> None:
        """One round."""
        settings = self.settings
        chosen = self._chosen
        wait_drafts(self._drafts, self.state, self._slots, chosen.outcomes, padding=settings.rows)
        take_drafts(
            self._drafts,
            self.state,
            self._slots,
            self._digests,
            self._drafted,
            self._lengths,
            chosen=chosen,
            vocab_size=VOCAB,
        )
        last = self._tokens.gather(1, (self._counts - 1).long()[:, None])
        expected = (last + 1 + self._steps) % VOCAB
        wrong = (self._drafted[: settings.rows] != expected).any()
        # Before the first round there is nothing to take.
        self.mismatches[0] += wrong & (self.mismatches[1] > 0)
        self.mismatches[1] += 1
        self._starts += torch.where(self.mismatches[1] > 1, self._counts, 0)
        _work(settings.verify_us, self._clock)
        self._counts.copy_((self._counts % (CHAIN + 1)) + 1)
        self._tokens.copy_((self._tokens * 5 + self._slots[:, None] + 11) % VOCAB)
        self._features.copy_((self._tokens % 128)[:, :, None].expand_as(self._features))
        advance_digests(self._digests, self._slots, self._tokens, self._counts)
        reserve_bank(self._drafts, self.state, depth=self._verdicts.depth)
        put_rows(
            self._verdicts,
            self.state,
            first=DECODE_ROWS,
            slots=self._slots,
            counts=self._counts,
            starts=self._starts,
            digests=self._digests,
            tokens=self._tokens,
            outcomes=None,
            features=self._features,
            capacity=settings.rows,
            width=CHAIN + 1,
            padding=settings.rows,
        )
        publish_number(self._verdicts, self.state, step=1)


class _Drafter:
    """The drafter's graph."""

    def __init__(
        self,
        settings: RoundSettings,
        device: torch.device,
        clock: float,
        drafts: ExchangeBuffer,
        verdicts: ExchangeBuffer,
    ) -> None:
        self.settings, self._clock = settings, clock
        self._drafts, self._verdicts = drafts, verdicts
        rows = settings.rows
        self.state = new_state(device)
        self._taken = new_taken_rows(rows, CHAIN + 1, WIDTH, torch.bfloat16, device)
        slots = torch.arange(rows + 1, dtype=torch.int32, device=device)
        slots[rows] = -1
        self._followed = FollowedSlots(
            slots,
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.full((rows + 1,), 2**30, dtype=torch.int32, device=device),
        )
        self._steps = torch.arange(CHAIN, dtype=torch.int32, device=device)
        self.mismatches = torch.zeros(2, dtype=torch.int32, device=device)
        """Rows with a fault or with other features than their tokens'; rounds."""

    def run_round(self) -> None:
        """One round."""
        settings, taken = self.settings, self._taken
        wait_round(self._verdicts, self.state)
        take_rows(
            self._verdicts,
            self.state,
            self._followed,
            taken,
            first=DECODE_ROWS,
            padding=settings.rows,
            vocab_size=VOCAB,
            rows_ahead=CHAIN,
        )
        known = taken.tokens >= 0
        expected = (taken.tokens % 128)[:, :, None].to(torch.bfloat16)
        wrong = ((taken.features != expected) & known[:, :, None]).any() | taken.faults.any()
        self.mismatches[0] += wrong
        self.mismatches[1] += 1
        _work(settings.draft_us, self._clock)
        last = taken.tokens.gather(1, (taken.counts - 1).clamp(min=0).long()[:, None])
        drafts = (last + 1 + self._steps) % VOCAB
        put_drafts(
            self._drafts,
            self.state,
            taken,
            drafts,
            None,
            length=CHAIN,
            entries=0,
        )
        publish_number(self._drafts, self.state, step=0)


class _Link:
    """Passes descriptors and words between the two processes."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, word: str, descriptors: list[int] | None = None) -> None:
        """Send a line, and descriptors with it."""
        socket.send_fds(self._socket, [word.encode()], descriptors or [])

    def receive(self) -> tuple[str, list[int]]:
        """Wait for the next one."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 4)
        if not data:
            raise ConnectionError("the other process is gone")
        return data.decode(), list(descriptors)


class _Side:
    """Buffers, graph and launches of one side of a measurement."""

    def __init__(
        self,
        link: _Link,
        device: torch.device,
        settings: RoundSettings,
        kind: str,
        *,
        is_drafter: bool,
        clock: float,
    ) -> None:
        shape = settings.shape
        mine, theirs = shape.draft_layout(), shape.verdict_layout()
        if is_drafter:
            mine, theirs = theirs, mine
        allocate, attach = (
            (allocate_on_device, map_device_memory)
            if kind == "device"
            else (allocate_on_host, map_host_memory)
        )
        self._own: SharedMemory = allocate(mine.num_bytes, device)
        shared = self._own.make_descriptor()
        link.send("buffer", [shared])
        os.close(shared)
        _, (peer,) = link.receive()
        began = time.perf_counter()
        self._peer: SharedMemory = attach(peer, theirs.num_bytes, device)
        self.attach_s = time.perf_counter() - began
        os.close(peer)
        buffers = []
        for layout, memory in ((mine, self._own), (theirs, self._peer)):
            buffers.append(new_buffer(layout, device))
            attach_buffer(buffers[-1], layout, memory)
        drafts, verdicts = reversed(buffers) if is_drafter else buffers
        kind_of = _Drafter if is_drafter else _Verifier
        self.program = kind_of(settings, device, clock, drafts, verdicts)
        self.program.state.host_control[1] = BOUND_US if not is_drafter else 2_000_000
        self.graphs = GraphCache(device)
        self._device = device

    def capture(self) -> None:
        """Compile and capture without an exchange: the state says that it is closed."""
        state = self.program.state
        state.words[1] = 0
        self.graphs.run_graph("round", self.program.run_round)
        torch.cuda.synchronize(self._device)
        state.words.copy_(torch.tensor([0, 1, 0, 1], dtype=torch.int32))
        self.program.mismatches.zero_()
        if isinstance(self.program, _Verifier):
            self.program._counts.fill_(1)
            self.program._starts.zero_()
            self.program._tokens.zero_()
            self.program._digests.fill_(7)
        torch.cuda.synchronize(self._device)

    def run(self, rounds: int, *, until_closed: bool = False) -> list[float]:
        """Replay rounds, AHEAD at a time; microseconds between ends of rounds."""
        flight: deque[torch.cuda.Event] = deque()
        ends: list[torch.cuda.Event] = []
        for _ in range(rounds):
            self.graphs.run_graph("round", self.program.run_round)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            flight.append(event)
            ends.append(event)
            if len(flight) > AHEAD:
                flight.popleft().synchronize()
                if until_closed and not int(self.program.state.words[1]):
                    break
        torch.cuda.synchronize(self._device)
        return [first.elapsed_time(second) * 1000 for first, second in itertools.pairwise(ends)]

    def close(self) -> None:
        """Give the memory back."""
        torch.cuda.synchronize(self._device)
        self._own.close()
        self._peer.close()


def _clock_mhz(device: torch.device) -> float:
    """Cycles a microsecond of the sleeping kernel."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        end.record()
        torch.cuda.synchronize(device)
    return 20_000_000 / (begin.elapsed_time(end) * 1000)


def _serve(link: _Link, device: torch.device) -> None:
    """The drafter's process."""
    clock = _clock_mhz(device)
    while True:
        line, _ = link.receive()
        if line == "end":
            return
        asked = json.loads(line)
        settings = RoundSettings(*asked["settings"])
        side = _Side(link, device, settings, asked["kind"], is_drafter=True, clock=clock)
        side.capture()
        link.send("ready")
        link.receive()
        side.run(settings.rounds, until_closed=bool(asked.get("until_closed")))
        words = [*side.program.mismatches.tolist(), *side.program.state.words.tolist()]
        link.send(json.dumps(words))
        link.receive()
        side.close()


def _measure(
    link: _Link, device: torch.device, settings: RoundSettings, kind: str, clock: float
) -> dict[str, Any]:
    link.send(json.dumps({"settings": settings, "kind": kind}))
    side = _Side(link, device, settings, kind, is_drafter=False, clock=clock)
    side.capture()
    link.receive()
    link.send("go")
    times = side.run(settings.rounds)[WARM_ROUNDS:]
    theirs = json.loads(link.receive()[0])
    found = {
        "memory": kind,
        "rows": settings.rows,
        "work_us": settings.verify_us + settings.draft_us,
        "round_us_p50": round(statistics.median(times), 2),
        "idle_us_p50": round(statistics.median(times) - settings.verify_us - settings.draft_us, 2),
        "round_us_p99": round(sorted(times)[int(len(times) * 0.99)], 2),
        "attach_ms": round(side.attach_s * 1000, 2),
        "verifier": [*side.program.mismatches.tolist(), *side.program.state.words.tolist()],
        "drafter": theirs,
    }
    link.send("close")
    side.close()
    return found


def _start_peer(device: int) -> tuple[_Link, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "outrider_bench.exchange.device_rounds",
            "--peer",
            str(theirs.fileno()),
            "--device",
            str(device),
        ],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return _Link(ours), peer


def _kill(
    link: _Link, peer: subprocess.Popen[bytes], device: torch.device, clock: float
) -> dict[str, Any]:
    """Kill the drafter in the middle of its rounds: how long the verifier waits, and whether its
    device goes on."""
    settings = RoundSettings(8, 4000, 2000, 500)
    link.send(json.dumps({"settings": settings, "kind": "device"}))
    side = _Side(link, device, settings, "device", is_drafter=False, clock=clock)
    side.capture()
    link.receive()
    link.send("go")
    side.run(100)
    peer.send_signal(signal.SIGKILL)
    peer.wait()
    times = side.run(400, until_closed=True)
    rounds = side.run(50)
    found = {
        "longest_ms": round(max(times) / 1000, 2),
        "is_open": int(side.program.state.words[1]),
        "round_us_alone": round(statistics.median(rounds), 1),
        "mismatches": side.program.mismatches.tolist(),
    }
    side.close()
    return found


def main() -> None:
    """Run one side, or everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--device", type=int, default=0, help="the verifier's device")
    parser.add_argument("--rows", default="1,8,64", help="sessions, separated by commas")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--same-device", action="store_true", help="both sides on one device")
    parser.add_argument("--only", default="device,host", help="kinds of memory")
    args = parser.parse_args()
    torch.cuda.set_device(args.device)
    device = torch.device("cuda", args.device)
    if args.peer >= 0:
        _serve(_Link(socket.socket(fileno=args.peer)), device)
        return
    clock = _clock_mhz(device)
    other = args.device if args.same_device else args.device + 1
    link, peer = _start_peer(other)
    for kind in args.only.split(","):
        for rows in map(int, args.rows.split(",")):
            for works in ((0, 0), (4000, 1000)):
                settings = RoundSettings(rows, args.rounds, *works)
                print(json.dumps(_measure(link, device, settings, kind, clock)), flush=True)
    print(json.dumps({"killed": _kill(link, peer, device, clock)}), flush=True)
    link, peer = _start_peer(other)
    print(json.dumps(_measure(link, device, RoundSettings(8, 100, 0, 0), "device", clock)))
    link.send("end")
    peer.wait()


if __name__ == "__main__":
    main()
