"""Long prompts for `outrider bench serve --prompts`: distinct texts of a stated number of tokens.

    python -m outrider_bench.long_prompts --tokens 3300 --count 128 --out cold.jsonl
    python -m outrider_bench.long_prompts --tokens 3300 --count 8 --out cached.jsonl

If there are as many prompts as a wave has requests (`--waves 1`), the prefix cache contains none of
them. If there are 8 prompts, the prefix cache contains all of them from the second wave on. Each
text has its own first line, the bundled prompts in its own order, and a question at the end.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from outrider.client.local.model_files import DEFAULT_MODEL, find_model
from outrider_bench.prompts import load_prompts

_QUESTION: Final = "\n\nWhich of these questions is the hardest one? Say why, in a few sentences."


def make_prompt(tokenizer: Tokenizer, texts: list[str], number: int, tokens: int) -> str:
    """Return text number `number`, with about `tokens` tokens. The number of tokens is not exact,
    because a cut text may be tokenized differently and a chat template adds tokens."""
    order = random.Random(number)
    parts = [f"Collection {number}."]
    end = tokenizer.encode(_QUESTION, add_special_tokens=False).ids
    while True:
        parts += order.sample(texts, len(texts))
        ids = tokenizer.encode("\n\n".join(parts), add_special_tokens=False).ids
        if len(ids) + len(end) >= tokens:
            kept: str = tokenizer.decode(ids[: max(tokens - len(end), 1)])
            return kept + _QUESTION


def main() -> None:
    """Write the prompts to the file that --out names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3300, help="of a prompt; default: 3300")
    parser.add_argument("--count", type=int, default=8, help="prompts; default: 8")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokens are counted")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(find_model(args.model).path / "tokenizer.json"))
    texts = [prompt.text for prompt in load_prompts()]
    prompts = (make_prompt(tokenizer, texts, at, args.tokens) for at in range(args.count))
    lines = (json.dumps({"task": "long", "prompt": prompt}) for prompt in prompts)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
