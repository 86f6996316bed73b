"""The example configurations under deploy/ are read by the code that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
from outrider_drafter.config import DrafterConfig
from outrider_router.config import RouterConfig
from outrider_verifier.config import VerifierConfig

from outrider.config import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "deploy" / "configs"


@pytest.mark.parametrize(
    ("name", "cls"),
    [("router", RouterConfig), ("verifier", VerifierConfig), ("drafter", DrafterConfig)],
)
def test_an_example_configuration_is_valid(name: str, cls: type) -> None:
    config = load_config(cls, CONFIGS / f"{name}.toml")
    assert str(config.model) == "smollm2-135m"
    assert config.listen.startswith("0.0.0.0:")
