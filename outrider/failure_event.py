"""Startup failure event of a process, one JSON line: {"event": "failed", "reason": ...}."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Final, TextIO

MAX_REASON_CHARS: Final = 2000

_supervisors: list[TextIO] = []


def report_failure(reason: str) -> None:
    """Write a failure event with this reason to stderr and to the streams of all supervisors (see
    `add_supervisor`)."""
    for stream in (sys.stderr, *_supervisors):
        write_failure(stream, reason)


def write_failure(stream: TextIO, reason: str) -> None:
    """Write a failure event with this reason to `stream`, as one line of JSON. Errors of the stream
    are ignored."""
    words = " ".join(reason.split())[:MAX_REASON_CHARS]
    # The reader may have gone first; the failure itself is what must be raised.
    with contextlib.suppress(OSError, ValueError):
        stream.write(json.dumps({"event": "failed", "reason": words}) + "\n")
        stream.flush()


def add_supervisor(stream: TextIO) -> None:
    """Make `report_failure` also write to `stream`, from which a supervisor reads the events of
    this process."""
    _supervisors.append(stream)
