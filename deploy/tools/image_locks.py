"""Lock files of the images: the version of every package and the hashes of its files.

    make locks

writes deploy/locks from pyproject.toml and constraints.txt with uv. A package keeps its locked
version while pyproject.toml and constraints.txt allow it; `--upgrade` takes the newest ones.

The lock files are for Python 3.11 to 3.14 on Linux, x86-64 and aarch64. `engine` has the CUDA build
of torch from PyPI. `cpu` has the CPU build from PyTorch's own index, which has other hashes. They
are read from that index when the version of torch in constraints.txt changes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "locks"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = {
    "router": ["router", "trace"],
    "engine": ["engine", "trace"],
    "cpu": ["cpu", "trace"],
    "ray-engine": ["router", "engine", "trace"],
    "ray-cpu": ["cpu", "trace"],
}
"""Extras of the project by the name of the lock file that installs them."""
CYCLONEDX = "cyclonedx-bom==7.5.0"
"""The package that writes the software bill of materials of an image."""
_GPU_ONLY = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
"""torch, and the packages that only its CUDA build needs."""


class LockError(Exception):
    """A lock file cannot be written; the message says why."""


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """Return the requirements of the project and of `extras`, and of the extras that these include.

    Raises KeyError for an extra that does not exist.
    """
    project = tomllib.loads(pyproject)["project"]
    own = re.compile(rf"{re.escape(project['name'])}\[([^]]*)\]")
    found, waiting = list(project["dependencies"]), list(extras)
    while waiting:
        for line in project["optional-dependencies"][waiting.pop(0)]:
            inner = own.fullmatch(line)
            if inner:
                waiting += inner[1].split(",")
            else:
                found.append(line)
    return list(dict.fromkeys(found))


def locked_requirements(name: str, pyproject: str) -> list[str]:
    """Return the requirements that the lock file `name` resolves; `pyproject` is the text of
    pyproject.toml."""
    if name == "build":
        build = tomllib.loads(pyproject)
        hook = build["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
        return [*build["build-system"]["requires"], *hook["dependencies"], CYCLONEDX]
    found = requirements(pyproject, EXTRAS[name])
    return [*found, "ray[default,serve]"] if name.startswith("ray-") else found


def entries(lock: str) -> list[str]:
    """Return the entries of a lock file: each is a requirement and the lines with its hashes."""
    return re.findall(r"^[a-z0-9].*\n(?:[ \t].*\n)*", lock, re.M)


def cpu_torch(page: str, version: str) -> str:
    """Return the entry of torch's CPU build of `version`. `page` is the HTML that the index of CPU
    wheels serves for torch, with the hash of each file in its link.

    Raises LockError if the index has no such build.
    """
    wheel = re.compile(
        rf"/torch-{re.escape(version)}(?:%2B|\+)cpu-cp(31[1-4])-cp\1-manylinux_2_28_"
        r"(?:x86_64|aarch64)\.whl#sha256=([0-9a-f]{64})"
    )
    hashes = sorted({found[2] for found in wheel.finditer(page)})
    if not hashes:
        raise LockError(f"{CPU_INDEX} has no CPU build of torch {version} with hashes")
    return _entry(f"torch=={version}", hashes)


def on_cpus(lock: str, torch: str) -> str:
    """Return the lock file `lock`, which was resolved on PyPI, for CPUs: `torch` replaces the entry
    of torch, and packages that only torch with CUDA needs are left out."""
    kept = [entry for entry in entries(lock) if not _GPU_ONLY.match(entry)]
    return "".join(sorted([*kept, torch], key=lambda entry: entry.partition("==")[0]))


def _entry(requirement: str, hashes: list[str]) -> str:
    return " \\\n".join([requirement, *(f"    --hash=sha256:{digest}" for digest in hashes)]) + "\n"


def _locked_torch(path: Path, version: str) -> str:
    """The entry of torch's CPU build, from the lock file at `path` if it has that version."""
    known = path.read_text("utf-8") if path.exists() else ""
    for entry in entries(known):
        if entry.startswith(f"torch=={version} "):
            return entry
    with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=60) as page:
        return cpu_torch(page.read().decode(), version)


def write(name: str, upgrade: bool) -> None:
    """Write the lock file `name`.

    Raises LockError or CalledProcessError if it cannot be resolved.
    """
    path = LOCKS / f"{name}.txt"
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    given = "\n".join(locked_requirements(name, pyproject))
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    pinned = re.search(r"^torch==(\S+)$", constraints, re.M)
    if pinned is None:
        raise LockError("constraints.txt does not pin torch")
    torch = _locked_torch(path, pinned[1]) if name.endswith("cpu") else ""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "-o", str(path), "-q"]
    command += ["--universal", "--python-version", "3.11", "--no-config", "--generate-hashes"]
    command += ["--no-annotate", "--no-header", "-c", str(ROOT / "constraints.txt")]
    if upgrade:
        command.append("--upgrade")
    subprocess.run(command, input=given, text=True, check=True)
    resolved = path.read_text("utf-8")
    if torch:
        resolved = on_cpus(resolved, torch)
    head = "# Written by `make locks` (deploy/tools/image_locks.py).\n"
    path.write_text(head + resolved, "utf-8")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="Write the lock files of the images.")
    parser.add_argument("--upgrade", action="store_true", help="Take the newest allowed versions.")
    arguments = parser.parse_args()
    LOCKS.mkdir(exist_ok=True)
    for name in (*EXTRAS, "build"):
        try:
            write(name, arguments.upgrade)
        except (LockError, OSError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"{name}: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
