"""Small random checkpoints of every supported family, written by transformers."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.target import ForwardBatch, ForwardOutput, Segment, TargetModel

VOCAB = 97
LAYERS = 4
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 6}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
}


def write_checkpoint(family: str, path: Path, *, shard_size: str = "5GB") -> Any:
    """Write a random model with non-trivial norms and biases; returns the transformers model."""
    import transformers

    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**BASE, **changes})
    torch.manual_seed(hash_of(family))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                spread = 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * spread + (parameter.dim() == 1))
        model.save_pretrained(path, max_shard_size=shard_size)
    return model


def hash_of(text: str) -> int:
    """A seed that does not change between processes."""
    return zlib.crc32(text.encode())


def reference(model: Any, token_ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits [N, V] and hidden states of transformers for one sequence."""
    with torch.inference_mode():
        output = model(token_ids[None], output_hidden_states=True, use_cache=False)
    return output.logits[0], tuple(state[0] for state in output.hidden_states)


def random_ids(count: int, seed: int = 0) -> Tensor:
    """int64 [count], the same on every call."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def run(
    model: TargetModel,
    segments: Sequence[Segment],
    token_ids: Tensor,
    *,
    logit_rows: Tensor | None = None,
    tap_layers: tuple[int, ...] = (),
) -> ForwardOutput:
    """One forward."""
    batch = ForwardBatch(token_ids=token_ids, segments=segments, logit_rows=logit_rows)
    return model.forward(batch, tap_layers=tap_layers)


def chain(sequence: Any, count: int) -> Segment:
    """The next `count` tokens of a sequence."""
    positions = torch.arange(sequence.len, sequence.len + count)
    return Segment(sequence=sequence, num_rows=count, positions=positions)


def tree(sequence: Any, parents: Sequence[int]) -> Segment:
    """A root and the nodes of a draft tree; parents: the row of each row's parent, -1 for none."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    positions = sequence.len + mask.sum(1) - 1
    return Segment(sequence=sequence, num_rows=len(parents), positions=positions, mask=mask)


def feed(model: TargetModel, sequence: Any, token_ids: Tensor) -> Tensor:
    """Run and commit tokens one after another in one forward; returns logits [N, V]."""
    count = token_ids.shape[0]
    logits = run(model, [chain(sequence, count)], token_ids).logits
    sequence.commit(range(count))
    return logits


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of float32 sums taken in another order."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
