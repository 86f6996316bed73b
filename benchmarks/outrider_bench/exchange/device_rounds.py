"""Rounds of two processes over exchange buffers, without models.

Each side replays one CUDA graph per round and launches rounds ahead of its device, as verifier and
drafter do. The verifier waits for drafts, reads them, works, and writes accepted tokens and
features. The drafter waits for the tokens and features, reads them, works, and writes drafts. Work
is a sleeping kernel, so the time of a round beyond the work of both sides is the cost of the
exchange. It includes the time in which each side checks what the other one wrote.

Buffers are in the memory of the two devices, or in host memory that both devices map. On a CPU both
sides run the PyTorch reference of the same kernels over shared host memory. Times on a CPU are not
comparable with those of devices.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
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
from outrider.errors import UnavailableError
from outrider_bench.exchange.payload import DRAFT_LENGTH, FEATURE_SIZE

VOCAB: Final = 32_000
CHAIN: Final = DRAFT_LENGTH
AHEAD: Final = 2
"""Number of rounds that a side launches before it waits for the first of them to end."""
BOUND_US: Final = 30_000
"""Maximum time that the verifier's device waits for drafts, in microseconds."""
CPU_BOUND_US: Final = 2_000_000
"""Maximum time that a verifier on a CPU waits for drafts, in microseconds. Other processes may
delay its drafter."""
WARM_ROUNDS: Final = 20
LINK_TIMEOUT_S: Final = 180.0
"""Maximum time that a process waits for the other one, which may be compiling kernels, in
seconds."""
_ERROR: Final = "error: "
"""Prefix of the last message of a process that cannot exchange."""


class RoundDevices(NamedTuple):
    """Names of the devices of verifier and drafter in a measurement, such as "cuda:0" or "cpu"."""

    verifier: str
    drafter: str


class RoundTimes(NamedTuple):
    """Times and errors of the rounds of one measurement."""

    idle_us: list[float]
    """Microseconds of each round, minus the work of both sides."""
    attach_ms: float
    """Milliseconds in which the verifier mapped the drafter's memory."""
    mismatches: int
    """Number of rounds in which the verifier read unexpected drafts or none, plus the number of
    rounds in which the drafter read unexpected features or none."""
    is_open: bool
    """Whether both sides had the exchange open at the end. Nothing is exchanged in rounds after one
    side has closed it."""


class RoundSettings(NamedTuple):
    """Settings that both sides of a measurement share."""

    rows: int
    rounds: int
    verify_us: int
    """Duration of the verifier's work in a round, in microseconds; 0 for no work."""
    draft_us: int
    """Duration of the drafter's work in a round, in microseconds; 0 for no work."""
    width: int = FEATURE_SIZE
    """Number of bfloat16 values of a feature."""

    @property
    def shape(self) -> ExchangeShape:
        """Shape of the exchange buffers."""
        return ExchangeShape(
            num_slots=self.rows + 1,
            max_rows=self.rows,
            draft_length=CHAIN,
            max_chunks=1,
            chunk_tokens=32,
            feature_size=self.width,
            feature_dtype=torch.bfloat16,
            distribution_entries=0,
        )


def _work(us: int, clock_mhz: float) -> None:
    if not clock_mhz:
        # A pause of the thread would end late, by as much as is measured.
        end = time.perf_counter() + us / 1e6
        while time.perf_counter() < end:
            pass
    elif us:
        torch.cuda._sleep(int(us * clock_mhz))  # type: ignore[no-untyped-call]


class _Verifier:
    """Round of the verifier, and the tensors of its CUDA graph."""

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
        self._features = torch.zeros(
            (rows, CHAIN + 1, settings.width), dtype=torch.bfloat16, device=device
        )
        self._drafted = new_taken_tokens(rows + 1, CHAIN, device)
        self._chosen = new_chosen_drafts(rows + 1, CHAIN, device)
        self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self._steps = torch.arange(CHAIN, dtype=torch.int32, device=device)
        self.mismatches = torch.zeros(2, dtype=torch.int32, device=device)
        """Two counters: rounds with unexpected drafts, and all rounds."""

    def run_round(self) -> None:
        """Run one round of the verifier."""
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
    """Round of the drafter, and the tensors of its CUDA graph."""

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
        self._taken = new_taken_rows(rows, CHAIN + 1, settings.width, torch.bfloat16, device)
        slots = torch.arange(rows + 1, dtype=torch.int32, device=device)
        slots[rows] = -1
        self._followed = FollowedSlots(
            slots,
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.full((rows + 1,), 2**30, dtype=torch.int32, device=device),
        )
        self._steps = torch.arange(CHAIN, dtype=torch.int32, device=device)
        self.mismatches = torch.zeros(2, dtype=torch.int32, device=device)
        """Two counters: rounds with a fault or unexpected features, and all rounds."""

    def run_round(self) -> None:
        """Run one round of the drafter."""
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
    """Connection between the two processes for messages and file descriptors."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(LINK_TIMEOUT_S)

    def send(self, word: str, descriptors: list[int] | None = None) -> None:
        """Send a message, with file descriptors if given."""
        socket.send_fds(self._socket, [word.encode()], descriptors or [])

    def receive(self) -> tuple[str, list[int]]:
        """Wait for the next message and its file descriptors. Raises UnavailableError if the other
        process cannot exchange, and OSError if it has ended or is late."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, 4096, 4)
        if not data:
            raise ConnectionError("the other process is gone")
        word = data.decode()
        if word.startswith(_ERROR):
            raise UnavailableError(
                f"the drafter's process: {word.removeprefix(_ERROR)}", reason="NO_DEVICE_EXCHANGE"
            )
        return word, list(descriptors)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class _Side:
    """Buffers and CUDA graph of one side of a measurement."""

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
        bound_us = BOUND_US if device.type == "cuda" else CPU_BOUND_US
        self.program.state.host_control[1] = bound_us if not is_drafter else 2_000_000
        self.graphs = GraphCache(device)
        self._device = device

    def capture(self) -> None:
        """Compile and capture the round while the exchange is marked as closed, then open it."""
        state = self.program.state
        state.words[1] = 0
        self.graphs.run_graph("round", self.program.run_round)
        self._synchronize()
        state.words.copy_(torch.tensor([0, 1, 0, 1], dtype=torch.int32))
        self.program.mismatches.zero_()
        if isinstance(self.program, _Verifier):
            self.program._counts.fill_(1)
            self.program._starts.zero_()
            self.program._tokens.zero_()
            self.program._digests.fill_(7)
        self._synchronize()

    def run(self, rounds: int, *, until_closed: bool = False) -> list[float]:
        """Run rounds, up to AHEAD of them in flight; return the microseconds between the ends of
        rounds. If `until_closed`, stop once the exchange is closed."""
        if self._device.type == "cpu":
            return self._run_on_cpu(rounds, until_closed=until_closed)
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

    def _run_on_cpu(self, rounds: int, *, until_closed: bool) -> list[float]:
        ends: list[float] = []
        for _ in range(rounds):
            self.program.run_round()
            ends.append(time.perf_counter() * 1e6)
            if until_closed and not int(self.program.state.words[1]):
                break
        return [second - first for first, second in itertools.pairwise(ends)]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free the buffers."""
        self._synchronize()
        self._own.close()
        self._peer.close()


def _clock_mhz(device: torch.device) -> float:
    """Return the cycles per microsecond of the sleeping kernel; 0 on a CPU, which has none."""
    if device.type == "cpu":
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        end.record()
        torch.cuda.synchronize(device)
    return 20_000_000 / (begin.elapsed_time(end) * 1000)


def serve_drafter(connected: socket.socket, device_name: str) -> None:
    """Run the drafter's side of each measurement that the verifier's process requests over
    `connected`."""
    link, device = _Link(connected), _use_device(device_name)
    try:
        _serve(link, device)
    except UnavailableError as error:
        link.send(_ERROR + error.message[:1000])


def _use_device(name: str) -> torch.device:
    """Make a device the current one of this thread, and return it."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # Both sides look for each other all the time: threads of one would hold the other up.
        torch.set_num_threads(1)
    return device


def _serve(link: _Link, device: torch.device) -> None:
    """Serve measurements in the drafter's process until the verifier's process ends them."""
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
        side.run(settings.rounds)
        words = [*side.program.mismatches.tolist(), *side.program.state.words.tolist()]
        link.send(json.dumps(words))
        link.receive()
        side.close()


def _measure(
    link: _Link, device: torch.device, settings: RoundSettings, kind: str, clock: float
) -> RoundTimes:
    link.send(json.dumps({"settings": settings, "kind": kind}))
    side = _Side(link, device, settings, kind, is_drafter=False, clock=clock)
    side.capture()
    link.receive()
    link.send("go")
    times = side.run(settings.rounds)[WARM_ROUNDS:]
    theirs = json.loads(link.receive()[0])
    mismatches, _ = side.program.mismatches.tolist()
    words = side.program.state.words.tolist()
    found = RoundTimes(
        idle_us=[took - settings.verify_us - settings.draft_us for took in times],
        attach_ms=side.attach_s * 1000,
        mismatches=mismatches + theirs[0],
        is_open=bool(words[1] and theirs[3]),
    )
    link.send("close")
    side.close()
    return found


@contextlib.contextmanager
def _drafter(device: str) -> Iterator[tuple[_Link, BaseProcess]]:
    """Start a drafter's process, and kill it at the end if it still runs. Raises UnavailableError
    if the connection fails."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = multiprocessing.get_context("spawn").Process(
        target=serve_drafter, args=(theirs, device), daemon=True
    )
    link = _Link(ours)
    try:
        peer.start()
        theirs.close()
        yield link, peer
    except OSError as error:
        raise UnavailableError(f"rounds broke off: {error}", reason="NO_DEVICE_EXCHANGE") from error
    finally:
        link.close()
        peer.kill()
        peer.join()


def _kill(
    link: _Link,
    peer: BaseProcess,
    device: torch.device,
    settings: RoundSettings,
    kind: str,
    clock: float,
) -> dict[str, Any]:
    """Kill the drafter in the middle of its rounds; return how long the verifier waits and whether
    its device continues."""
    link.send(json.dumps({"settings": settings, "kind": kind}))
    side = _Side(link, device, settings, kind, is_drafter=False, clock=clock)
    side.capture()
    link.receive()
    link.send("go")
    side.run(100)
    peer.kill()
    peer.join()
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


def find_devices(kind: str, *, same_device: bool = False) -> RoundDevices:
    """Return the devices of verifier and drafter for exchange buffers in memory of this kind,
    "device" or "host".

    The drafter gets a second CUDA device if there is one. For "device" the first one must also be
    able to access its memory. Otherwise, or if `same_device` is set, both sides use the same
    device. Without any CUDA device, both use the CPU if `kind` is "host", and UnavailableError is
    raised if it is "device".
    """
    count = torch.cuda.device_count()
    if not count:
        if kind == "host":
            return RoundDevices("cpu", "cpu")
        raise UnavailableError("no CUDA device", reason="NO_DEVICE_EXCHANGE")
    has_other = count > 1 and (kind == "host" or torch.cuda.can_device_access_peer(0, 1))
    return RoundDevices("cuda:0", "cuda:1" if has_other and not same_device else "cuda:0")


def measure_rounds(
    kind: str, devices: RoundDevices, cases: Sequence[RoundSettings]
) -> list[RoundTimes]:
    """Measure every case with exchange buffers in memory of this kind ("device" or "host") and
    return the results in order. The drafter's side runs in a process of its own. Raises
    UnavailableError if the devices cannot share such memory."""
    device = _use_device(devices.verifier)
    clock = _clock_mhz(device)
    with _drafter(devices.drafter) as (link, peer):
        found = [_measure(link, device, settings, kind, clock) for settings in cases]
        link.send("end")
        peer.join(LINK_TIMEOUT_S)
    return found


def measure_killed_drafter(
    kind: str, devices: RoundDevices, *, width: int = FEATURE_SIZE
) -> dict[str, Any]:
    """Kill the drafter during its rounds and measure the verifier, then measure rounds with a new
    drafter. Raises UnavailableError if the devices cannot share memory of this kind.

    The result contains `longest_ms` (longest round of the verifier after the kill), `is_open` (0
    once the verifier has closed the exchange), `round_us_alone` (median round after that),
    `mismatches` (rounds with unexpected drafts, and all rounds) and, for the new drafter,
    `attach_ms_again` and `idle_us_again`.
    """
    device = _use_device(devices.verifier)
    clock, settings = _clock_mhz(device), RoundSettings(8, 4000, 2000, 500, width)
    with _drafter(devices.drafter) as (link, peer):
        killed = _kill(link, peer, device, settings, kind, clock)
    (again,) = measure_rounds(kind, devices, [RoundSettings(8, 100, 0, 0, width)])
    return killed | {
        "attach_ms_again": round(again.attach_ms, 2),
        "idle_us_again": round(statistics.median(again.idle_us), 2),
    }
