"""The Helm chart, rendered with the values of a case or with settings."""

from __future__ import annotations

import subprocess
from functools import cache

from tests.unit.deploy.manifests import Document
from tests.unit.deploy.support import ROOT, TOOL_S, parse, tool

HELM = ROOT / "deploy" / "helm"
CHART = HELM / "outrider"
CASES = ["", *sorted(path.stem for path in HELM.glob("cases/*.yaml"))]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [tool("helm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S)


def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    return helm("template", "demo", str(CHART), "--namespace", "team", *arguments)


@cache
def rendered(case: str) -> str:
    values = ("--values", str(HELM / "cases" / f"{case}.yaml")) if case else ()
    result = template(*values)
    assert result.returncode == 0, result.stderr
    return result.stdout


def documents(case: str) -> list[Document]:
    """What is applied with the values of a case, and what these say is there already."""
    there = [_named("PersistentVolumeClaim", "weights")] if case in ("gpu", "pairs") else []
    return parse(rendered(case)) + there


def _named(kind: str, name: str) -> Document:
    return {"kind": kind, "metadata": {"name": name, "namespace": "team"}}
