"""A tiny GGUF model with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["\u010a \u010a", "1 2", "a n", "an d"]
CHAT_TEMPLATE = "{{ messages }}"
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 16, 24, 4, 2, 2


def byte_alphabet() -> list[str]:
    """The 256 characters with which a byte-level tokenizer writes bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def tokenizer_metadata(style: str) -> dict[str, Any]:
    """The tokenizer's part of a GGUF's metadata."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIALS, *byte_alphabet(), *merged]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": style,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_tiny_gguf(path: Path) -> None:
    """Write a two-layer Llama with random float32 weights."""
    metadata = tokenizer_metadata("smollm")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip
    random = np.random.default_rng(5)
    vocab = len(metadata["tokenizer.ggml.tokens"])
    everything = {"token_embd": (vocab, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        everything |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
    for name, shape in everything.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
