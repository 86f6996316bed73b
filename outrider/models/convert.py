"""Converts a GGUF file to a Hugging Face directory, with weights, configuration and tokenizer.

Run this module as `python -m outrider.models.convert FILE.gguf DIRECTORY`. It writes a line
`[done, total]` to stdout after each tensor. The dequantised weights are stored exactly, which needs
float32: the product of a scale of 11 bits and a quantised value of 4 to 8 bits, plus an offset, has
too many bits for float16 and bfloat16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.gguf import GGUFSource, open_gguf
from outrider.errors import OutriderError
from outrider.models.gguf_tokenizer import write_tokenizer


def convert(source: Path, target: Path) -> None:
    """Convert the model in the GGUF file `source`, and write it into the existing directory
    `target`."""
    file = open_gguf(source)
    config = hf_config(file.config)
    _write_json(target / "config.json", config)
    names = ("bos_token_id", "eos_token_id")
    _write_json(
        target / "generation_config.json", {str(n): config[n] for n in names if n in config}
    )
    write_tokenizer(file.metadata, target)
    _write_weights(file, target / "model.safetensors")


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of a `config.json` for `config`. `load_model_config` reads the same
    `config` from it."""
    names = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    result: dict[str, Any] = {
        "architectures": [names[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "float32",
    }
    if config.architecture in ("llama", "qwen3"):
        result["attention_bias"] = config.qkv_bias
    if config.rope_scaling is not None:
        result["rope_scaling"] = dict(config.rope_scaling)
    if config.sliding_window is not None or config.architecture == "mistral":
        result["sliding_window"] = config.sliding_window
    if config.bos_id is not None:
        result["bos_token_id"] = config.bos_id
    if config.eos_ids:
        eos = list(config.eos_ids)
        result["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    return result


def _write_weights(file: GGUFSource, target: Path) -> None:
    names = file.names()
    tensors = {}
    for done, name in enumerate(names, start=1):
        tensors[name] = file.get(name).contiguous()
        sys.stdout.write(f"[{done}, {len(names)}]\n")
        sys.stdout.flush()
    save_file(tensors, target, metadata={"format": "pt"})
    target.chmod(0o644)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Convert the GGUF file `arguments[0]` into the directory `arguments[1]`. Returns the exit
    status: 0, or 1 if the file cannot be converted, with the reason on stderr."""
    try:
        convert(Path(arguments[0]), Path(arguments[1]))
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
