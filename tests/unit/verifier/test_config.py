"""Configuration: a TOML file, then flags; mistakes are named."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from outrider_verifier.__main__ import parse_args
from outrider_verifier.config import VerifierConfig

from outrider.config import load_config
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.ids import VerifierId
from outrider.spec.plan import DraftMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A table."""

    size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Every kind of field."""

    name: VerifierId
    ratio: float = 0.5
    limit: int | None = None
    methods: tuple[DraftMethod, ...] = ()
    folder: Path = Path()
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.ratio > 1.0:
            raise ValueError("ratio must be at most 1")


def load(tmp_path: Path, text: str, **overrides: object) -> Outer:
    """Load from a file with this text."""
    file = tmp_path / "config.toml"
    file.write_text(text)
    return load_config(Outer, file, overrides)


def test_values_of_the_file_get_the_types_of_the_fields(tmp_path: Path) -> None:
    text = 'name = "v"\nratio = 1\nmethods = ["ngram"]\nfolder = "/x"\n[inner]\nsize = 3\n'
    expected = Outer(
        name=VerifierId("v"),
        ratio=1.0,
        methods=(DraftMethod.NGRAM,),
        folder=Path("/x"),
        inner=Inner(size=3),
    )
    assert load(tmp_path, text) == expected


def test_a_flag_wins_over_the_file_and_one_that_is_not_given_does_not(tmp_path: Path) -> None:
    config = load(tmp_path, 'name = "v"\nratio = 0.2\n', ratio=None, limit=4)
    assert (config.ratio, config.limit) == (0.2, 4)
    assert load_config(Outer, None, {"name": "v", "inner.size": 9}).inner.size == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "v"\nlimt = 3\n', "limit"),
        ('name = "v"\n[inner]\nsise = 3\n', "inner.size"),
        ("ratio = 0.5\n", "name"),
        ('name = "v"\nratio = 7\n', "ratio"),
        ('name = "v"\nlimit = "x"\n', "limit"),
        ('name = "v"\nlimit = true\n', "limit"),
        ('name = "v"\nmethods = ["guess"]\n', "guess"),
        ("name = ", "TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.toml"):
        load_config(Outer, tmp_path / "none.toml")


def test_flags_of_the_verifier_fill_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "verifier.toml"
    file.write_text('model = "m"\nkv_tokens = 100\n')
    config = parse_args(["--config", str(file), "--kv-tokens", "200", "--verifier-id", "v7"])
    assert (config.model, config.kv_tokens, config.verifier_id) == ("m", 200, "v7")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "int8"},
        {"kv_tokens": -1},
        {"heartbeat_ms": 5000},
        {"metrics_port": 70000},
        {"placement": "elsewhere"},
        {"placement": "fused"},
        {"placement": "colocated", "features_from": ""},
        {"placement": "fused", "features_from": "h", "draft_length": 20, "max_tree_nodes": 16},
        {"draft_length": 0},
        {"draft_length": 65},
        {"draft_topk": 0},
        {"draft_topk": 4, "simulated_acceptance": "2.0"},
        {"prompt_stretch": 0.9},
        {"gather_ms": -2},
        {"gather_ms": -0.5},
        {"memory_fraction": 0.0},
        {"memory_fraction": 1.1},
        {"simulated_acceptance": "often"},
        {"simulated_acceptance": "0.9"},
        {"simulated_acceptance": "4.1"},
        {"simulated_acceptance": "0.5,0.5"},
        {"simulated_acceptance": "0.5,0.5,1.5"},
        {"simulated_acceptance": "nan"},
    ],
)
def test_a_verifier_configuration_out_of_range_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        load_config(VerifierConfig, None, changes)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 0.001),
        ({"device": "cuda"}, 0.005),
        ({"device": "cuda:1", "gather_ms": -1}, 0.005),
        ({"device": "cuda:1", "gather_ms": 2}, 0.002),
        ({"gather_ms": 0}, 0.0),
    ],
)
def test_how_long_rows_are_gathered_follows_the_device(
    settings: dict[str, object], seconds: float
) -> None:
    assert load_config(VerifierConfig, None, settings).gather_s == seconds


def test_flags_place_the_head_and_simulate() -> None:
    flags = "--model m --features-from h --placement fused --draft-length 5 --no-cuda-graphs"
    config = parse_args([*flags.split(), "--simulated-acceptance", "3.2"])
    assert (config.placement, config.draft_length, config.drafts_itself) == ("fused", 5, True)
    assert not config.cuda_graphs
    assert len(config.simulated_rates) == 5
    plain = parse_args(["--model", "m"])
    assert plain.cuda_graphs and not plain.drafts_itself and plain.simulated_rates == ()
    separate = parse_args(["--model", "m", "--simulated-acceptance", "0.8,0.6,0.4"])
    assert separate.simulated_rates == (0.8, 0.6, 0.4)


def test_parsing_flags_imports_no_torch() -> None:
    code = (
        "import sys; from outrider_verifier.__main__ import parse_args; "
        "parse_args(['--model', 'm']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
