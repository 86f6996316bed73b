"""Child process that keeps one CPU core from going idle, controlled over stdin.

Run as `python -I -S polling_process.py CORE`. The byte "+" on stdin starts spinning, "-" stops it,
and the end of the input ends the process. The process spins in the scheduling class SCHED_IDLE, so
that every other thread preempts it immediately.
"""

import os
import select
import sys

SPIN, SLEEP = b"+", b"-"
_LOOPS = 2000
"""Number of loops between two polls of stdin, about 20 us."""


def main(core: int) -> None:
    """Run on the given core. Spin after the byte "+" on stdin, sleep after "-", and return at the
    end of the input."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    orders = select.poll()
    orders.register(0, select.POLLIN)
    while order := os.read(0, 1):
        while order == SPIN and not orders.poll(0):
            for _ in range(_LOOPS):
                pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
