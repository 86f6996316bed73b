"""Structured output against a running fleet: validity of all answers and cost of the grammar.

    python -m outrider_bench.quality.structured --router HOST:PORT --tokenizer DIR --schemas 500

The schemas are generated from a seed. Every answer is validated by `jsonschema`, unless max_tokens
ended it. For comparison, the same prompts are answered without a schema, which gives the tokens per
round and the time per round. The time to compute an allowed-token mask is measured in this process,
after each token of the answers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from outrider.client import Client, FinishReason, user
from outrider.grammar.constraint import allowed_mask
from outrider.grammar.grammar_cache import GrammarCache
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.wire.inference import FinishInfo

WORDS = ["name", "age", "city", "colour", "price", "score", "title", "tags", "count", "email"]
WORDS += ["active", "level", "size", "note"]
TOPICS = ["a fruit", "a city", "a film", "a bird", "a meal", "a planet", "a song", "a tool"]
TOPICS += ["a sport", "a book"]
FREE_TOKENS = 50
"""Maximum number of tokens of an answer without a schema."""


def schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` random schemas. Each is an object of one to four properties of all common
    kinds, nested up to two levels."""
    rng = random.Random(seed)
    return [_object(rng, 2) for _ in range(count)]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4 if depth == 2 else 2))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": names if rng.random() < 0.8 else names[:1],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.choice([8, 20])},
        {"type": "string", "enum": rng.sample(WORDS, 3)},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": rng.randint(-5, 5), "maximum": rng.choice([9, 99, 1000])},
        {"type": "number", "minimum": 0, "maximum": 10},
        {"type": "boolean"},
        {"const": rng.choice(WORDS)},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    ]
    if depth > 0:
        items = _value(rng, 0)
        kinds.append({"type": "array", "items": items, "minItems": 1, "maxItems": 3})
        kinds.append(_object(rng, depth))
    return rng.choice(kinds)


@dataclass(frozen=True, slots=True)
class StructuredAnswer:
    """One answer and its mean round time."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishInfo
    round_ms: float
    """Mean milliseconds of a round between the first and the last delta; 0 for a single delta."""


@dataclass(slots=True)
class AnswerCount:
    """Counts over several answers: valid, cut and invalid ones, rounds and tokens."""

    valid: int = 0
    cut: int = 0
    """Number of answers that max_tokens ended. They are not validated."""
    wrong: int = 0
    rounds: int = 0
    emitted: int = 0

    @property
    def tokens_a_round(self) -> float:
        """Mean number of tokens per round."""
        return self.emitted / max(self.rounds, 1)


def ask_structured(
    address: str, schema: dict[str, Any], number: int, **options: Any
) -> StructuredAnswer:
    """Send a request for an object with this schema and return the answer. `number` selects the
    topic. `options` are request options; the output is constrained only if they contain the
    schema."""
    topic = TOPICS[number % len(TOPICS)]
    prompt = f"Describe {topic} as a JSON object with this schema: {json.dumps(schema)}"
    arrivals: list[float] = []
    with (
        Client(address, timeout_s=600.0) as client,
        client.stream([user(prompt)], drafter="eagle3", draft_tokens=4, **options) as stream,
    ):
        for _ in stream:
            arrivals.append(time.perf_counter())
        result = stream.result()
    rounds = max(result.finish.stats.rounds - 1, 1)
    return StructuredAnswer(
        text=result.text,
        token_ids=result.token_ids,
        finish=result.finish,
        round_ms=1000.0 * (arrivals[-1] - arrivals[0]) / rounds if arrivals else 0.0,
    )


def tally_answers(
    found: Sequence[StructuredAnswer], forms: Sequence[dict[str, Any]] | None
) -> AnswerCount:
    """Return the counts over the answers `found`. They are validated only if `forms` gives the
    schema of each."""
    count = AnswerCount()
    for index, result in enumerate(found):
        stats = result.finish.stats
        count.rounds += stats.rounds
        count.emitted += stats.emitted
        if result.finish.reason is FinishReason.LENGTH:
            count.cut += 1
        elif forms is not None:
            count.valid += _is_valid(result.text, forms[index])
            count.wrong += not _is_valid(result.text, forms[index])
    return count


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def mask_us(
    model: Path, vocab_size: int, forms: Sequence[dict[str, Any]], found: Sequence[StructuredAnswer]
) -> tuple[list[float], list[float]]:
    """Return two lists of microseconds: the times to compile each schema, and the times to advance
    the grammar and compute its mask after each token of the answers."""
    grammars = GrammarCache.from_tokenizer_file(model / "tokenizer.json", vocab_size=vocab_size)
    assert grammars is not None
    compiling: list[float] = []
    masking: list[float] = []
    for schema, result in zip(forms, found, strict=True):
        form = StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(schema))
        began = time.perf_counter()
        constraint = grammars.compile_grammar(form).start_constraint([2])
        compiling.append(1e6 * (time.perf_counter() - began))
        ids = np.array(result.token_ids[:-1], np.int32)
        for end in range(len(ids)):
            began = time.perf_counter()
            constraint.advance_to(ids[:end])
            allowed_mask(constraint)
            masking.append(1e6 * (time.perf_counter() - began))
    return compiling, masking


def main() -> None:
    """Run the benchmark and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's directory")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--free", type=int, default=100, help="prompts to answer without a form")
    parser.add_argument("--max-tokens", type=int, default=400, help="of an answer with a form")
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--free-tokens", type=int, default=FREE_TOKENS, help="of those at most")
    args = parser.parse_args()
    forms = schemas(args.schemas, args.seed)

    def bound(number: int) -> StructuredAnswer:
        schema = forms[number]
        return ask_structured(
            args.router, schema, number, json_schema=schema, max_tokens=args.max_tokens
        )

    def free(number: int) -> StructuredAnswer:
        return ask_structured(args.router, forms[number], number, max_tokens=args.free_tokens)

    with ThreadPoolExecutor(args.at_a_time) as pool:
        answers = list(pool.map(bound, range(len(forms))))
        others = list(pool.map(free, range(min(args.free, len(forms)))))
    judged, alike = tally_answers(answers, forms), tally_answers(answers[: len(others)], None)
    unbound = tally_answers(others, None)
    with Client(args.router, timeout_s=30.0) as client:
        vocab_size = client.models()[0].vocab_size
    compiling, masking = mask_us(args.tokenizer, vocab_size, forms, answers)
    figures = {
        "schemas": len(forms),
        "valid": judged.valid,
        "cut by max_tokens": judged.cut,
        "wrong": judged.wrong,
        "tokens": judged.emitted,
        "tokens a round": round(judged.tokens_a_round, 3),
        "tokens a round, same prompts": round(alike.tokens_a_round, 3),
        "tokens a round, unconstrained": round(unbound.tokens_a_round, 3),
        "ratio": round(alike.tokens_a_round / unbound.tokens_a_round, 3),
        "round ms, same prompts": _round_ms(answers[: len(others)]),
        "round ms, unconstrained": _round_ms(others),
        "mask us": _spread(masking),
        "compile us": _spread(compiling),
    }
    print(json.dumps(figures, indent=1))


def _round_ms(found: Sequence[StructuredAnswer]) -> dict[str, float]:
    return _spread([answer.round_ms for answer in found if answer.finish.stats.rounds > 4])


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 1),
        "mean": round(statistics.fmean(ordered), 1),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 1),
    }


if __name__ == "__main__":
    main()
