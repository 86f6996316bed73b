"""Thinking budgets of requests, as the router sends them to verifiers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_router.config import RouterConfig
from outrider_router.requests.answer_format import AnswerFormat

from outrider.errors import InvalidRequestError
from outrider.spec.thinking_budget import ThinkingBudget
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import ChatMessage, ChatPrompt, GenerateRequest, TextPrompt
from tests.fakes.router import running_router
from tests.fakes.tokenizer import make_tokenizer_dir
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request

CHAT = ChatPrompt((ChatMessage(role="user", content="Why?"),), thinking_token_budget=5)
ASKED = GenerateRequest(prompt=CHAT)


def make_format(directory: Path, parser: str, *special: str) -> AnswerFormat:
    config = RouterConfig(model=directory, verifiers=("v",), reasoning_parser=parser)
    return AnswerFormat(make_tokenizer(directory, *special), config)


def make_tokenizer(directory: Path, *special: str) -> Tokenizer:
    make_tokenizer_dir(directory)
    file = directory / "tokenizer.json"
    written = json.loads(file.read_text())
    first = len(written["model"]["vocab"])
    like = written["added_tokens"][0]
    written["added_tokens"] += [
        {**like, "id": first + index, "content": text} for index, text in enumerate(special)
    ]
    file.write_text(json.dumps(written))
    return Tokenizer.load(directory)


def budget_of(
    answers: AnswerFormat, request: GenerateRequest, prompt_ids: tuple[int, ...]
) -> ThinkingBudget | None:
    parsing = answers.describe_parsing(request, prompt_ids, call_id_seed=1)
    return answers.thinking_budget(request, parsing)


def test_tags_are_told_as_text_and_as_ids(tmp_path: Path) -> None:
    answers, tokenizer = make_format(tmp_path, "deepseek_r1"), Tokenizer.load(tmp_path)

    def ids(text: str) -> tuple[int, ...]:
        return tokenizer.encode(text, add_special_tokens=False)

    closed = budget_of(answers, ASKED, ids("assistant\n"))
    assert closed == ThinkingBudget(
        max_tokens=5,
        open_tag="<think>",
        open_ids=ids("<think>"),
        close_tag="</think>",
        close_ids=ids("</think>"),
    )
    assert closed is not None and len(closed.close_ids) == len("</think>")
    opened = budget_of(answers, ASKED, ids("assistant\n<think>\n"))
    assert opened == replace(closed, open_tag="", open_ids=())
    # A model may begin to think anew behind reasoning that the prompt has ended.
    assert budget_of(answers, ASKED, ids("<think>\n\n</think>\n\n")) == closed


def test_tags_that_are_special_tokens_have_one_id(tmp_path: Path) -> None:
    answers = make_format(tmp_path, "qwen3", "<think>", "</think>")
    found = budget_of(answers, ASKED, (5,))
    assert found is not None
    assert (len(found.open_ids), len(found.close_ids)) == (1, 1)
    assert found.open_ids != found.close_ids


def test_no_budget_is_told_for_none(tmp_path: Path) -> None:
    answers = make_format(tmp_path, "qwen3")
    for prompt in (replace(CHAT, thinking_token_budget=None), TextPrompt("a")):
        assert budget_of(answers, GenerateRequest(prompt=prompt), (5,)) is None


@pytest.mark.parametrize(
    ("parser", "why"),
    [
        ("auto", "no known format of reasoning"),
        ("none", "no known format of reasoning"),
        ("openai_gptoss", "not between tags"),
    ],
)
def test_models_whose_reasoning_cannot_be_limited_refuse_it(
    tmp_path: Path, parser: str, why: str
) -> None:
    answers = make_format(tmp_path, parser)
    with pytest.raises(InvalidRequestError, match=why) as refused:
        budget_of(answers, ASKED, (5,))
    assert (refused.value.reason, refused.value.param) == ("UNSUPPORTED", "thinking_token_budget")


@pytest.mark.parametrize("count", [-1, 1 << 25])
def test_budgets_out_of_bounds_are_refused(tmp_path: Path, count: int) -> None:
    answers = make_format(tmp_path, "qwen3")
    request = GenerateRequest(prompt=replace(CHAT, thinking_token_budget=count))
    with pytest.raises(InvalidRequestError, match="must be in") as refused:
        budget_of(answers, request, (5,))
    assert refused.value.param == "thinking_token_budget"


async def test_verifiers_are_told_of_the_budget(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    async with running_router(tmp_path, {"v": verifier}, reasoning_parser="qwen3") as router:
        await router.generate(replace(text_request(), prompt=CHAT))
        await router.generate(text_request())
        limited, free = verifier.specs[-2:]
        assert limited.thinking_budget is not None and limited.thinking_budget.max_tokens == 5
        assert free.thinking_budget is None
        await assert_all_freed(router, verifier)
