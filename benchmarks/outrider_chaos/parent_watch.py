"""Ends a process spawned by `multiprocessing` when its parent is gone."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process once the one that spawned it by `multiprocessing` is gone, however it died.

    The workers of a pool hold each other's pipes open: none of them would ever hear of it. Does
    nothing in a process that was not spawned so.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="outrider-watch-parent", daemon=True).start()
