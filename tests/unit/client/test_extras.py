"""Installations without some of the optional packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from outrider.errors import NotFoundError
from outrider.extras import explain_missing_packages
from tests.fakes.missing import without

ROOT = Path(__file__).resolve().parents[3]

Ended: TypeAlias = "subprocess.CompletedProcess[str]"
RunWithout: TypeAlias = "Callable[..., Ended]"


@pytest.fixture
def run_without(tmp_path: Path) -> RunWithout:
    """Run `python -m ARGUMENTS` where packages are not installed."""

    def run(packages: set[str], *arguments: str) -> Ended:
        (tmp_path / "sitecustomize.py").write_text(without(packages))
        places = (str(tmp_path), str(ROOT / "benchmarks"), str(ROOT / "deploy" / "ray"))
        path = os.pathsep.join((*places, os.environ.get("PYTHONPATH", "")))
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            env=dict(os.environ, PYTHONPATH=path),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120.0,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("name", "flag"),
    [("serve", "--placement"), ("local", "--draft-top-k"), ("exchange", "--transports")],
)
def test_benchmarks_of_a_cpu_need_no_triton(run_without: RunWithout, name: str, flag: str) -> None:
    ended = run_without({"triton", "ray"}, "outrider_bench", name, "--help")
    assert ended.returncode == 0 and flag in ended.stdout


def test_a_benchmark_says_which_package_it_needs(run_without: RunWithout) -> None:
    ended = run_without({"triton"}, "outrider_bench", "host")
    assert ended.returncode == 1
    assert ended.stderr.strip() == (
        "outrider bench: host needs the package triton: pip install 'outrider[engine]'"
    )


@pytest.mark.parametrize("arguments", [("status",), ("--methods", "none", "--model", "tiny")])
def test_ray_as_a_runtime_says_that_ray_is_missing(
    run_without: RunWithout, arguments: tuple[str, ...]
) -> None:
    ended = run_without({"ray"}, "outrider_ray", *arguments)
    assert ended.returncode == 2
    assert "needs the package ray: pip install 'outrider[ray]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_module_that_is_missing_by_our_fault_is_no_advice() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match="outrider_nowhere"),
        explain_missing_packages("this"),
    ):
        __import__("outrider_nowhere")
    says = r"this needs the package triton: .*outrider\[engine\]"
    with pytest.raises(NotFoundError, match=says), explain_missing_packages("this"):
        raise ModuleNotFoundError(name="triton.language")
