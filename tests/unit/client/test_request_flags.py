"""Whatever a request may say can be said on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from outrider.client.commands.request_flags import (
    CHAT_FLAGS,
    FLAGS,
    STRUCTURED_FLAGS,
    add_request_arguments,
    request_options,
)
from outrider.client.options import GenerateOptions, make_request
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod

ELSEWHERE = {"model", "request_id", "resume", "return_prompt_token_ids", "speculate"}
"""What a command decides: `--drafter none` decodes plainly."""


def options(*arguments: str) -> GenerateOptions:
    parser = argparse.ArgumentParser()
    add_request_arguments(parser)
    return request_options(parser.parse_args(arguments))


def test_every_option_has_a_flag() -> None:
    said = {flag.option for flag in (*FLAGS, *CHAT_FLAGS, *STRUCTURED_FLAGS)} | {
        "look_ahead",
        "fan_out",
    }
    assert said == set(GenerateOptions.__annotations__) - ELSEWHERE


def test_what_is_not_said_is_the_servers_choice() -> None:
    assert options() == {
        "max_tokens": 256,
        "temperature": 0.0,
        "drafter": DraftMethod.EAGLE3,
        "draft_tokens": 4,
        "draft_top_k": 1,
    }


def test_what_is_said_is_asked_for(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    said = options(
        *("--stop", "a", "--stop", "b", "--stop-token", "7", "--ban-token", "1"),
        *("--logit-bias", "5=-2.5", "--logit-bias", "6=1", "--bad-word", "no"),
        *("--temperature", "0.7", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.1"),
        *("--repetition-penalty", "1.1", "--keep-special-tokens", "--ignore-eos"),
        *("--json-schema", str(schema), "--look-ahead", "0", "--drafter", "ngram"),
    )
    assert said["stop"] == ["a", "b"] and said["stop_token_ids"] == [7]
    assert said["banned_token_ids"] == [1] and said["logit_bias"] == {5: -2.5, 6: 1.0}
    assert said["skip_special_tokens"] is False and said["ignore_eos"] is True
    request = make_request("text", said)
    assert request.sampling.top_k == 40 and request.sampling.min_p == 0.1
    assert request.structured_output is not None
    assert request.structured_output.text == '{"type": "integer"}'


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--json-object", "--regex", "a"], "not allowed with"),
        (["--stop-token", "-1"], "at least 0"),
        (["--top-p", "much"], "invalid float"),
    ],
)
def test_what_cannot_be_is_said_so(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(*arguments)
    assert stopped.value.code == 2 and why in capsys.readouterr().err


def test_a_form_that_cannot_be_read_is_refused_before_anything_is_started() -> None:
    with pytest.raises(InvalidRequestError, match="nowhere"):
        options("--json-schema", "/nowhere.json")
