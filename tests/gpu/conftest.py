"""The device of all tests here; without one they are skipped."""

from __future__ import annotations

import os

import pytest
import torch

# As drafters do; see `outrider_drafter.server.build.build_service`.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)
