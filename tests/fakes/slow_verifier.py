"""The verifier whose rounds on a device (also if that is a CPU) last for a quarter of a second from
SIGUSR1 until SIGUSR2."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

from outrider_verifier import __main__ as verifier

from outrider.engine.device.round_launcher import RoundLauncher

SLOW = threading.Event()
_launch = RoundLauncher.launch_round


def launch(self: RoundLauncher, *args: Any, **options: Any) -> Any:
    if SLOW.is_set():
        time.sleep(0.25)
    return _launch(self, *args, **options)


if __name__ == "__main__":
    RoundLauncher.launch_round = launch  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: SLOW.set())
    signal.signal(signal.SIGUSR2, lambda *_: SLOW.clear())
    sys.exit(verifier.main())
