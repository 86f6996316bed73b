"""Options shared by all suites."""

from __future__ import annotations

import pytest

TRANSPORTS = ("inproc", "grpc", "ray")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        default="inproc,grpc",
        help=f"comma-separated transports that transport-agnostic tests run over: {TRANSPORTS}",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take `transport_name`, themselves or by a fixture, run once per transport."""
    if "transport_name" in metafunc.fixturenames:
        names = metafunc.config.getoption("--transport").split(",")
        unknown = set(names) - set(TRANSPORTS)
        if unknown:
            raise pytest.UsageError(f"--transport: unknown {sorted(unknown)}, know {TRANSPORTS}")
        metafunc.parametrize("transport_name", names, scope="session")
