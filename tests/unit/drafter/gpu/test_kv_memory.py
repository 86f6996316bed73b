"""How much KV a small model gets where nobody says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider_drafter.config import DrafterConfig
from outrider_drafter.server.build import device_tokens, pool_tokens

from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.checkpoint import load_model_config
from outrider.spec.plan import DraftMethod
from tests.factories import make_target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(make_target(tmp_path_factory.mktemp("memory"), layers=1))


def config(device: str, tokens: int = 0, directory: Path = Path("m")) -> DrafterConfig:
    return DrafterConfig(
        device=device,
        methods=(DraftMethod.MODEL,),
        draft_model=str(directory),
        draft_model_kv_tokens=tokens,
    )


def test_what_is_asked_for_is_what_the_host_gets(model: ModelConfig) -> None:
    vocab = model.vocab_size
    assert pool_tokens(config("cpu"), vocab, model) == 16384
    assert pool_tokens(config("cpu", 50000), vocab, model) == 50000


def test_beside_a_device_the_host_gets_little(model: ModelConfig) -> None:
    vocab = model.vocab_size
    assert pool_tokens(config("cuda"), vocab, model) == 16384
    assert pool_tokens(config("cuda", 50000), vocab, model) == 16384
    assert pool_tokens(config("cuda", 1000), vocab, model) == 1000


def test_a_model_that_the_device_cannot_draft_with_has_it_all_on_the_host(
    model: ModelConfig,
) -> None:
    windowed = replace(model, sliding_window=64)
    assert pool_tokens(config("cuda", 50000), model.vocab_size, windowed) == 50000
    assert pool_tokens(config("cuda", 50000), model.vocab_size + 1, model) == 50000


def test_a_device_gives_half_of_what_is_free_up_to_a_bound() -> None:
    assert device_tokens(80 << 30, bytes_per_token=32 << 10) == 131072
    assert device_tokens(2 << 30, bytes_per_token=32 << 10) == 32768
