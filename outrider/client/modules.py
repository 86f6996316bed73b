"""Commands that are processes of their own: they import what the client must not (torch, Ray)."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import outrider
from outrider.errors import NotFoundError

_FOLDERS = {
    "outrider_bench": "benchmarks",
    "outrider_chaos": "benchmarks",
    "outrider_ray": "deploy/ray",
}
"""Where a checkout keeps packages that may not be installed."""


def run_module(module: str, args: Sequence[str]) -> int:
    """Run `python -m MODULE ARGS` in the foreground; its exit status.

    Raises NotFoundError if this installation does not have it.
    """
    env = dict(os.environ)
    top_level = module.partition(".")[0]
    if importlib.util.find_spec(top_level) is None:
        checkout = Path(outrider.__file__).resolve().parent.parent
        folder = checkout / _FOLDERS.get(top_level, "")
        if not (folder / top_level / "__init__.py").is_file():
            raise NotFoundError(f"{top_level} is not installed here", reason="NOT_INSTALLED")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))
    with subprocess.Popen([sys.executable, "-m", module, *args], env=env) as child:
        # A terminal's Ctrl-C reaches the child by itself; a SIGTERM is sent to us alone.
        before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            return _wait(child)
        finally:
            signal.signal(signal.SIGTERM, before)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Its exit status; interrupts are the child's to handle."""
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue
