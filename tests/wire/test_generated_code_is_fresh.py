"""The committed generated code is what the contract and the pinned generator produce."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "outrider" / "wire" / "v1"


def generated(directory: Path) -> dict[str, str]:
    return {
        path.name: path.read_text()
        for path in directory.iterdir()
        if path.suffix in {".py", ".pyi"} and path.name != "__init__.py"
    }


def test_committed_code_equals_regenerated_code(tmp_path: Path) -> None:
    script = ROOT / "proto" / "generate.sh"
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(["sh", str(script), str(tmp_path)], check=True, env=environment)
    fresh = generated(tmp_path / "outrider" / "wire" / "v1")
    assert len(fresh) == 15
    assert generated(GENERATED) == fresh, "run `make proto` and commit the result"


def test_the_contract_is_clean_under_buf() -> None:
    buf = Path(sys.executable).parent / "buf"
    if not buf.exists():
        pytest.fail("buf is missing: it comes with the `dev` extra (buf-bin)")
    result = subprocess.run([buf, "lint", ROOT / "proto"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
