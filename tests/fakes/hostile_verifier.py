"""The verifier that repeats every row of tokens for ever and never says that a session is over,
once SIGUSR1 came; once SIGUSR2 came, its token ids are none of the vocabulary either."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
from outrider_verifier import __main__ as verifier
from outrider_verifier.server.router_streams import RouterStreams

from outrider.wire.messages import SessionEvents

ENDLESS, WRONG = threading.Event(), threading.Event()
_tell = RouterStreams._tell


def tell(self: RouterStreams, router: Any, message: Any) -> None:
    if isinstance(message, SessionEvents) and (ENDLESS.is_set() or WRONG.is_set()):
        message = replace(message, finish_reasons=np.zeros_like(message.finish_reasons))
        if WRONG.is_set():
            message = replace(message, tokens=np.full_like(message.tokens, 1 << 20))
        asyncio.get_running_loop().call_later(0.01, again, self, router, message)
    _tell(self, router, message)


def again(self: RouterStreams, router: Any, message: Any) -> None:
    if router.number in self._routers:
        tell(self, router, message)


if __name__ == "__main__":
    RouterStreams._tell = tell  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: ENDLESS.set())
    signal.signal(signal.SIGUSR2, lambda *_: WRONG.set())
    sys.exit(verifier.main())
