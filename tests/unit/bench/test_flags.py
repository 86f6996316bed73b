"""Every benchmark that starts services can do so by its own flags alone."""

from __future__ import annotations

import argparse
from importlib import import_module

import pytest
from outrider_bench.models import local_config


@pytest.mark.parametrize(
    "name", ["quality.acceptance", "faults.overload", "quality.lossless", "decoding_methods"]
)
def test_the_flags_say_what_is_started(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    import_module(f"outrider_bench.{name}").add_arguments(parser)
    config = local_config(parser.parse_args([]))
    assert config.device == "cpu"
    assert config.placement == "separate"
