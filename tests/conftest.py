"""Options shared by all suites."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from tests.integration.stack import Stack, StackOptions

if not torch.cuda.is_available():
    # Read by Triton when a kernel is defined: without a device, kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# No test is timed: a machine that does something else as well fails none.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

pytest_plugins = ("tests.compiled", "tests.interpreter")

TRANSPORTS = ("inproc", "grpc", "shm", "ray")
"""shm: gRPC where streams of sessions go through shared memory."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        default="inproc,grpc",
        help=f"comma-separated transports that transport-agnostic tests run over: {TRANSPORTS}",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also what is marked thorough: the rest of the grids whose corners run every time",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked thorough, unless asked for; pytest counts it as deselected."""
    if config.getoption("--thorough"):
        return
    rest = [item for item in items if item.get_closest_marker("thorough") is not None]
    if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if item.get_closest_marker("thorough") is None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `transport_name`, themselves or by a fixture, run once per transport."""
    if "transport_name" in metafunc.fixturenames:
        names = metafunc.config.getoption("--transport").split(",")
        unknown = set(names) - set(TRANSPORTS)
        if unknown:
            raise pytest.UsageError(f"--transport: unknown {sorted(unknown)}, know {TRANSPORTS}")
        metafunc.parametrize("transport_name", names, scope="session")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target checkpoint."""
    from tests.factories import make_target

    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random EAGLE-3 head for it."""
    from tests.factories import make_eagle3_head

    return make_eagle3_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    """What the module's processes are told; for modules to override."""
    return {"router": ["--metrics-port", "0"]}


@pytest.fixture(scope="module")
def survivor(
    tiny_target: Path,
    tiny_head: Path,
    tmp_path_factory: pytest.TempPathFactory,
    stack_options: StackOptions,
) -> Iterator[Stack]:
    """The processes of a module, which live through all of its tests."""
    from tests.integration.stack import Stack

    directory = tmp_path_factory.mktemp("stack")
    with Stack(directory, model=str(tiny_target), head=str(tiny_head), **stack_options) as running:
        yield running
