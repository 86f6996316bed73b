"""Busy-polling cores: claims CPU cores, keeps them awake and pins threads to them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from outrider.busy_polling.core_selection import claim_order, parse_core_list
from outrider.busy_polling.polling_process import SLEEP, SPIN
from outrider.errors import FailedPreconditionError

_CLAIM = "\0outrider-awake-core-{}"
"""Abstract socket address to which the process that claims a core is bound. The kernel frees the
address when the process ends.
"""
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_SPINNER = Path(__file__).with_name("polling_process.py")
_STOP_S = 2.0


class BusyCores:
    """CPU cores that this process has claimed. They stay awake from `set_busy(True)` on.

    As a context manager it closes itself at the end. Without cores every method does nothing. Linux
    only.
    """

    def __init__(self, claims: Mapping[int, socket.socket]) -> None:
        self.cores = tuple(sorted(claims))
        self._claims = claims
        self._kept = False
        self._spinners = [
            subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SPINNER), str(core)], stdin=subprocess.PIPE
            )
            for core in self.cores
        ]

    @classmethod
    def claim(cls, count: int) -> BusyCores:
        """Claim `count` of the cores that this process may run on and that no other Outrider
        process has claimed. Raises FailedPreconditionError if there are fewer.
        """
        if count and not hasattr(os, "SCHED_IDLE"):
            raise FailedPreconditionError(
                "busy_polling_cores needs Linux", reason="NO_BUSY_POLLING_CORES"
            )
        allowed = os.sched_getaffinity(0) if count else set()
        claims: dict[int, socket.socket] = {}
        for core in claim_order(allowed, {core: _siblings(core) for core in allowed}):
            if len(claims) == count:
                break
            claim = _claim(core)
            if claim is not None:
                claims[core] = claim
        if len(claims) < count:
            for claim in claims.values():
                claim.close()
            raise FailedPreconditionError(
                f"busy_polling_cores is {count}, but only {len(claims)} of the {len(allowed)} "
                "cores that this process may use are unclaimed",
                reason="NO_BUSY_POLLING_CORES",
            )
        return cls(claims)

    def __enter__(self) -> BusyCores:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def adopt_thread(self) -> None:
        """Run the calling thread, and all threads that it starts from now on, on these cores."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    def set_busy(self, busy_cores: bool) -> None:
        """Keep the cores awake if `busy_cores`, otherwise let them sleep. A call without a change
        does nothing."""
        if busy_cores == self._kept:
            return
        self._kept = busy_cores
        for spinner in self._spinners:
            assert spinner.stdin is not None
            # If a child process was killed, only latency suffers.
            with contextlib.suppress(OSError):
                os.write(spinner.stdin.fileno(), SPIN if busy_cores else SLEEP)

    def close(self) -> None:
        """End the child processes that keep the cores awake, and release the cores. Idempotent."""
        spinners, self._spinners = self._spinners, []
        for spinner in spinners:
            assert spinner.stdin is not None
            with contextlib.suppress(OSError):
                spinner.stdin.close()
        for spinner in spinners:
            try:
                spinner.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                spinner.kill()
                spinner.wait()
        for claim in self._claims.values():
            claim.close()


def _claim(core: int) -> socket.socket | None:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(_CLAIM.format(core))
    except OSError:
        held.close()
        return None
    return held


def _siblings(core: int) -> frozenset[int]:
    try:
        return parse_core_list(Path(_SIBLINGS.format(core)).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()
