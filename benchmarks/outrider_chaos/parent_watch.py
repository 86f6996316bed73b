"""Watch that ends a process spawned by `multiprocessing` when its parent is gone."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this process as soon as the parent that spawned it by `multiprocessing` has ended in any
    way.

    The workers of a process pool keep each other's pipes open, so without this watch they would not
    notice. Nothing happens in a process that `multiprocessing` has not spawned.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="outrider-watch-parent", daemon=True).start()
