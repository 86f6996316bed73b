"""A child process that does as it is told by its flags; stands in for the three processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from outrider.failure_event import report_failure


def drain(seconds: float, file: str) -> None:
    """A second SIGTERM ends it before it has drained."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Path(f"{file}.told").touch()
    time.sleep(seconds)
    Path(file).touch()
    sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--refuse", action="store_true", help="fail as the three processes do")
    parser.add_argument("--broken", action="store_true", help="fail by an exception")
    parser.add_argument("--killed", action="store_true", help="be killed, as when memory is short")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--drain-timeout-s", type=float, help="end so long after SIGTERM ...")
    parser.add_argument("--drained", help="... and leave this file then")
    args = parser.parse_args()
    if args.drain_timeout_s is not None:
        signal.signal(signal.SIGTERM, lambda *_: drain(args.drain_timeout_s, args.drained))
    if args.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.fail:
        sys.exit("no such model")
    if args.refuse:
        report_failure("the head is for\nanother target")
        sys.exit(2)
    if args.broken:
        raise RuntimeError("no memory is left")
    if args.killed:
        os.kill(os.getpid(), signal.SIGKILL)
    host, _, port = args.listen.rpartition(":")
    if not args.silent:
        address = f"{host}:{port if port != '0' else os.getpid() % 60000 + 1}"
        print("not json")
        print(json.dumps({"event": "ready", "address": address}), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
