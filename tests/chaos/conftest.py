"""The stack of the chaos tests: one for all faults of a module, repaired after each."""

from __future__ import annotations

import pytest

from tests.integration.stack import Stack, StackOptions, slow_rounds


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {
        "router": ["--metrics-port", "0", "--queue-limit", "16"],
        # Requests last long enough for a fault, and for what follows it.
        "verifier": ["--max-sessions", "8", *slow_rounds(12)],
    }


@pytest.fixture
def stack(survivor: Stack) -> Stack:
    """What lives through every fault of its module must be as good as new after each."""
    survivor.repair()
    return survivor
