"""What the sources may do with bytes of others: no code comes in, and every port has one maker."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.private_access import PACKAGES as SERVING_PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (*SERVING_PACKAGES, "deploy/ray/outrider_ray")
RUNS_CODE = {
    "pickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
    "xmlrpc",
    # Its connections and managers pickle whatever they send.
    "multiprocessing",
}
"""Modules that make objects, and so can run code, out of bytes."""
CALLS = {"eval", "exec", "compile"}
MAKERS = {
    "add_insecure_port": {"outrider/transport/grpc/server.py"},
    "add_secure_port": {"outrider/transport/grpc/server.py"},
    "insecure_channel": {
        "outrider/transport/grpc/dialer.py",
        "outrider/client/connection.py",
        # The health port of a child on this machine.
        "outrider/client/local/health_probe.py",
    },
    "secure_channel": {"outrider/transport/grpc/dialer.py", "outrider/client/connection.py"},
    "start_http_server": set[str](),
    "make_wsgi_app": {"outrider/metrics_port.py"},
    # It asks whether a port is free: closed again, before anybody is accepted.
    "create_server": {"outrider/client/local/readiness.py"},
    # Of tests of faults, on loopback: bytes that it does not look at.
    "start_server": {"outrider/chaos/proxy.py"},
}
"""Functions that open ports or reach them, and the only files that may call them: there, whoever
calls is judged and TLS is not forgotten."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "/wire/v1/" not in str(path):
                name = str(path.relative_to(ROOT))
                yield name, ast.parse(path.read_text(encoding="utf-8"), name)


SOURCES = dict(sources())


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level packages that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """(what stands before the last dot, the name, the call)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name):
                    yield "", name, node
                case ast.Attribute(value=value, attr=name):
                    yield ast.unparse(value), name, node


def unsafe(tree: ast.AST) -> list[str]:
    """What a file does that could run code of whoever sent it bytes."""
    found = sorted(RUNS_CODE & set(imported(tree)))
    for owner, name, call in calls(tree):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in CALLS and not owner:
            found.append(name)
        if (owner, name) == ("torch", "load") and options.get("weights_only") != "True":
            found.append("torch.load")
        if name == "load" and options.get("allow_pickle") == "True":
            found.append("allow_pickle")
        if owner == "yaml" and name in ("load", "unsafe_load", "full_load"):
            found.append("yaml.load")
    return found


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 300
    assert {"outrider/transport/grpc/server.py", "router/outrider_router/api/listeners.py"} <= set(
        SOURCES
    )


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import multiprocessing.connection",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert unsafe(ast.parse(source))


def test_nothing_makes_objects_of_bytes_that_could_run_code() -> None:
    """Ray alone does, on ports of its own; nothing of ours unpickles for it."""
    found = {name: unsafe(tree) for name, tree in SOURCES.items()}
    assert {name: what for name, what in found.items() if what} == {}


def test_ray_is_imported_where_it_is_the_transport_alone() -> None:
    users = {name for name, tree in SOURCES.items() if "ray" in set(imported(tree))}
    allowed = ("outrider/transport/ray/", "deploy/ray/outrider_ray/")
    assert users and all(name.startswith(allowed) for name in users)


def test_ports_are_opened_and_dialled_by_the_code_that_knows_of_tls() -> None:
    found: dict[str, set[str]] = {name: set() for name in MAKERS}
    for file, tree in SOURCES.items():
        for _owner, name, _call in calls(tree):
            if name in found:
                found[name].add(file)
    assert found == MAKERS
