"""Runs commands that import torch or Ray by becoming `python -m MODULE`.

The client itself must not import these packages.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import outrider
from outrider.errors import NotFoundError

_FOLDERS = {
    "outrider_bench": "benchmarks",
    "outrider_chaos": "benchmarks",
    "outrider_ray": "deploy/ray",
}
"""Folders of a checkout that contain packages which may not be installed, by package."""


def run_module(module: str, args: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m MODULE ARGS`, so that signals and the exit status are
    those of the module.

    A child process is not used, because it would go on running if this process were killed. Raises
    NotFoundError if this installation does not have the module.
    """
    env = dict(os.environ)
    top_level = module.partition(".")[0]
    if importlib.util.find_spec(top_level) is None:
        checkout = Path(outrider.__file__).resolve().parent.parent
        folder = checkout / _FOLDERS.get(top_level, "")
        if not (folder / top_level / "__init__.py").is_file():
            raise NotFoundError(f"{top_level} is not installed here", reason="NOT_INSTALLED")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), env.get("PYTHONPATH"))))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *args], env)
