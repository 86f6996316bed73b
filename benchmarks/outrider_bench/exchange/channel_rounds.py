"""Round trips between the worker threads of two processes over channels.

The verifier's worker thread encodes a round's verdicts; the drafter's worker thread decodes them
and answers with proposals, which the first one decodes. Features are in host memory before a round
begins. Copies between devices and hosts, which a service also makes, are not included.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from outrider.process_tuning import keep_freed_memory
from outrider.wire.codec import decode_drafter_messages, encode_verdicts
from outrider.wire.messages import EncodedMessage, Proposals, Verdicts
from outrider_bench.exchange.channels import TRANSPORTS, BenchChannel, InPlaceShmBenchChannel
from outrider_bench.exchange.payload import (
    DRAFT_LENGTH,
    FEATURE_SIZE,
    accepted_tokens,
    verdicts,
)

_WARM_ROUNDS = 20


def run_transport(
    transport: str,
    cases: Sequence[tuple[int, float]],
    rounds: int,
    *,
    width: int = FEATURE_SIZE,
) -> list[list[float]]:
    """Run the round trips of every case (sessions, work in ms) in a process pair of their own.
    Return the microseconds of each round trip, by case."""
    serve, through = TRANSPORTS[transport]
    results: list[list[float]] = []

    def work(channel: BenchChannel) -> None:
        for sessions, work_ms in cases:
            measure(channel, sessions, rounds=_WARM_ROUNDS, pause_s=0.0, width=width)
            results.append(
                measure(channel, sessions, rounds=rounds, pause_s=work_ms / 1e3, width=width)
            )

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


def measure(
    channel: BenchChannel, sessions: int, *, rounds: int, pause_s: float, width: int
) -> list[float]:
    """Return the microseconds of each round trip of the verifier's worker thread. A pause of
    `pause_s` before each one stands for the verifier's work."""
    keep_freed_memory()
    messages = [
        verdicts(sessions, tokens=accepted_tokens(number), width=width)
        for number in range(DRAFT_LENGTH + 1)
    ]
    times: list[float] = []
    for number in range(rounds):
        time.sleep(pause_s)
        message = _in_shm(messages[number % len(messages)], channel)
        began = time.perf_counter()
        channel.send(EncodedMessage(encode_verdicts(message)))
        del message
        (drafts,) = decode_drafter_messages(channel.receive())
        times.append((time.perf_counter() - began) * 1e6)
        assert isinstance(drafts, Proposals) and len(drafts) == sessions
    return times


def _in_shm(message: Verdicts, channel: BenchChannel) -> Verdicts:
    """Return the message with its features in shared memory, if the transport sends them from
    there. A device would have written them there."""
    features = message.features
    if not isinstance(channel, InPlaceShmBenchChannel) or features is None:
        return message
    reserved = channel.reserve(features.nbytes)
    if reserved is None:
        return message
    rows = reserved.view(np.uint16).reshape(features.count, features.width)
    np.concatenate(features.segments, out=rows)
    return replace(message, features=replace(features, segments=(rows,)))
