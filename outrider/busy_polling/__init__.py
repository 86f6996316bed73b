"""CPU cores kept awake while a process serves, so that its threads wake within microseconds.

A round over gRPC wakes about ten sleeping threads. If a thread's core is idle, waking the thread
takes as long as the hardware or the hypervisor needs to wake the core: 5 us if idle cores poll, up
to 200 us in a virtual machine. See docs/decisions/0012-busy-polling-cores.md.

core_selection.py          Selection of the CPU cores that a process keeps busy-polling.
cores.py                   Busy-polling cores: claims CPU cores, keeps them awake and pins threads
                           to them.
polling_process.py         Child process that keeps one CPU core from going idle, controlled over
                           stdin.
"""

from outrider.busy_polling.core_selection import check_request
from outrider.busy_polling.cores import BusyCores

__all__ = ["BusyCores", "check_request"]
