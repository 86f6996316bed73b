"""A router on one scripted verifier."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from outrider_router.requests.service import RouterService

from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier


@pytest.fixture
def verifier() -> FakeVerifier:
    return FakeVerifier()


@pytest.fixture
async def router(tmp_path: Path, verifier: FakeVerifier) -> AsyncGenerator[RouterService]:
    async with running_router(tmp_path, {"v": verifier}, queue_limit=2) as service:
        yield service
