"""The programs that check manifests, and the processes' reading of what is in them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from outrider.config.loader import parse_config
from outrider.config.process_registry import PROCESSES
from tests.unit.deploy.manifests import Document, config_of, pods

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = "1.37"
TOOL_S = 300
"""Longest run of a program, on a machine that has much else to do."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def tool(name: str) -> str:
    """A program of the development environment; the test is skipped without it."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def load(name: str) -> ModuleType:
    """A program of deploy/tools."""
    path = ROOT / "deploy" / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(text: str) -> list[Document]:
    """The documents of a file of YAML."""
    return [document for document in yaml.load_all(text, _LOADER) if document]


def configs_of(documents: list[Document], directory: Path) -> dict[str, Any]:
    """The configuration of every process, read from its ConfigMap and flags as it would itself."""
    configs = {}
    for pod in pods(documents):
        for role, container in pod.processes():
            file = directory / f"{role}.toml"
            file.write_text(config_of(documents, pod, container), "utf-8")
            arguments = [a.replace("$(POD_NAME)", "pod-0") for a in container["args"]]
            arguments[arguments.index("--config") + 1] = str(file)
            process = PROCESSES[role]
            configs[role] = parse_config(process.config, process.parser, arguments, role).config
    return configs


def dockerfile_of(role: str) -> Path:
    """What the image of a process, or of "ray", is built from."""
    own = [ROOT / role / "Dockerfile", ROOT / "deploy" / role / "Dockerfile"]
    return next((file for file in own if file.exists()), ROOT / "deploy" / "engine.Dockerfile")


def stages_of(role: str) -> str:
    """The stages of a Dockerfile that the image of a process is of; its own is the last one."""
    text = dockerfile_of(role).read_text("utf-8")
    head, *stages = re.split(r"^(?=FROM )", text, flags=re.M)
    others = tuple(f" AS {other}" for other in PROCESSES if other != role)
    return head + "".join(s for s in stages if not s.splitlines()[0].endswith(others))
