"""Configuration of a verifier: its flags, and what is out of range."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from outrider_verifier.__main__ import parse_args
from outrider_verifier.config import VerifierConfig
from outrider_verifier.model_runner.gpu_runner.shape_family import shape_family_for

from outrider.config import load_config
from outrider.engine.device.graphs.shapes import DraftKind
from outrider.errors import InvalidRequestError


def test_flags_of_the_verifier_fill_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "verifier.toml"
    file.write_text('model = "m"\nkv_tokens = 100\n')
    config = parse_args(["--config", str(file), "--kv-tokens", "200", "--verifier-id", "v7"])
    assert (config.model, config.kv_tokens, config.verifier_id) == ("m", 200, "v7")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int8"},
        {"log_level": "LOUD"},
        {"kv_tokens": -1},
        {"heartbeat_ms": 5000},
        {"metrics_port": 70000},
        {"placement": "elsewhere"},
        {"placement": "fused"},
        {"placement": "colocated", "feature_head": ""},
        {"placement": "fused", "feature_head": "h", "draft_length": 20, "max_tree_nodes": 16},
        {"draft_length": 0},
        {"draft_length": 65},
        {"draft_top_k": 0},
        {"draft_top_k": 4, "simulated_acceptance": "2.0"},
        {"batch_wait_ms": -2},
        {"batch_wait_ms": -0.5},
        {"memory_fraction": 0.0},
        {"memory_fraction": 1.1},
        {"simulated_acceptance": "often"},
        {"simulated_acceptance": "0.9"},
        {"simulated_acceptance": "5.1"},
        {"simulated_acceptance": "0.5,0.5"},
        {"simulated_acceptance": "0.5,0.5,1.5"},
        {"simulated_acceptance": "nan"},
        {"batch_invariant": True, "placement": "fused", "feature_head": "h"},
        {"batch_invariant": True, "device_exchange": "on", "feature_head": "h"},
    ],
)
def test_a_verifier_configuration_out_of_range_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        load_config(VerifierConfig, None, changes)


@pytest.mark.parametrize(
    "changes", [{}, {"device": "cuda", "placement": "fused", "feature_head": "h"}]
)
def test_batch_invariance_is_for_gpus_and_for_cpus_without_a_head(
    changes: dict[str, object],
) -> None:
    assert load_config(VerifierConfig, None, {"batch_invariant": True, **changes}).batch_invariant


@pytest.mark.parametrize(
    ("settings", "seconds", "rounds"),
    [
        ({}, 0.0, 2.0),
        ({"device": "cuda"}, 0.005, 0.0),
        ({"device": "cuda:1", "batch_wait_ms": -1}, 0.005, 0.0),
        ({"device": "cuda:1", "batch_wait_ms": 2}, 0.002, 0.0),
        ({"batch_wait_ms": 0}, 0.0, 0.0),
        ({"batch_wait_ms": 2}, 0.002, 0.0),
    ],
)
def test_how_long_rows_are_gathered_follows_the_device(
    settings: dict[str, object], seconds: float, rounds: float
) -> None:
    config = load_config(VerifierConfig, None, settings)
    assert (config.batch_wait_s, config.batch_wait_rounds) == (seconds, rounds)


def test_flags_place_the_head_and_simulate() -> None:
    flags = "--model m --feature-head h --placement fused --draft-length 5 --no-cuda-graphs"
    config = parse_args([*flags.split(), "--simulated-acceptance", "3.2"])
    assert (config.placement, config.draft_length, config.has_in_process_drafter) == (
        "fused",
        5,
        True,
    )
    assert not config.cuda_graphs
    assert len(config.simulated_rates) == 5
    plain = parse_args(["--model", "m"])
    assert plain.cuda_graphs and not plain.has_in_process_drafter and plain.simulated_rates == ()
    separate = parse_args(["--model", "m", "--simulated-acceptance", "0.8,0.6,0.4,0.2"])
    assert separate.simulated_rates == (0.8, 0.6, 0.4, 0.2)
    scheduled = parse_args(["--model", "m", "--simulated-acceptance", "length:3.5"])
    assert (scheduled.simulated_length, scheduled.simulated_rates) == (3.5, ())


def test_parsing_flags_imports_no_torch() -> None:
    code = (
        "import sys; from outrider_verifier.__main__ import parse_args; "
        "parse_args(['--model', 'm']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_where_it_is_simulated_what_stands_no_shape_is_of_trees() -> None:
    settings: dict[str, Any] = {"placement": "fused", "feature_head": "h", "draft_length": 3}
    simulated = VerifierConfig(model="m", simulated_acceptance="2.6", **settings)
    usual = VerifierConfig(model="m", **settings)
    found = [
        {
            shape.draft_kind
            for shape in shape_family_for(config, in_process_nodes=4, features=False).all_shapes()
        }
        for config in (simulated, usual)
    ]
    assert found == [{DraftKind.NONE, DraftKind.IN_PROCESS}, set(DraftKind)]
