"""The device of all tests here; without one they are skipped."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)
