from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["in_process", "grpc", "ray"])
def test_a_transport_imports_neither_torch_nor_a_foreign_runtime(module: str) -> None:
    forbidden = {"in_process": ["torch", "ray", "grpc"], "grpc": ["torch", "ray"]}.get(
        module, ["torch", "ray"]
    )
    code = (
        f"import sys; import outrider.transport.{module}; "
        f"loaded = {set(forbidden)} & set(sys.modules); "
        "sys.exit(str(loaded) if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
