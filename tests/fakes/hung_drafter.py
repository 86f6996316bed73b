"""The drafter whose drafting thread hangs in its next draft once SIGUSR1 came."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

from outrider_drafter import __main__ as drafter
from outrider_drafter.server.draft_engine import DraftEngine, OutgoingProposals

HANGS = threading.Event()
_draft = DraftEngine.draft_wanted


def draft(self: DraftEngine) -> Iterator[OutgoingProposals]:
    if HANGS.is_set():
        threading.Event().wait()
    return _draft(self)


if __name__ == "__main__":
    DraftEngine.draft_wanted = draft  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: HANGS.set())
    sys.exit(drafter.main())
