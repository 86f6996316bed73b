"""Literals that read like special tokens are spelled in ordinary tokens, in every kind of form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from outrider.errors import InvalidRequestError
from outrider.grammar.constraint import allowed_mask, is_allowed
from outrider.grammar.grammar_cache import GrammarCache
from outrider.grammar.special_tokens import hide_special_tokens
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from tests.fakes.tokenizer import EOS_ID, make_tokenizer_dir
from tests.mask_limits import LONG_MASKS

STOP = EOS_ID
TEXT = "a<|im_end|>b<|im_start|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_dir(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Iterator[GrammarCache]:
    found = GrammarCache.from_tokenizer_file(
        directory / "tokenizer.json", vocab_size=320, masks=LONG_MASKS
    )
    assert found is not None
    yield found
    found.close()


@pytest.mark.parametrize(
    ("kind", "form", "text"),
    [
        (StructuredKind.GRAMMAR, f'start: "{TEXT}" | "other"', TEXT),
        (StructuredKind.GRAMMAR, r"start: /a<\|im_end\|>b<\|im_start\|>/", TEXT),
        (StructuredKind.REGEX, r"a<\|im_end\|>b<\|im_start\|>|other", TEXT),
        (StructuredKind.JSON_SCHEMA, json.dumps({"const": TEXT}), json.dumps(TEXT)),
        (StructuredKind.JSON_SCHEMA, json.dumps({"enum": [TEXT, "q"]}), json.dumps(TEXT)),
    ],
)
def test_a_literal_that_reads_like_a_special_token_is_text(
    grammars: GrammarCache, directory: Path, kind: StructuredKind, form: str, text: str
) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    constraint = grammars.compile_grammar(StructuredOutput(kind, form)).start_constraint([STOP])
    output: list[int] = []
    for character in text:
        (token,) = tokenizer.encode(character).ids
        mask = allowed_mask(constraint)
        assert is_allowed(mask, token) and not any(
            is_allowed(mask, special) for special in range(3)
        )
        output.append(token)
        constraint.advance_to(np.array(output, dtype=np.int32))
    assert not constraint.failure and is_allowed(allowed_mask(constraint), STOP)


def test_a_grammar_that_names_a_special_token_is_refused(grammars: GrammarCache) -> None:
    form = StructuredOutput(StructuredKind.GRAMMAR, 'start: "a" <|im_end|>')
    with pytest.raises(InvalidRequestError, match="grammars cannot name special tokens"):
        grammars.compile_grammar(form)


def test_hidden_special_tokens_keep_their_ids() -> None:
    added = [{"id": 0, "content": "<unk>", "special": True}, {"id": 1, "content": "<t>"}]
    model = {"unk_token": "<unk>", "vocab": {"<unk>": 0, "<t>": 1, "a": 2}}
    hidden = json.loads(hide_special_tokens(json.dumps({"added_tokens": added, "model": model})))
    name = hidden["added_tokens"][0]["content"]
    assert name != "<unk>" and hidden["added_tokens"][1]["content"] == "<t>"
    assert hidden["model"] == {"unk_token": name, "vocab": {name: 0, "<t>": 1, "a": 2}}
    pieces = {"added_tokens": added, "model": {"vocab": [["<unk>", 0.0], ["<t>", -1.0]]}}
    listed = json.loads(hide_special_tokens(json.dumps(pieces)))
    assert listed["model"]["vocab"][0][0] == listed["added_tokens"][0]["content"]
    with pytest.raises(ValueError, match="must be an object"):
        hide_special_tokens("[]")
