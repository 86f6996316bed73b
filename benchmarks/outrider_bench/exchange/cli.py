"""Idle time of a round between a verifier and a drafter in two processes, without models.

A table compares transports. Each of them carries the same payload: the accepted tokens of a chain
of four with their features, and the next chain. The figures are the microseconds of a round in
which neither side works, because the exchange takes this time. They are measured in two ways:

- Channels (`shm`, the shared-memory channel of one host; `grpc.aio`, between hosts; variants of
  both): a round trip of host threads by the host's clock, including encoding and decoding. Features
  are in host memory already, so the copies between devices and hosts that a service also makes are
  not included.
- Exchange buffers (`buffers.device`, in device memory; `buffers.host`, in host memory that both
  devices map): the time from the end of a round to the end of the next one by timestamps of the
  verifier's device, minus the work of both sides. It includes the kernels that read, check and
  write the buffers, and kernels of the benchmark that compare every value with the expected one.
  Without a CUDA device `buffers.host` runs the PyTorch reference of the kernels on the CPU, timed
  by the host's clock.

The work of both sides (`--work-ms`) is simulated. Over a channel it is a pause of the verifier's
thread before a round trip. Over buffers it is a sleeping kernel of the verifier, and one of a
quarter of that time of the drafter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from outrider.errors import InvalidRequestError, OutriderError
from outrider.extras import explain_missing_packages
from outrider.wire.limits import MAX_MESSAGE_BYTES
from outrider_bench.environment import describe
from outrider_bench.exchange.channel_rounds import run_transport
from outrider_bench.exchange.channels import TRANSPORTS
from outrider_bench.exchange.payload import DRAFT_LENGTH, FEATURE_BYTES, FEATURE_SIZE
from outrider_bench.report import format_table, print_progress, print_result

BUFFERS: Final = {"buffers.device": "device", "buffers.host": "host"}
"""Kind of memory that holds the exchange buffers ("device" or "host"), by name of the transport."""
ALL_TRANSPORTS: Final = (*BUFFERS, *TRANSPORTS)
DEFAULT_TRANSPORTS: Final = ("buffers.device", "buffers.host", "shm", "grpc.aio")
BY_CHANNEL: Final = "round trip of host threads, with encoding and decoding"
BY_STAMPS: Final = "rounds less work, by the verifier's device"
BY_REFERENCE: Final = "rounds less work, PyTorch reference on the CPU"
_MAX_SESSIONS: Final = 1024
_MAX_ROUNDS: Final = 100_000
_MAX_WORK_MS: Final = 1000.0


class TransportTimes(NamedTuple):
    """Measurements of one transport in all cases."""

    measured: str
    """Description of what the microseconds include and which clock measures them."""
    idle_us: list[list[float]]
    """Idle microseconds of each round: one list for each case."""
    figures: list[dict[str, Any]]
    """Other figures, for instance the number of wrong rounds: one dict for each case."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add("--sessions", default="1,8,32,64", help="sessions of a round, several with commas")
    add("--width", type=int, default=FEATURE_SIZE, help="width of a feature (bfloat16)")
    add("--rounds", type=int, default=300, help="rounds measured of each case")
    add("--work-ms", default="0,4", help="simulated work of the verifier, several with commas")
    add(
        "--transports",
        default=",".join(DEFAULT_TRANSPORTS),
        help=f"with commas, of {', '.join(ALL_TRANSPORTS)}; default: %(default)s",
    )
    add("--same-device", action="store_true", help="buffers: both sides on one CUDA device")
    add(
        "--kill-drafter",
        action="store_true",
        help="also kill the drafter amid rounds by buffers, and exchange with a new one",
    )
    add("--out", type=Path, help="also write the result as JSON here")
    add("--json", action="store_true", help="last line of the output is one JSON object")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
    sessions, works, transports = _read_flags(args)
    cases = [(count, work) for work in works for count in sessions]
    rows: list[list[object]] = []
    cells: list[dict[str, Any]] = []
    unavailable: dict[str, str] = {}
    for transport in transports:
        print_progress(f"{transport}: {len(cases)} cases of {args.rounds} rounds")
        try:
            found = _measure(transport, cases, args)
        except (OSError, OutriderError) as error:
            # What one machine does not have shall not hide what it has.
            unavailable[transport] = str(error)
            rows.append([transport, "-", *["-"] * (2 * len(sessions)), f"unavailable: {error}"])
            continue
        measured = _cells(transport, cases, found)
        cells += measured
        for work in works:
            row: list[object] = [transport, f"{work:g}"]
            for cell in measured:
                if cell["work_ms"] == work:
                    row += [f"{cell['p50_us']:.0f}", f"{cell['p99_us']:.0f}"]
            rows.append([*row, found.measured + _faults(measured, work)])
    print(_explain(args))
    titles = [f"{count} sess. {p}" for count in sessions for p in ("p50", "p99")]
    print(format_table(["transport", "work, ms", *titles, "measured"], rows))
    result: dict[str, object] = {"benchmark": "exchange", **describe()}
    result |= {"width": args.width, "draft_length": DRAFT_LENGTH, "rounds": args.rounds}
    result |= {"cells": cells, "unavailable": unavailable}
    if args.kill_drafter:
        result["killed"] = {
            transport: _kill_drafter(transport, args)
            for transport in transports
            if transport in BUFFERS and transport not in unavailable
        }
    print_result(args, result)


def _read_flags(args: argparse.Namespace) -> tuple[list[int], list[float], list[str]]:
    """Return the numbers of sessions, the verifier's work in ms and the names of the transports
    that the flags list. Raises InvalidRequestError."""
    try:
        sessions = [int(part) for part in args.sessions.split(",")]
        works = [float(part) for part in args.work_ms.split(",")]
    except ValueError as error:
        raise _invalid(f"--sessions and --work-ms are numbers with commas: {error}") from None
    if not all(1 <= count <= _MAX_SESSIONS for count in sessions):
        raise _invalid(f"--sessions must be from 1 to {_MAX_SESSIONS}")
    if not all(0.0 <= work <= _MAX_WORK_MS for work in works):
        raise _invalid(f"--work-ms must be from 0 to {_MAX_WORK_MS:g}")
    if not 1 <= args.rounds <= _MAX_ROUNDS:
        raise _invalid(f"--rounds must be from 1 to {_MAX_ROUNDS}")
    max_width = MAX_MESSAGE_BYTES // 2 // (max(sessions) * (DRAFT_LENGTH + 1) * FEATURE_BYTES)
    if not 1 <= args.width <= max_width:
        raise _invalid(f"--width must be from 1 to {max_width} at {max(sessions)} sessions")
    transports = args.transports.split(",")
    if unknown := [name for name in transports if name not in ALL_TRANSPORTS]:
        raise _invalid(f"--transports is of {', '.join(ALL_TRANSPORTS)}, got {', '.join(unknown)}")
    return list(dict.fromkeys(sessions)), list(dict.fromkeys(works)), transports


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_FLAG")


def _measure(
    transport: str, cases: Sequence[tuple[int, float]], args: argparse.Namespace
) -> TransportTimes:
    """Measure every case (sessions, work in ms). Raises OutriderError or OSError if this machine
    does not support the transport."""
    if transport in BUFFERS:
        return _measure_buffers(transport, cases, args)
    found = run_transport(transport, cases, args.rounds, width=args.width)
    return TransportTimes(BY_CHANNEL, found, [{} for _ in cases])


def _measure_buffers(
    transport: str, cases: Sequence[tuple[int, float]], args: argparse.Namespace
) -> TransportTimes:
    # Only here: channels are measured without torch and triton, too.
    with explain_missing_packages(transport):
        from outrider_bench.exchange import device_rounds
    kind = BUFFERS[transport]
    devices = device_rounds.find_devices(kind, same_device=args.same_device)
    settings = [
        device_rounds.RoundSettings(
            rows=sessions,
            rounds=args.rounds + device_rounds.WARM_ROUNDS + 1,
            verify_us=int(work_ms * 1000),
            draft_us=int(work_ms * 250),
            width=args.width,
        )
        for sessions, work_ms in cases
    ]
    found = device_rounds.measure_rounds(kind, devices, settings)
    measured = BY_REFERENCE if devices.verifier == "cpu" else BY_STAMPS
    if devices.verifier == devices.drafter != "cpu":
        measured += "; one device twice, whose processes take turns"
    figures = [
        {
            "devices": list(devices),
            "attach_ms": round(times.attach_ms, 2),
            "mismatches": times.mismatches,
            "is_open": times.is_open,
        }
        for times in found
    ]
    return TransportTimes(measured, [times.idle_us for times in found], figures)


def _kill_drafter(transport: str, args: argparse.Namespace) -> dict[str, Any]:
    from outrider_bench.exchange import device_rounds

    kind = BUFFERS[transport]
    devices = device_rounds.find_devices(kind, same_device=args.same_device)
    return device_rounds.measure_killed_drafter(kind, devices, width=args.width)


def _cells(
    transport: str, cases: Sequence[tuple[int, float]], found: TransportTimes
) -> list[dict[str, Any]]:
    cells = []
    for (sessions, work_ms), idle_us, figures in zip(
        cases, found.idle_us, found.figures, strict=True
    ):
        p50, p99 = np.percentile(idle_us, (50, 99))
        cells.append(
            {
                "transport": transport,
                "sessions": sessions,
                "work_ms": work_ms,
                "p50_us": round(float(p50), 2),
                "p99_us": round(float(p99), 2),
                "measured": found.measured,
                **figures,
            }
        )
    return cells


def _faults(cells: Sequence[dict[str, Any]], work_ms: float) -> str:
    """Return a description of the errors in the rounds with this work, for the table; "" if there
    are none."""
    faults = ""
    for cell in cells:
        if cell["work_ms"] != work_ms:
            continue
        of_sessions = f"of {cell['sessions']} sessions"
        if cell.get("mismatches"):
            faults += f"; {cell['mismatches']} rounds {of_sessions} had late or wrong values"
        if not cell.get("is_open", True):
            faults += f"; the exchange {of_sessions} was closed amid its rounds"
    return faults


def _explain(args: argparse.Namespace) -> str:
    """Return the explanation of the table's figures."""
    return (
        f"Microseconds of a round that the exchange takes beside the work of both sides, "
        f"{args.rounds} rounds each.\n"
        f"Payload of a session: 1 to {DRAFT_LENGTH + 1} accepted tokens in turn, each with a "
        f"feature of {args.width} bfloat16 values, and a chain of {DRAFT_LENGTH}.\n"
        "Channels: without the copies between devices and hosts. Buffers: with the kernels that "
        "check every value.\n"
    )
