"""Installs the browser that tests of the status page use, from the distribution's packages.

    python tools/fetch_browser.py

Exits with 0 if a browser is there then, with 1 and a line that says why if none can be installed:
no root, no apt-get, no package, or no mirror in time. Those tests are skipped, visibly, without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

BROWSERS: Final = (
    "chromium-headless-shell",
    "chromium",
    "google-chrome-stable",
    "google-chrome",
)
"""Programs that the tests can drive, best first."""
PACKAGES: Final = ("chromium-headless-shell", "chromium")
"""Debian's packages with such a program, the smallest first."""
DOWNLOAD_S: Final = 40.0
"""Time in seconds in which the packages must be there. A download can be stopped at any time."""
UNPACK_S: Final = 50.0
"""Time in seconds after which installing downloaded packages counts as hung. It takes 10 to 30 s on
two cores, and dpkg should not be stopped on its way.
"""
_OPTIONS: Final = (
    *("-q", "-y", "--no-install-recommends"),
    *("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15"),
    *("-o", "DPkg::Lock::Timeout=10", "-o", "Dpkg::Use-Pty=0"),
)


class UnavailableError(Exception):
    """No browser can be installed; says why."""


def find_browser() -> str | None:
    """Return the path of a browser that the tests can drive, or None if there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def install() -> None:
    """Install a browser with apt-get. Raises UnavailableError."""
    if shutil.which("apt-get") is None:
        raise UnavailableError("there is no apt-get to install Chromium with")
    if os.geteuid() != 0:
        raise UnavailableError("only root may install packages: apt-get install chromium")
    until = time.monotonic() + DOWNLOAD_S
    try:
        package = _download(until)
    except UnavailableError:
        # The lists of packages are missing, or too old for what the mirror has.
        _apt(["update"], until)
        package = _download(until)
    _apt(["install", "--no-download", package], time.monotonic() + UNPACK_S)
    if find_browser() is None:
        raise UnavailableError(f"the package {package} has none of {', '.join(BROWSERS)}")


def _download(until: float) -> str:
    """Download the first package that there is, and return its name. Raises UnavailableError."""
    reasons = []
    for package in PACKAGES:
        try:
            _apt(["install", "--download-only", package], until)
        except UnavailableError as error:
            reasons.append(str(error))
        else:
            return package
    raise UnavailableError("; ".join(reasons))


def _apt(arguments: Sequence[str], until: float) -> None:
    """Run apt-get until a time of the monotonic clock at most. Raises UnavailableError."""
    command = ["apt-get", arguments[0], *_OPTIONS, *arguments[1:]]
    what = " ".join(["apt-get", *arguments])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            timeout=max(0.0, until - time.monotonic()),
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{what} took too long") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise UnavailableError(f"{what} failed: {said[-1] if said else done.returncode}")


def main() -> int:
    """Install a browser if there is none, and return the exit status."""
    if find_browser() is not None:
        return 0
    try:
        install()
    except (UnavailableError, OSError) as error:
        sys.stderr.write(f"no browser for the tests of the status page: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
