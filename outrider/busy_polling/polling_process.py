"""Child process that keeps one CPU core from going idle, controlled over stdin.

Run as `python -I -S polling_process.py CORE`. "+": spin; "-": sleep; end of input: exit. It spins
in the scheduling class that runs only when nothing else wants the core (SCHED_IDLE), so it gives
way to any other thread at once.
"""

import os
import select
import sys

SPIN, SLEEP = b"+", b"-"
_LOOPS = 2000
"""Loops between two looks at the input, some 20 us."""


def main(core: int) -> None:
    """Spin and sleep as told until the input ends."""
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
