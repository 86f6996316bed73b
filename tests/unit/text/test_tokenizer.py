"""Loading a tokenizer, its hash, its chat template and its end-of-turn ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from outrider.errors import InvalidRequestError, NotFoundError
from outrider.text.chat import NEXT_ANSWER, ChatOptions, ChatTemplate
from outrider.text.tokenizer import LONG_INPUT, Tokenizer, tokenizer_hash
from tests.fakes.tokenizer import make_tokenizer_dir


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tokenizer_dir(tmp_path / "model")


def test_the_hash_is_that_of_the_file_however_it_is_named(model_dir: Path) -> None:
    file = model_dir / "tokenizer.json"
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    assert tokenizer_hash(model_dir) == expected
    assert tokenizer_hash(file) == expected
    assert tokenizer_hash(model_dir / "model.gguf") == expected
    assert Tokenizer.load(model_dir).hash == expected


def test_a_directory_without_a_tokenizer_has_no_hash_and_does_not_load(tmp_path: Path) -> None:
    assert tokenizer_hash(tmp_path) == ""
    with pytest.raises(NotFoundError):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_conversation_ends_where_the_answer_begins(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.decode(ids) == "user\nHi\nassistant\n"


def test_a_long_text_has_the_ids_of_its_parts_and_back(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    part = "a<|im_end|>\u00e9 "
    long = part * (LONG_INPUT // 4)
    assert len(long) > LONG_INPUT
    ids = tokenizer.encode(long)
    assert ids == tokenizer.encode(part) * (LONG_INPUT // 4)
    assert tokenizer.decode(ids, with_special=True) == long
    assert tokenizer.decode(ids) == "a\u00e9 " * (LONG_INPUT // 4)


@pytest.mark.parametrize("size", [50_000, 5_000_000])
def test_a_text_far_beyond_the_bound_is_refused_without_being_encoded(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    encoded: list[int] = []
    fast = tokenizers.Tokenizer

    class Counting:
        """The library's tokenizer, and how long the texts are that it encodes."""

        def __init__(self, data: bytes) -> None:
            self._inner = fast.from_buffer(data)

        from_buffer = classmethod(lambda cls, data: cls(data))
        from_str = staticmethod(fast.from_str)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
            encoded.extend(map(len, texts))
            return self._inner.encode_batch_fast(texts, **options)

    monkeypatch.setattr(tokenizers, "Tokenizer", Counting)
    tokenizer = Tokenizer.load(model_dir)
    assert len(tokenizer.encode("ab" * LONG_INPUT, max_tokens=2 * LONG_INPUT)) == 2 * LONG_INPUT
    assert len(tokenizer.encode("ab" * LONG_INPUT, max_tokens=2 * LONG_INPUT - 1)) == 2 * LONG_INPUT
    assert sum(encoded) >= 2 * LONG_INPUT
    for call in (
        lambda: tokenizer.encode("a" * size, max_tokens=100),
        lambda: tokenizer.encode_chat([{"role": "user", "content": "a" * size}], max_tokens=100),
    ):
        encoded.clear()
        with pytest.raises(InvalidRequestError, match="more than 100 tokens") as refused:
            call()
        assert refused.value.reason == "PROMPT_TOO_LONG" and sum(encoded) < 40_000


def test_end_of_turn_ids_come_from_every_file_that_names_one(model_dir: Path) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert Tokenizer.load(model_dir).eos_ids == (0, 2)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_turn_id_outside_the_vocabulary_is_refused(model_dir: Path, name: str) -> None:
    (model_dir / "config.json").write_text(json.dumps({"vocab_size": 384}))
    (model_dir / name).write_text(json.dumps({"vocab_size": 384, "eos_token_id": [1, 5000]}))
    with pytest.raises(InvalidRequestError, match=rf"{name}: eos_token_id .*384.*not 5000"):
        Tokenizer.load(model_dir)


def test_a_model_without_a_template_refuses_conversations(model_dir: Path) -> None:
    (model_dir / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer.load(model_dir).encode_chat([{"role": "user", "content": "Hi"}])


def test_a_template_file_beside_the_config_wins(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == tokenizer.encode("Hi!")


def test_the_default_template_of_a_list_is_taken(model_dir: Path) -> None:
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == tokenizer.encode("D")


def test_requests_with_tools_use_the_template_for_tools(model_dir: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer.load(model_dir)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "plain"
    with_tools = tokenizer.encode_chat(messages, variables={"tools": [{"name": "look"}]})
    assert tokenizer.decode(with_tools) == "look"
    assert tokenizer.template_traits(with_tools=True).renders_tools
    assert not tokenizer.template_traits(with_tools=False).renders_tools
    file = model_dir / "additional_chat_templates" / "tool_use.jinja"
    file.parent.mkdir()
    file.write_text("file")
    again = Tokenizer.load(model_dir)
    assert again.decode(again.encode_chat(messages, variables={"tools": []})) == "file"


def test_a_template_that_raises_is_the_callers_error(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        Tokenizer.load(model_dir).encode_chat([{"role": "user", "content": "Hi"}])


def test_a_template_cannot_leave_its_sandbox(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError):
        Tokenizer.load(model_dir).encode_chat([{"role": "user", "content": "Hi"}])


def test_the_block_that_trainers_mark_answers_with_is_rendered_in_place(model_dir: Path) -> None:
    plain = (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}!\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    marked = plain.replace(
        "{{ m.content }}!\n", "{%- generation -%}\n{{ '\\n' + m.content }}!\n{% endgeneration %}"
    )
    messages = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Ho"}]
    texts = [ChatTemplate(source, {}).render(messages) for source in (plain, marked)]
    assert texts[0] == texts[1] == "assistant:\nHi!\nuser:\nHo!\nassistant:\n"
    (model_dir / "chat_template.jinja").write_text(marked)
    tokenizer = Tokenizer.load(model_dir)
    assert tokenizer.encode_chat(messages) == tokenizer.encode(texts[0])


def test_what_is_set_in_such_a_block_stays_in_it() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert ChatTemplate(source, {}).render([]) == "21"
    with pytest.raises(InvalidRequestError, match="does not compile"):
        ChatTemplate("{% generation %}", {})


TURNS = [{"role": "user", "content": "m"}, {"role": "assistant", "content": "e "}]


def rendered(content: str, options: ChatOptions, end: str = "<|im_end|>\n") -> str:
    template = "{% for m in messages %}{{ m.role }}:{{ CONTENT }}END{% endfor %}"
    source = template.replace("CONTENT", content).replace("END", end)
    return ChatTemplate(source + "{% if add_generation_prompt %}NEXT{% endif %}", {}).render(
        TURNS, options=options
    )


def test_a_conversation_may_end_behind_or_within_its_last_message() -> None:
    whole = "user:m<|im_end|>\nassistant:e <|im_end|>\n"
    assert rendered("m.content", NEXT_ANSWER) == whole + "NEXT"
    assert rendered("m.content", ChatOptions(add_generation_prompt=False)) == whole
    continued = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert rendered("m.content", continued) == "user:m<|im_end|>\nassistant:e "
    # What the template strips from a message is not part of its text.
    assert rendered("m.content | trim", continued) == "user:m<|im_end|>\nassistant:e"


def test_a_last_message_that_is_not_in_the_text_cannot_be_continued() -> None:
    continued = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        rendered("m.content | upper", continued)
    with pytest.raises(InvalidRequestError, match="cannot both"):
        ChatOptions(continue_final_message=True)
