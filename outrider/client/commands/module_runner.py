"""Runs commands that need torch or Ray by replacing this process with `python -m MODULE`.

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
"""Folder of a source checkout that contains each package. The packages may not be installed."""


def run_module(module: str, args: Sequence[str]) -> NoReturn:
    """Replace this process by `python -m MODULE ARGS`, so that signals go to the module and its
    exit status is that of the command.

    A child process would not do, because it would continue to run if this process were killed.
    Raises NotFoundError if the module is not installed.
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
