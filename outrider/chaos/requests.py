"""Requests of a fault run: random combinations of fixed prompts, sampling options and drafting
options.

`TextSpec` contains everything on which the text of an answer depends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from outrider.client.options import GenerateOptions
from outrider.spec.plan import DraftMethod

_NUMBERS = "Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3"
_WORDS = "Drafts ride ahead and the target decides which tokens stand. Drafts ride ahead and"
LONG = " ".join([_WORDS, _NUMBERS] * 4)
"""A prompt of several prefill chunks."""

PROMPTS = (_NUMBERS, _WORDS, LONG, f"{_WORDS} {_NUMBERS}")

SAMPLING_SETS: dict[str, GenerateOptions] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "seed": 7},
    "nucleus": {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "seed": 11},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "seed": 3,
    },
    "bias": {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {20: 2.0, 40: -3.0}},
    "stop string": {"temperature": 0.9, "seed": 5, "stop": ("t", "9")},
    "min tokens": {
        "temperature": 0.9,
        "seed": 9,
        "min_tokens": 8,
        "stop_token_ids": tuple(range(0, 384, 9)),
    },
    "target-only": {"temperature": 0.0, "rule": "target-only"},
    "rejection": {"temperature": 0.9, "seed": 13, "rule": "rejection"},
}
"""Sampling options by name. Only with "rejection" may the text depend on the drafts."""

_CHAIN: GenerateOptions = {"draft_tokens": 4, "draft_top_k": 1, "look_ahead": 0}
_TREE: GenerateOptions = {"draft_tokens": 8, "draft_top_k": 2, "look_ahead": 0}
_AHEAD: GenerateOptions = {"draft_tokens": 4, "draft_top_k": 1, "look_ahead": 1}
DRAFTING_SETS: dict[str, GenerateOptions] = {
    "head": {"drafter": DraftMethod.EAGLE3, **_CHAIN},
    "head, tree": {"drafter": DraftMethod.EAGLE3, **_TREE},
    "head, ahead": {"drafter": DraftMethod.EAGLE3, **_AHEAD},
    "model": {"drafter": DraftMethod.MODEL, **_CHAIN},
    "model, tree": {"drafter": DraftMethod.MODEL, **_TREE},
    "model, ahead": {"drafter": DraftMethod.MODEL, **_AHEAD},
    "n-gram": {"drafter": DraftMethod.NGRAM, "draft_tokens": 6},
    "plain": {"drafter": DraftMethod.NONE},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """All inputs that determine the text of an answer."""

    prompt: int
    """Index into `PROMPTS`."""
    sampling: str
    """Key of `SAMPLING_SETS`."""
    max_tokens: int

    @property
    def is_deterministic(self) -> bool:
        """Whether the text is independent of the drafts."""
        return self.sampling != "rejection"

    @property
    def options(self) -> GenerateOptions:
        """Sampling and stopping options."""
        ignore = self.sampling != "min tokens"
        return {**SAMPLING_SETS[self.sampling], "max_tokens": self.max_tokens, "ignore_eos": ignore}


TEXTS = tuple(
    TextSpec(
        prompt=(number + number // len(SAMPLING_SETS)) % len(PROMPTS),
        sampling=name,
        max_tokens=size,
    )
    for number, (name, size) in enumerate(
        (name, size) for size in (10, 20, 32) for name in SAMPLING_SETS
    )
)
"""All combinations of prompt, sampling options and length that fault runs use. They are few, so
that each fault-free answer is computed only once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRequest:
    """One request of a fault run."""

    text: TextSpec
    drafting: str = "model"
    """Key of `DRAFTING_SETS`."""
    priority: int = 0
    resumable: bool = True
    starts_s: float = 0.0
    """Start of the request, in seconds after the start of the run."""

    @property
    def options(self) -> GenerateOptions:
        """All options of the request: those of its text, its drafting, its priority and whether it
        can be resumed."""
        own: GenerateOptions = {"priority": self.priority, "resume": self.resumable}
        return {**self.text.options, **DRAFTING_SETS[self.drafting], **own}

    def __str__(self) -> str:
        text = self.text
        resumable = ", resumable" if self.resumable else ""
        return (
            f"{text.sampling}, prompt {text.prompt}, {text.max_tokens} tokens, {self.drafting}, "
            f"priority {self.priority}, at {1000 * self.starts_s:.0f} ms{resumable}"
        )


def priority_request(rng: random.Random) -> ChaosRequest:
    """Return a random request with a long prompt and a high priority, which preempts other
    sessions."""
    large = [text for text in TEXTS if PROMPTS[text.prompt] == LONG]
    return ChaosRequest(text=rng.choice(large), priority=50, starts_s=rng.uniform(0.05, 0.2))


def draw_requests(rng: random.Random, count: int) -> tuple[ChaosRequest, ...]:
    """Return `count` random requests of one run."""
    return tuple(
        ChaosRequest(
            text=rng.choice(TEXTS),
            drafting=rng.choice(tuple(DRAFTING_SETS)),
            priority=rng.choice((0, 0, 0, 5, -5)),
            resumable=rng.random() < 0.75,
            starts_s=rng.choice((0.0, 0.0, rng.uniform(0.0, 0.1))),
        )
        for _ in range(count)
    )
