"""A child process that does as it is told by its flags; stands in for the three processes."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    args = parser.parse_args()
    if args.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.fail:
        sys.exit("no such model")
    host, _, port = args.listen.rpartition(":")
    if not args.silent:
        address = f"{host}:{port if port != '0' else os.getpid() % 60000 + 1}"
        print("not json")
        print(json.dumps({"event": "ready", "address": address}), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
