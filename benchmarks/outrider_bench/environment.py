"""Description of the environment that is stored with every result: commit, versions, machine,
date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "ray", "numpy", "triton")


def describe() -> dict[str, Any]:
    """Return the fields that every result contains: commit, date, Python and package versions,
    processor, number of cores, and GPUs with their driver. Packages that are not installed and GPUs
    that do not exist are omitted."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "versions": versions,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        **_gpu(),
    }


def _gpu() -> dict[str, object]:
    """Return the fields of the GPUs that torch sees, with their driver and torch's CUDA version.
    The result is empty without a GPU."""
    try:
        import torch

        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError):
        return {}
    if not names:
        return {}
    return {"gpu": names[0], "gpus": len(names), "driver": _driver(), "cuda": torch.version.cuda}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return lines.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _commit() -> str:
    """Return OUTRIDER_COMMIT if it is set, which is needed for source trees without git, else the
    commit from git."""
    given = os.environ.get("OUTRIDER_COMMIT")
    if given:
        return given
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
