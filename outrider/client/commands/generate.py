"""`outrider generate`: answers prompts, through a running router or processes of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from outrider.client.async_client import AsyncClient
from outrider.client.commands.answer_text import AnswerText, render_answer
from outrider.client.commands.placement_flags import (
    DTYPE_HELP,
    HEAD_HELP,
    MODEL_HELP,
    add_placement_arguments,
    placement_of,
)
from outrider.client.commands.prompt_files import Turns, read_prompts
from outrider.client.commands.request_flags import add_request_arguments, request_options
from outrider.client.commands.status import simulation_note
from outrider.client.flags import add_connecting_arguments, integer_at_least, tls_of
from outrider.client.local.cluster import LocalCluster, print_progress
from outrider.client.local.config import CPU, LocalFleetConfig
from outrider.client.local.model_files import DEFAULT_MODEL, ModelFiles, find_model
from outrider.client.options import GenerateOptions, assistant, user
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.transport.tls import TlsConfig
from outrider.wire.inference import ChatMessage, Delta, GenerateResult

KV_TOKENS_PER_PROMPT = 2560
MIN_KV_TOKENS = 8448
LOCAL_ONLY = (
    "model",
    "head",
    "draft_model",
    "dtype",
    "device",
    "drafter_device",
    "placement",
    "device_exchange",
    "draft_length",
    "no_cuda_graphs",
    "batch_invariant",
    "busy_polling_cores",
    "simulated_acceptance",
)

OnDelta = Callable[[Delta], None]
Answers = list[GenerateResult]
"""Answers to the turns of one conversation, in order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to a parser."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="User message to answer.")
    source.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        type=Path,
        help='JSON Lines file of prompts: {"prompt": TEXT} or {"turns": [TEXT, ...]} in each line.',
    )
    add_request_arguments(parser)
    add("--dtype", choices=("float32", "bfloat16"), help=DTYPE_HELP)
    add_placement_arguments(parser)
    add("--router", metavar="HOST:PORT", help="Router to use instead of starting local processes.")
    add_connecting_arguments(parser)
    add(
        "--json", action="store_true", help="Print one JSON object for each prompt, in input order."
    )
    add(
        "--hide-reasoning",
        action="store_true",
        help="Leave reasoning out of the printed text (default: it is printed before the answer, "
        "between the lines [reasoning] and [end of reasoning], and dimmed in a terminal). --json "
        "output always contains it.",
    )
    add(
        "--concurrency",
        metavar="N",
        type=integer_at_least(1),
        default=1,
        help="Number of prompts that are answered at the same time (default: 1).",
    )
    add("--model", metavar="NAME|DIR|HUB-ID", help=MODEL_HELP)
    add("--head", metavar="DIR|HUB-ID", help=HEAD_HELP)
    add(
        "--draft-model",
        metavar="NAME|DIR|HUB-ID",
        help="Draft model of --drafter model (default: the value of --model).",
    )


def run(args: argparse.Namespace) -> int:
    """Answer every prompt and return the exit status. Raises OutriderError."""
    if args.logprobs is not None and not args.json:
        raise InvalidRequestError(
            "--logprobs needs --json: only JSON output contains log probabilities",
            reason="INVALID_FLAG",
        )
    options = request_options(args)
    prompts = [(args.prompt,)] if args.prompts is None else read_prompts(args.prompts)
    if args.router is not None:
        ignored = [name for name in LOCAL_ONLY if getattr(args, name) not in (None, False)]
        for name in ignored:
            print_progress(f"--{name.replace('_', '-')} is ignored because --router is given")
        return asyncio.run(_answer_all(args, prompts, options, args.router, tls_of(args)))
    concurrency = min(args.concurrency, len(prompts))
    files = find_model(args.model or DEFAULT_MODEL, head=args.head)
    if args.drafter is None and files.head is None:
        print_progress(f"no draft head ships for {files.name}; drafting by n-gram")
        args.drafter = DraftMethod.NGRAM.value
        options["drafter"] = args.drafter
    with LocalCluster(local_config(args, files, concurrency)) as cluster:
        return asyncio.run(_answer_all(args, prompts, options, cluster.address))


def local_config(args: argparse.Namespace, files: ModelFiles, concurrency: int) -> LocalFleetConfig:
    """Return the configuration of the local processes for these flags. `concurrency` is the number
    of prompts that are answered at the same time."""
    method = DraftMethod(args.drafter or DraftMethod.EAGLE3)
    draft_model = None
    if method is DraftMethod.MODEL:
        draft_model = files.path
        if args.draft_model is not None:
            draft_model = find_model(args.draft_model).path
    placing = placement_of(args)
    kv_tokens = max(MIN_KV_TOKENS, concurrency * KV_TOKENS_PER_PROMPT)
    return LocalFleetConfig(
        model=files.path,
        model_name=files.name,
        methods=() if method is DraftMethod.NONE else (method,),
        head=files.head,
        draft_model=draft_model,
        dtype=args.dtype or "",
        **placing,
        kv_tokens=kv_tokens if placing["device"] == CPU else None,
        max_sessions=max(8, concurrency),
        queue_limit=max(256, concurrency),
    )


async def ask_turn(
    client: AsyncClient,
    history: list[ChatMessage],
    turn: str,
    options: GenerateOptions,
    on_delta: OnDelta = lambda delta: None,
) -> GenerateResult:
    """Send one turn of a conversation, and return the answer. `history` contains the earlier
    messages; the turn and the answer are appended to it. `on_delta` is called with each part of the
    answer."""
    history.append(user(turn))
    async with client.stream(history, **options) as stream:
        async for delta in stream:
            on_delta(delta)
        answer = await stream.result()
    history.append(assistant(answer))
    return answer


async def ask_conversation(client: AsyncClient, turns: Turns, options: GenerateOptions) -> Answers:
    """Send the turns of one conversation one after the other, and return the answers."""
    history: list[ChatMessage] = []
    return [await ask_turn(client, history, turn, options) for turn in turns]


def describe_answers(answers: Answers) -> dict[str, object]:
    """Return the JSON object for the answers to one prompt: the fields of the last answer and, if
    there are several answers, a list of all of them under the key "turns"."""
    described = [_describe_one(answer) for answer in answers]
    if len(described) == 1:
        return described[0]
    return described[-1] | {"turns": described}


def _describe_one(answer: GenerateResult) -> dict[str, object]:
    stats = answer.finish.stats
    described: dict[str, object] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish.reason.value,
        "stats": {
            "rounds": stats.rounds,
            "emitted": stats.emitted,
            "proposed": stats.proposed,
            "accepted": stats.accepted,
            "mean_emitted_per_round": mean_emitted_tokens(stats.emitted, stats.rounds),
            "fallback_rounds": stats.fallback_rounds,
            "look_ahead_rounds": stats.look_ahead_rounds,
            "hit_rounds": stats.hit_rounds,
            "hit_accepted": stats.hit_accepted,
            "fresh_rounds": stats.fresh_rounds,
            "fresh_accepted": stats.fresh_accepted,
        },
    }
    if answer.reasoning:
        described["reasoning"] = answer.reasoning
    if answer.tool_calls:
        described["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
    if answer.logprobs:
        described["logprobs"] = [asdict(entry) for entry in answer.logprobs]
    return described


def mean_emitted_tokens(emitted: int, rounds: int) -> float:
    """Return the mean number of tokens that a round emits; 0 if there were no rounds, as in an
    answer of a single token, which prefill emits."""
    return round(emitted / rounds, 4) if rounds else 0.0


async def _answer_all(
    args: argparse.Namespace,
    prompts: Sequence[Turns],
    options: GenerateOptions,
    address: str,
    tls: TlsConfig | None = None,
) -> int:
    started = time.monotonic()
    async with AsyncClient(address, tls=tls) as client:
        note = simulation_note(await client.server_info())
        if note:
            print_progress(f"{note}: the answers are not the model's")
        if args.concurrency == 1 and not args.json:
            shows = not args.hide_reasoning
            done = [await _show_live(client, turns, options, shows) for turns in prompts]
        else:
            done = await _answer_concurrently(client, prompts, options, args)
    _summarize(done, time.monotonic() - started)
    return 0


async def _show_live(
    client: AsyncClient, turns: Turns, options: GenerateOptions, shows_reasoning: bool
) -> Answers:
    """Answer one prompt, writing the answers to stdout while they are received."""
    answers: Answers = []
    history: list[ChatMessage] = []
    for turn in turns:
        _write(f"> {turn}\n")
        text = AnswerText(
            shows_reasoning=shows_reasoning,
            # https://no-color.org
            is_dimmed=sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
        )

        def write_delta(delta: Delta, text: AnswerText = text) -> None:
            _write(text.push_delta(delta))

        answers.append(await ask_turn(client, history, turn, options, write_delta))
        _write(f"{text.finish()}\n\n")
    return answers


async def _answer_concurrently(
    client: AsyncClient,
    prompts: Sequence[Turns],
    options: GenerateOptions,
    args: argparse.Namespace,
) -> list[Answers]:
    """Answer all prompts, at most `args.concurrency` at the same time. Answers are printed in the
    order of the prompts, each as soon as it and all earlier ones are complete."""
    bound = asyncio.Semaphore(args.concurrency)

    async def one(turns: Turns) -> Answers:
        async with bound:
            return await ask_conversation(client, turns, options)

    done: list[Answers] = []
    tasks = [asyncio.create_task(one(turns)) for turns in prompts]
    try:
        for turns, task in zip(prompts, tasks, strict=True):
            answers = await task
            done.append(answers)
            if args.json:
                _write(json.dumps(describe_answers(answers)) + "\n")
            else:
                for turn, answer in zip(turns, answers, strict=True):
                    shown = render_answer(answer, shows_reasoning=not args.hide_reasoning)
                    _write(f"> {turn}\n{shown}\n\n")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done


def _summarize(done: Sequence[Answers], seconds: float) -> None:
    answers = [answer for answers in done for answer in answers]
    tokens = sum(len(answer.token_ids) for answer in answers)
    emitted = sum(answer.finish.stats.emitted for answer in answers)
    rounds = sum(answer.finish.stats.rounds for answer in answers)
    print_progress(
        f"{len(answers)} answers, {tokens} tokens in {seconds:.1f} s "
        f"({tokens / max(seconds, 1e-9):.1f} tokens/s), "
        f"{mean_emitted_tokens(emitted, rounds):.2f} tokens a round{_hits(answers)}"
    )


def _hits(answers: Answers) -> str:
    """Return a text with the look-ahead statistics of the answers; "" if look-ahead was off."""
    rounds = sum(answer.finish.stats.look_ahead_rounds for answer in answers)
    hits = sum(answer.finish.stats.hit_rounds for answer in answers)
    return f", {hits / rounds:.0%} of the drafts were made ahead" if rounds else ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
