"""Round-trip times of the exchange between two processes, without models, by transport.

A working thread encodes a round's verdicts, the other process's working thread decodes them and
answers with proposals, which the first one decodes: the part of a round that does not depend on
models. `grpc.aio`, with an event loop on either side, is used between hosts. `shm` is the
shared-memory channel used on one host, `shm.in_place` the same with features that a device has
written into its memory. With `grpc` the working threads read and write a synchronous stream, with
`socket` a Unix socket; with `socket.aio` the event loops own the socket.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from outrider.process_tuning import keep_freed_memory
from outrider.wire.codec import decode_drafter_messages, encode_verdicts
from outrider.wire.messages import (
    EncodedMessage,
    FeatureRows,
    Proposals,
    TensorDtype,
    Verdicts,
)
from outrider_bench.exchange.channels import ROWS, TRANSPORTS, BenchChannel, InPlaceShmBenchChannel

WIDTH = 4096


def verdicts(sessions: int) -> Verdicts:
    """A round of this many sessions."""
    rng = np.random.default_rng(sessions)
    counts = np.full(sessions, ROWS)
    pieces = tuple(
        rng.integers(0, 1 << 14, (ROWS, WIDTH)).astype(np.uint16) for _ in range(sessions)
    )
    return Verdicts(
        handles=np.arange(sessions),
        starts=counts * 9,
        token_counts=counts,
        tokens=rng.integers(0, 1 << 15, ROWS * sessions).astype(np.int32),
        digests=rng.integers(0, 1 << 63, sessions).astype(np.uint64),
        feature_starts=counts * 9,
        feature_counts=counts,
        draft_wanted=np.ones(sessions, dtype=np.bool_),
        features=FeatureRows(dtype=TensorDtype.BFLOAT16, segments=pieces),
    )


def measure(channel: BenchChannel, sessions: int, *, rounds: int, idle_s: float) -> list[float]:
    """The verifier's working thread: microseconds of each round trip."""
    keep_freed_memory()
    told = verdicts(sessions)
    taken: list[float] = []
    for _ in range(rounds):
        time.sleep(idle_s)
        round_told = _in_shm(told, channel)
        began = time.perf_counter()
        channel.send(EncodedMessage(encode_verdicts(round_told)))
        del round_told
        (drafts,) = decode_drafter_messages(channel.receive())
        taken.append((time.perf_counter() - began) * 1e6)
        assert isinstance(drafts, Proposals) and len(drafts) == sessions
    return taken[rounds // 10 :]


def _in_shm(told: Verdicts, channel: BenchChannel) -> Verdicts:
    """The same with its features where they are sent from, if the transport has such places: there
    a device would have put them."""
    features = told.features
    if not isinstance(channel, InPlaceShmBenchChannel) or features is None:
        return told
    place = channel.reserve(features.nbytes)
    if place is None:
        return told
    rows = place.view(np.uint16).reshape(features.count, features.width)
    np.concatenate(features.segments, out=rows)
    return replace(told, features=replace(features, segments=(rows,)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--sessions", default="1,64", help="sessions a round, several with commas")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--idle-ms", default="0,4", help="pauses before a round, with commas")
    parser.add_argument(
        "--transports", default=",".join(TRANSPORTS), help="transports, with commas"
    )


def run(args: argparse.Namespace) -> None:
    """Print a table of medians in microseconds."""
    cases = [
        (int(sessions), float(idle))
        for sessions in args.sessions.split(",")
        for idle in args.idle_ms.split(",")
    ]
    titles = [f"{sessions} sessions, idle {idle:g} ms" for sessions, idle in cases]
    print("| transport | " + " | ".join(titles) + " |")
    print("|---|" + "---|" * len(cases))
    for transport in args.transports.split(","):
        medians = [
            f"{np.median(taken):.0f}" for taken in run_transport(transport, cases, args.rounds)
        ]
        print(f"| {transport} | " + " | ".join(medians) + " |")


def run_transport(transport: str, cases: list[tuple[int, float]], rounds: int) -> list[list[float]]:
    """Round trips of every (sessions, idle ms), microseconds, in a process pair of their own."""
    serve, through = TRANSPORTS[transport]
    results: list[list[float]] = []

    def work(channel: BenchChannel) -> None:
        for sessions, idle_ms in cases:
            measure(channel, sessions, rounds=20, idle_s=0.0)
            results.append(measure(channel, sessions, rounds=rounds, idle_s=idle_ms / 1e3))

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "bench.sock")
        address = f"unix:{path}" if transport.startswith("grpc") else path
        drafter = multiprocessing.get_context("spawn").Process(
            target=serve, args=(address,), daemon=True
        )
        drafter.start()
        try:
            through(address, work)
        finally:
            drafter.terminate()
            drafter.join()
    return results
