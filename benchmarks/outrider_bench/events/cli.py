"""`outrider bench events`: events per second and processor cost of one router process.

A verifier without a model sends events at a given rate, a real router forwards them, and client
processes stream the answers. On a shared machine the router's processor time per event is more
reliable than the rate of events. Both are reported, and also the rate that the router would reach
with one whole core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider.client.local.child_process import ChildProcess
from outrider.client.local.model_files import DEFAULT_MODEL, find_model
from outrider.errors import InvalidRequestError
from outrider.text.tokenizer import Tokenizer
from outrider_bench.environment import describe
from outrider_bench.report import format_table, print_progress, print_result

FRONTS = GRPC, HTTP = ("grpc", "http")
READY_S = 60.0
WARM_S = 2.0
"""Seconds of warm-up between the start of the streams and the measurement."""
_TOKENS = "outrider_round_tokens_total "
_TICKS = os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="its tokenizer is used")
    add("--sessions", type=int, default=64, help="streams at a time")
    add("--clients", type=int, default=2, help="client processes")
    add("--tokens", type=int, default=3, help="tokens of an event")
    add("--events", type=int, default=20000, help="events of an answer")
    add(
        "--rates",
        default="1000,5000,20000,40000,60000",
        help="events a second that the verifier emits while all sessions are open",
    )
    add(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the verifier's events reach the router without the network",
    )
    add("--fronts", default="grpc", help="how the clients ask: grpc, http or both")
    add("--seconds", type=float, default=6.0, help="time measured at each rate")
    add("--out", type=Path, help="also write the result as JSON here")
    add("--json", action="store_true", help="last line of the output is one JSON object")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result."""
    if not Path("/proc/self/stat").exists():
        raise InvalidRequestError("processor times are read from /proc", reason="NO_PROC")
    model = find_model(args.model).path
    vocab_size = Tokenizer.load(model).num_ids
    cells = []
    fronts = args.fronts.split(",")
    if not set(fronts) <= set(FRONTS):
        raise InvalidRequestError(f"--fronts is of {', '.join(FRONTS)}", reason="INVALID_FLAG")
    rates = [float(rate) for rate in args.rates.split(",")]
    for rate, front in ((rate, front) for rate in rates for front in fronts):
        print_progress(f"{rate:g} events/s offered to {args.sessions} streams over {front}")
        cells.append({"front": front, **_cell(args, str(model), vocab_size, rate, front)})
        print_progress(json.dumps(cells[-1]))
    headers = list(cells[0])
    print(format_table(headers, [list(cell.values()) for cell in cells]))
    result: dict[str, object] = {"benchmark": "events", **describe(), "sessions": args.sessions}
    result |= {
        "clients": args.clients,
        "tokens_per_event": args.tokens,
        "shared_memory": args.shared_memory,
    }
    result["cells"] = cells
    result["events_per_core_s"] = max(cell["events_per_core_s"] for cell in cells)
    print_result(args, result)


def _cell(
    args: argparse.Namespace, model: str, vocab_size: int, rate: float, front: str
) -> dict[str, Any]:
    verifier_args = ["--model", model, "--vocab-size", str(vocab_size)]
    verifier_args += ["--tokens", str(args.tokens), "--interval", str(args.sessions / rate)]
    with contextlib.ExitStack() as stack:
        verifier = ChildProcess(
            "verifier", "outrider_bench.events.scripted_verifier", verifier_args
        )
        stack.callback(verifier.close)
        verifier.start()
        router_args = ["--model", model, "--verifier", verifier.wait_ready(READY_S)]
        router_args += ["--log-level", "WARNING", "--http", "127.0.0.1:0"]
        router_args += ["--shared-memory" if args.shared_memory else "--no-shared-memory"]
        router = ChildProcess("router", "outrider_router", router_args)
        stack.callback(router.close)
        router.start()
        address = router.wait_ready(READY_S)
        http = router.ready["http"]
        target = ["--http", http] if front == HTTP else ["--router", address]
        clients = [stack.enter_context(_client(target, args, share)) for share in _shares(args)]
        time.sleep(WARM_S)
        before, tokens = _reports(clients), _emitted(http)
        router_s, verifier_s = _cpu_s(router.pid), _cpu_s(verifier.pid)
        time.sleep(args.seconds)
        router_s, verifier_s = _cpu_s(router.pid) - router_s, _cpu_s(verifier.pid) - verifier_s
        after, tokens = _reports(clients), _emitted(http) - tokens
    events = tokens / args.tokens
    return _figures(events, rate, before, after, router_s=router_s, verifier_s=verifier_s)


def _emitted(http: str) -> float:
    """Return the number of tokens that a router has passed on to clients, as its metrics report it.
    Clients over HTTP cannot count tokens themselves."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=30.0) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(_TOKENS)).rpartition(" ")[2])


def _figures(
    events: float,
    rate: float,
    before: Sequence[dict[str, float]],
    after: Sequence[dict[str, float]],
    *,
    router_s: float,
    verifier_s: float,
) -> dict[str, Any]:
    def grown(name: str) -> float:
        return sum(b[name] - a[name] for a, b in zip(before, after, strict=True))

    seconds = grown("at") / len(before)
    messages = grown("messages")
    return {
        "offered_per_s": rate,
        "events_per_s": round(events / seconds),
        "messages_per_s": round(messages / seconds),
        "events_per_message": round(events / messages, 2),
        "router_cpu_share": round(router_s / seconds, 2),
        "router_us_per_event": round(router_s / events * 1e6, 1),
        "events_per_core_s": round(events / router_s),
        "verifier_us_per_event": round(verifier_s / events * 1e6, 1),
        "client_us_per_event": round(grown("cpu_s") / events * 1e6, 1),
    }


def _shares(args: argparse.Namespace) -> list[int]:
    """Return the number of sessions of each client process."""
    whole, rest = divmod(args.sessions, args.clients)
    return [whole + int(index < rest) for index in range(args.clients)]


@contextlib.contextmanager
def _client(
    target: Sequence[str], args: argparse.Namespace, sessions: int
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "outrider_bench.events.client", *target]
    command += ["--sessions", str(sessions), "--max-tokens", str(args.events * args.tokens)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            _line(process)
            yield process
        finally:
            process.kill()


def _reports(clients: Sequence[subprocess.Popen[str]]) -> list[dict[str, float]]:
    for client in clients:
        assert client.stdin is not None
        client.stdin.write("\n")
        client.stdin.flush()
    return [_line(client) for client in clients]


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise InvalidRequestError("a client process has ended", reason="CLIENT_ENDED")
    report: dict[str, Any] = json.loads(line)
    return report


def _cpu_s(pid: int | None) -> float:
    """Return the processor time of all threads of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
