"""Long prompts are distinct from their beginning on, and as long as they are said to be."""

from __future__ import annotations

from outrider_bench.long_prompts import make_prompt
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["[UNK]", "Collection", ".", "one", "two", "three"]


def tokenizer() -> Tokenizer:
    """A token a word."""
    found = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, "[UNK]")
    )
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return found


def test_long_prompts_differ_and_have_their_length() -> None:
    texts = ["one two three", "three one", "two two one"]
    prompts = [make_prompt(tokenizer(), texts, number, 200) for number in range(4)]
    assert len(set(prompts)) == 4
    for prompt in prompts:
        assert abs(len(tokenizer().encode(prompt).ids) - 200) <= 2
