"""`outrider bench tool-calls`: calls that are enforced by a grammar, over OpenAI's HTTP API.

Each request has `tool_choice: "required"` and one of several sets of tools. Its arguments are
validated by `jsonschema`. The same request is sent as a stream with each draft setting; all must
give the message and the token ids of the whole answer without a drafter. Answers that max_tokens
ended are counted apart and not validated.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import itertools
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jsonschema

from outrider.client.flags import integer_at_least
from outrider.client.local.cluster import LocalCluster
from outrider.errors import InternalError
from outrider.transport.tls import CertificateRole
from outrider_bench.environment import describe
from outrider_bench.models import add_model_arguments, describe_placement, local_config
from outrider_bench.quality.lossless import DRAFTS, NONE
from outrider_bench.quality.tool_model import make_tool_model
from outrider_bench.quality.tool_sets import Tool, make_tool_sets
from outrider_bench.report import print_progress, print_result

_TIMEOUT_S: Final = 900.0
_MAX_LISTED: Final = 20
"""Maximum number of invalid answers that the result lists."""
NONE_WHOLE: Final = "none, whole"
_DRAFTS: Final[Mapping[str, Mapping[str, object]]] = {
    NONE: {"drafter": NONE},
    "tree8": {"drafter": "eagle3", "draft_tokens": 8, "draft_top_k": 3, "look_ahead": 0},
    **DRAFTS,
}
_TASKS: Final = (
    "Use the tool {tool} with values of your own.",
    "Please call {tool} for me, I am in Lisbon and it is May 2024.",
    "I need {tool} for number 42, quickly!",
    "Was brauche ich für {tool}? Nimm beliebige Werte.",
    "Do what is needed.",
)


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """An answer to one request."""

    message: dict[str, Any]
    """Content, reasoning, names and arguments of calls, and finish reason; without ids."""
    token_ids: tuple[int, ...]
    usage: tuple[int, int]
    """Numbers of prompt tokens and completion tokens."""
    accepted: int
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--requests", type=integer_at_least(1), default=300, help="number of requests")
    add("--tool-sets", type=integer_at_least(1), default=60, help="number of sets of tools")
    add("--max-tokens", type=integer_at_least(1), default=400, help="length of answers")
    add("--max-model-len", type=integer_at_least(1), help="instead of the model's own")
    add("--concurrency", type=integer_at_least(1), default=4, help="number of concurrent requests")
    add("--drafts", default="chain4,tree8,ngram", help=f"comma-separated, of {', '.join(_DRAFTS)}")
    add("--seed", type=int, default=0, help="of the sets of tools and of the conversations")


def run(args: argparse.Namespace) -> None:
    """Run the benchmark and print its result. Raises InternalError if arguments are not valid for
    their schema, if a stream differs from the whole answer, or if drafts change an answer with
    `--batch-invariant`."""
    names = args.drafts.split(",")
    if unknown := [name for name in names if name not in _DRAFTS]:
        raise SystemExit(
            f"--drafts: unknown {', '.join(unknown)}; choose from {', '.join(_DRAFTS)}"
        )
    bodies = make_requests(args.requests, args.tool_sets, args.seed, args.max_tokens)
    config = local_config(args, max_sessions=max(8, args.concurrency))
    # All answers to one request share a prompt.
    config = replace(config, http="127.0.0.1:0", prefix_cache=True)
    with tempfile.TemporaryDirectory() as directory:
        model = make_tool_model(
            config.model, Path(directory) / "model", max_model_len=args.max_model_len
        )
        with LocalCluster(replace(config, model=model)) as cluster:
            address = cluster.members[CertificateRole.ROUTER][0].ready["http"]
            answers = _ask_all(address, bodies, names, args.concurrency)
    expected = answers.pop(NONE_WHOLE)
    cells = [_compare(name, expected, actual) for name, actual in answers.items()]
    result = {"benchmark": "tool-calls", **describe(), "model": config.model_name}
    result |= describe_placement(config)
    result |= {
        "batch_invariant": config.batch_invariant,
        "max_tokens": args.max_tokens,
        "concurrency": args.concurrency,
        "tool_sets": args.tool_sets,
        "seed": args.seed,
        **count_calls(bodies, expected),
        "cells": cells,
    }
    print_result(args, result)
    if result["invalid"]:
        raise InternalError("arguments are not valid", reason="INVALID_ARGUMENTS")
    if any(cell["other_message"] for cell in cells):
        raise InternalError("streams and whole answers differ", reason="DIFFERENT_ANSWERS")
    if config.batch_invariant and any(cell["other_tokens"] for cell in cells):
        raise InternalError("drafts change answers", reason="DIFFERENT_ANSWERS")


def make_requests(count: int, tool_sets: int, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return the bodies of `count` chat requests. Adjacent requests share a set of tools. Every
    fifth request may have several calls, and every third continues a conversation with a call."""
    rng = random.Random(seed)
    sets = make_tool_sets(tool_sets, seed)
    return [
        {
            "messages": _conversation(rng, sets[number * tool_sets // count], number),
            "tools": sets[number * tool_sets // count],
            "tool_choice": "required",
            "parallel_tool_calls": number % 5 == 0,
            "reasoning_effort": "none",
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_token_ids": True,
        }
        for number in range(count)
    ]


def _conversation(rng: random.Random, tools: Sequence[Tool], number: int) -> list[dict[str, Any]]:
    name = rng.choice(tools)["function"]["name"]
    task = _TASKS[number % len(_TASKS)].format(tool=name)
    turns: list[dict[str, Any]] = [{"role": "user", "content": task}]
    if number % 3 == 0:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": name, "arguments": '{"id": 7}'},
        }
        turns += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": '{"result": "try again"}'},
        ]
    return turns


def count_calls(
    bodies: Sequence[Mapping[str, Any]], answers: Sequence[CallAnswer]
) -> dict[str, Any]:
    """Return how many answers are complete and valid, were cut by max_tokens, and are invalid. An
    answer is valid if it has calls, only of tools of its request, with arguments that fit their
    schemas."""
    cut, valid, calls, failures = 0, 0, 0, []
    for number, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        if answer.message["finish_reason"] == "length":
            cut += 1
            continue
        calls += len(answer.message["tool_calls"])
        if why := _invalid(body, answer):
            failures.append({"request": number, "why": why, "message": answer.message})
        else:
            valid += 1
    return {
        "requests": len(answers),
        "valid": valid,
        "cut_by_max_tokens": cut,
        "invalid": len(failures),
        "calls": calls,
        "failures": failures[:_MAX_LISTED],
    }


def _invalid(body: Mapping[str, Any], answer: CallAnswer) -> str:
    """Return why an answer is not valid; "" if it is."""
    message = answer.message
    if message["finish_reason"] != "tool_calls" or not message["tool_calls"]:
        return f"no call: {message['finish_reason']}"
    if message["content"]:
        return "content beside calls"
    if len(message["tool_calls"]) > 1 and not body["parallel_tool_calls"]:
        return "several calls"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    for name, arguments in message["tool_calls"]:
        if name not in schemas:
            return f"unknown tool {name}"
        try:
            jsonschema.validate(json.loads(arguments), schemas[name])
        except (ValueError, jsonschema.ValidationError) as error:
            return str(error)[:200]
    return ""


def _compare(
    name: str, expected: Sequence[CallAnswer], actual: Sequence[CallAnswer]
) -> dict[str, Any]:
    """Return the counts over the answers of one draft setting, and the numbers of the requests
    whose answers have other token ids than expected, or the same ids and another message."""
    pairs = list(enumerate(zip(expected, actual, strict=True)))
    other_tokens = [index for index, (one, other) in pairs if one.token_ids != other.token_ids]
    other_message = [
        index
        for index, (one, other) in pairs
        if one.token_ids == other.token_ids
        and (one.message, one.usage) != (other.message, other.usage)
    ]
    return {
        "configuration": name,
        "of": len(expected),
        "same": len(expected) - len(other_tokens) - len(other_message),
        "tokens": sum(len(answer.token_ids) for answer in actual),
        "rounds": sum(answer.rounds for answer in actual),
        "accepted": sum(answer.accepted for answer in actual),
        "other_tokens": other_tokens,
        "other_message": other_message,
    }


def _ask_all(
    address: str, bodies: Sequence[Mapping[str, Any]], names: Sequence[str], concurrency: int
) -> dict[str, list[CallAnswer]]:
    """Return the answers to all requests: whole without a drafter, by the key NONE_WHOLE, and
    streamed by the name of the draft setting."""

    def ask(numbers: Sequence[int]) -> list[list[CallAnswer]]:
        found = []
        for number in numbers:
            body = bodies[number]
            streamed = [_ask_stream(address, {**body, **_DRAFTS[name]}) for name in names]
            found.append([_ask_whole(address, {**body, **_DRAFTS[NONE]}), *streamed])
            print_progress(f"request {number + 1} of {len(bodies)}")
        return found

    # Requests with the same tools follow one another, so that they share the KV of their prompts.
    groups = itertools.groupby(range(len(bodies)), lambda number: str(bodies[number]["tools"]))
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        rows = list(itertools.chain.from_iterable(pool.map(ask, [[*each] for _, each in groups])))
    return dict(zip((NONE_WHOLE, *names), map(list, zip(*rows, strict=True)), strict=True))


def _ask_whole(address: str, body: Mapping[str, Any]) -> CallAnswer:
    answer = json.loads(_post(address, body))
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _answer(
        answer,
        choice["token_ids"],
        content=message["content"] or "",
        reasoning=message.get("reasoning_content") or "",
        tool_calls=[[call["name"], call["arguments"]] for call in calls],
        finish_reason=choice["finish_reason"],
    )


def _ask_stream(address: str, body: Mapping[str, Any]) -> CallAnswer:
    text = _post(address, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *events, done, _ = text.split("\n\n")
    if done != "data: [DONE]":
        raise InternalError(f"the stream ends with {done[:500]}", reason="BROKEN_STREAM")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    token_ids: list[int] = []
    content = reasoning = finish_reason = ""
    calls: list[list[str]] = []
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        token_ids += choice.get("token_ids") or ()
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        finish_reason = choice["finish_reason"] or finish_reason
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
    return _answer(
        last,
        token_ids,
        content=content,
        reasoning=reasoning,
        tool_calls=calls,
        finish_reason=finish_reason,
    )


def _answer(last: Mapping[str, Any], token_ids: Sequence[int], **message: Any) -> CallAnswer:
    """Return an answer whose usage and metrics are in the response or chunk `last`."""
    usage, stats = last["usage"], last["metrics"]["speculative_decoding"]
    return CallAnswer(
        message=message,
        token_ids=tuple(token_ids),
        usage=(usage["prompt_tokens"], usage["completion_tokens"]),
        accepted=stats["num_accepted_draft_tokens"],
        rounds=stats["rounds"],
    )


def _post(address: str, body: Mapping[str, Any]) -> str:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise InternalError(f"status {response.status}: {text[:500]}", reason="REQUEST_FAILED")
    return text
