"""Formats of answers follow from the chat template and from the operator's settings."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from outrider_router.config import RouterConfig
from outrider_router.requests.answer_format import AnswerFormat

from outrider.spec.tools import Tool, ToolChoiceMode, ToolOptions
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import ChatMessage, ChatPrompt, GenerateRequest
from tests.fakes.tokenizer import make_tokenizer_dir

WITH_TOOLS = "{% for tool in tools %}{{ tool }}{% endfor %}"
CALLS = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ raise_exception('no') }}"
    "{% endif %}{% endfor %}"
)


def make_format(directory: Path, template: str, parser: str) -> AnswerFormat:
    make_tokenizer_dir(directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    config = RouterConfig(model=directory, verifiers=("v",), tool_call_parser=parser)
    return AnswerFormat(Tokenizer.load(directory), config)


@pytest.mark.parametrize(
    ("template", "parser", "is_warned"),
    [
        (CALLS, "hermes", True),
        (CALLS, "none", False),
        (CALLS, "auto", False),
        (WITH_TOOLS + CALLS, "hermes", False),
    ],
)
def test_a_set_parser_is_warned_of_if_the_template_leaves_tools_out(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    template: str,
    parser: str,
    is_warned: bool,
) -> None:
    with caplog.at_level(logging.WARNING):
        make_format(tmp_path, template, parser)
    assert ("tools left out of prompts" in caplog.text) == is_warned


@pytest.mark.parametrize(("prefix", "is_single"), [("", False), (ONE_CALL, True)])
def test_answers_have_as_many_calls_as_the_template_allows_in_a_message(
    tmp_path: Path, prefix: str, is_single: bool
) -> None:
    answers = make_format(tmp_path, prefix + WITH_TOOLS + CALLS, "hermes")
    for choice in (ToolChoiceMode.AUTO, ToolChoiceMode.REQUIRED):
        tools = ToolOptions(tools=(Tool(name="look"),), choice=choice)
        prompt = ChatPrompt((ChatMessage(role="user", content="x"),), tools=tools)
        parsing = answers.describe_parsing(GenerateRequest(prompt=prompt), (5,), call_id_seed=1)
        assert parsing is not None and parsing.parallel == (not is_single)
        grammar = answers.make_grammar(prompt, None, parsing, (5,))
        if choice is ToolChoiceMode.REQUIRED:
            assert grammar is not None
            assert ("between call" in grammar.text) == (not is_single)
