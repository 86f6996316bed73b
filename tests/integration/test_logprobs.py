"""Log-probabilities through real processes: what a client gets is what the target thinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.client import Client, user
from outrider.engine.model_loader import load_target
from outrider.engine.target import TargetModel
from outrider.text.tokenizer import Tokenizer
from tests.reference.logprobs import assert_the_targets_own

TURN = "Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5"
WAYS: dict[str, dict[str, object]] = {
    "plain": {"drafter": "none"},
    "chain": {"drafter": "eagle3", "draft_tokens": 4},
    "tree": {"drafter": "eagle3", "draft_tokens": 24, "draft_top_k": 4},
    "look-ahead": {"drafter": "eagle3", "draft_tokens": 4, "look_ahead": 1},
    "rejection": {"drafter": "eagle3", "temperature": 0.9, "seed": 3, "rule": "rejection"},
}


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> TargetModel:
    return load_target(tiny_target, kv_tokens=512, packed=False)


@pytest.mark.parametrize("way", WAYS)
def test_a_client_gets_what_the_target_thinks(
    way: str, client: Client, tiny_target: Path, target: TargetModel
) -> None:
    prompt = Tokenizer.load(tiny_target).encode_chat([{"role": "user", "content": TURN}])
    options: dict[str, object] = {"max_tokens": 40, "ignore_eos": True, "top_logprobs": 4}
    whole = client.generate([user(TURN)], **options, **WAYS[way])  # type: ignore[arg-type]
    assert_the_targets_own(target, prompt, whole.token_ids, whole.logprobs, 4)
    with client.stream([user(TURN)], **options, **WAYS[way]) as stream:  # type: ignore[arg-type]
        streamed = [entry for delta in stream for entry in delta.logprobs]
        assert_the_targets_own(target, prompt, stream.result().token_ids, streamed, 4)
