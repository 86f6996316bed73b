"""Tiny random checkpoints in the usual formats, for tests of output distributions and of faults."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "Drafts ride ahead and the target decides which tokens stand.",
    "Zwei Prozesse, ein Text: \u00e4\u00f6\u00fc\u00df, \u65e5\u672c\u8a9e, \U0001f680.",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
]


def make_tokenizer(directory: Path, vocab_size: int = 384) -> Tokenizer:
    """Write a byte-level BPE tokenizer with the special tokens of ChatML to a directory, in the
    layout of the Hugging Face hub, and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return tokenizer


def make_target(
    directory: Path, *, seed: int = 0, hidden: int = 64, layers: int = 6, vocab_size: int = 384
) -> Path:
    """Write a random Llama checkpoint (weights, config.json and tokenizer files) to a directory and
    return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(directory, vocab_size)
    heads, kv_heads, inner = 4, 2, 2 * hidden
    head_dim = hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, generator=generator)
        return values.mul_(scale / shape[-1] ** 0.5)

    tensors = {"model.embed_tokens.weight": weight(vocab_size, hidden, scale=3.0)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = weight(vocab_size, hidden, scale=3.0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
            prefix + "self_attn.q_proj.weight": weight(heads * head_dim, hidden, scale=2.0),
            prefix + "self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden, scale=2.0),
            prefix + "self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": weight(hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": weight(inner, hidden),
            prefix + "mlp.up_proj.weight": weight(inner, hidden),
            prefix + "mlp.down_proj.weight": weight(hidden, inner),
        }
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_eagle3_head(
    directory: Path,
    *,
    target_layers: int = 6,
    hidden: int = 64,
    vocab_size: int = 384,
    seed: int = 1,
) -> Path:
    """Write a random EAGLE-3 head in its original format to a directory and return the directory.
    The draft vocabulary has two thirds of the target's tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    heads, kv_heads, inner = 4, 2, 2 * hidden
    head_dim = hidden // heads
    draft_vocab = vocab_size * 2 // 3
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, generator=generator)
        return values.div_(shape[-1] ** 0.5)

    kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[kept] = True
    block = "midlayer."
    tensors = {
        "fc.weight": weight(hidden, 3 * hidden),
        block + "hidden_norm.weight": torch.ones(hidden),
        block + "input_layernorm.weight": torch.ones(hidden),
        block + "post_attention_layernorm.weight": torch.ones(hidden),
        block + "self_attn.q_proj.weight": weight(heads * head_dim, 2 * hidden),
        block + "self_attn.k_proj.weight": weight(kv_heads * head_dim, 2 * hidden),
        block + "self_attn.v_proj.weight": weight(kv_heads * head_dim, 2 * hidden),
        block + "self_attn.o_proj.weight": weight(hidden, heads * head_dim),
        block + "mlp.gate_proj.weight": weight(inner, hidden),
        block + "mlp.up_proj.weight": weight(inner, hidden),
        block + "mlp.down_proj.weight": weight(hidden, inner),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(draft_vocab, hidden) * 3.0,
        "d2t": kept - torch.arange(draft_vocab),
        "t2d": member,
    }
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, target_layers // 2 - 1, target_layers - 4]
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
