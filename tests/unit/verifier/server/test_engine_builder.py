"""What the engine's parts are built with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from outrider_verifier.config import VerifierConfig
from outrider_verifier.server.engine_builder import max_round_prompt_tokens

from outrider.wire.limits import MAX_MESSAGE_BYTES


@pytest.mark.parametrize(("hidden_size", "tokens"), [(1024, 2048), (1 << 15, 256)])
def test_features_of_the_prompts_of_a_round_fit_half_a_message(
    hidden_size: int, tokens: int
) -> None:
    config = VerifierConfig(model="m", prefill_tokens_per_round=2048, dtype="float32")
    projection: Any = SimpleNamespace(hidden_size=hidden_size)
    assert max_round_prompt_tokens(config, projection) == tokens
    assert tokens * hidden_size * 4 <= MAX_MESSAGE_BYTES // 2
    assert max_round_prompt_tokens(config, None) == 2048
