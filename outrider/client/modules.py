"""Commands that are processes of their own: they import what the client must not (torch, Ray)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import outrider
from outrider.errors import NotFoundError

_FOLDERS = {"outrider_bench": "benchmarks", "outrider_ray": "deploy/ray"}
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
    return subprocess.run([sys.executable, "-m", module, *args], env=env, check=False).returncode
