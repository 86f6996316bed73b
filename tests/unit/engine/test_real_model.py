"""SmolLM2-135M itself against transformers; pulls the model when it is not in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.model_loader import load_target
from outrider.engine.target import FINAL_NORM, Segment
from outrider.models import pull_model
from tests.unit.engine.checkpoints import chain, feed, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = "<|im_start|>user\nName three rivers.\n\n1.<|im_end|>\n<|im_start|>assistant\n"
TAPS = (1, 14, 26, FINAL_NORM)


@pytest.fixture(scope="module")
def path() -> Path:
    return pull_model("smollm2-135m")


@pytest.fixture(scope="module")
def prompt_ids(path: Path) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(path / "tokenizer.json")).encode(PROMPT).ids
    return ids


@pytest.mark.filterwarnings("ignore")
def test_logits_taps_and_greedy_text_are_those_of_transformers(
    path: Path, prompt_ids: list[int]
) -> None:
    import transformers

    expected_model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        expected = expected_model(ids, output_hidden_states=True)
    target = load_target(path, kv_tokens=256)
    sequence = target.pool.allocate(128)
    output = run(target, [chain(sequence, len(prompt_ids))], ids[0], tap_layers=TAPS)
    torch.testing.assert_close(output.logits, expected.logits[0], rtol=1e-4, atol=1e-3)
    assert output.taps is not None
    states = [expected.hidden_states[i][0] for i in (2, 15, 27, -1)]
    for tap, state in zip(output.taps.chunk(len(TAPS), dim=-1), states, strict=True):
        torch.testing.assert_close(tap, state, rtol=1e-4, atol=0.02)
    sequence.commit(range(len(prompt_ids)))
    generated = [int(output.logits[-1].argmax())]
    while len(generated) < 32:
        generated.append(int(feed(target, sequence, torch.tensor(generated[-1:])).argmax()))
    answer = expected_model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False)
    assert answer[0, len(prompt_ids) :].tolist() == generated


def test_verifying_a_chain_chooses_what_decoding_one_by_one_chooses(
    path: Path, prompt_ids: list[int]
) -> None:
    target = load_target(path, kv_tokens=512)
    plain, verified = target.pool.allocate(128), target.pool.allocate(128)
    last = feed(target, plain, torch.tensor(prompt_ids))[-1]
    feed(target, verified, torch.tensor(prompt_ids))
    tokens = [int(last.argmax())]
    rows = []
    for _ in range(24):
        rows.append(feed(target, plain, torch.tensor(tokens[-1:]))[0])
        tokens.append(int(rows[-1].argmax()))
    for start in range(0, 24, 6):
        segment = Segment(
            sequence=verified,
            num_rows=6,
            positions=torch.arange(verified.len, verified.len + 6),
            mask=torch.ones((6, 6), dtype=torch.bool).tril(),
        )
        logits = run(target, [segment], torch.tensor(tokens[start : start + 6])).logits
        verified.commit(range(6))
        expected = torch.stack(rows[start : start + 6])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
        assert logits.argmax(dim=-1).tolist() == tokens[start + 1 : start + 7]
