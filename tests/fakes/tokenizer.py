"""A byte-level tokenizer with ChatML specials, saved as the hub lays it out."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer_dir(directory: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json; one id a byte, after the specials."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    fast = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(SPECIALS)
    fast.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
