"""Prompts of the benchmarks, and detection of looping answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PROMPTS = Path(__file__).parent / "prompts" / "eval40.jsonl"
LOOP_NGRAM = 8
LOOP_SHARE = 0.25
"""An answer counts as a loop if more than this share of its 8-grams occurred earlier in it. A small
model repeats itself at temperature 0, and drafts of repeated text are nearly always right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """Text of one user message, and the name of the task that it belongs to."""

    task: str
    text: str


def load_prompts(path: Path = DEFAULT_PROMPTS, limit: int | None = None) -> list[BenchPrompt]:
    """Read prompts from a JSONL file of {"task"?, "prompt"} or {"category"?, "turns": [..]}
    objects. Only the first turn is used. Prompts of different tasks alternate, so that the first
    `limit` prompts are of all tasks."""
    by_task: dict[str, list[BenchPrompt]] = {}
    # Not splitlines(): JSON strings may hold the other characters that it splits at.
    for line in path.read_text(encoding="utf-8").strip("\n").split("\n"):
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row["prompt"]
        task = str(row.get("task", row.get("category", path.stem)))
        by_task.setdefault(task, []).append(BenchPrompt(task=task, text=text))
    columns = list(by_task.values())
    longest = max(len(column) for column in columns)
    mixed = [column[i] for i in range(longest) for column in columns if i < len(column)]
    return mixed[:limit]


def repeated_share(token_ids: Sequence[int], n: int = LOOP_NGRAM) -> float:
    """Return the share of the n-grams that occurred earlier in the sequence; 0 for a sequence
    shorter than n."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def is_loop(token_ids: Sequence[int]) -> bool:
    """Return whether an answer repeats itself (see LOOP_SHARE)."""
    return repeated_share(token_ids) > LOOP_SHARE
