"""Round trips between the worker threads of two processes over channels.

The verifier's worker thread encodes and sends the verdicts of a round. The drafter's worker thread
decodes them and answers with proposals, which the verifier's worker thread decodes. Features are in
host memory before a round begins. A service also copies between devices and hosts; these copies are
not measured.
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
    """Start a drafter process for the transport and measure every case with it. A case is (number
    of sessions, verifier's work per round in ms).

    Returns one list for each case, in order: the microseconds of each of its `rounds` round trips.
    `width` is the number of values of a feature.
    """
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
    """Return the microseconds of each of `rounds` round trips, as the verifier's worker thread
    measures them. The thread pauses for `pause_s` before each round trip, in place of the
    verifier's work. `width` is the number of values of a feature."""
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
    """Return the message with its features copied to shared memory, if the channel can send them
    from there without another copy. In a service a device writes them there."""
    features = message.features
    if not isinstance(channel, InPlaceShmBenchChannel) or features is None:
        return message
    reserved = channel.reserve(features.nbytes)
    if reserved is None:
        return message
    rows = reserved.view(np.uint16).reshape(features.count, features.width)
    np.concatenate(features.segments, out=rows)
    return replace(message, features=replace(features, segments=(rows,)))
