"""Three real processes: a prompt that begins like one before it is not computed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import GenerateOptions, user
from tests.integration.stack import Stack, connect, metric
from tests.waiting import wait_until

STEM = "Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9. "
DRAFTS = ["none", "eagle3", "ngram"]


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_head: Path
) -> Iterator[Stack]:
    flags = ["--metrics-port", "0"]
    directory = tmp_path_factory.mktemp("prefixes")
    with Stack(directory, model=str(tiny_target), head=str(tiny_head), verifier=flags) as running:
        yield running


def found(stack: Stack) -> float:
    """Tokens whose KV was there."""
    return metric(stack.verifier, "outrider_verifier_prefix_cache_hit_tokens_total")


@pytest.mark.parametrize("drafter", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_the_same_when_the_prompt_was_there(
    stack: Stack, drafter: str, temperature: float
) -> None:
    prompt = [user(f"{STEM} {drafter} {temperature}")]
    with stack.client() as client:
        options: GenerateOptions = {
            "max_tokens": 48,
            "ignore_eos": True,
            "temperature": temperature,
            "seed": 3,
            "drafter": drafter,
        }
        first = client.generate(prompt, **options)
        before = found(stack)
        again = client.generate(prompt, **options)
    assert again.token_ids == first.token_ids
    assert found(stack) - before >= 32
    # Whether a lookup finds anything is up to the text.
    assert drafter != "eagle3" or again.finish.stats.proposed > 0


def test_a_drafter_that_comes_back_learns_of_what_was_never_computed(stack: Stack) -> None:
    prompt = [user(f"{STEM} a long answer")]
    with connect(stack) as client:
        plain: GenerateOptions = {
            "max_tokens": 400,
            "ignore_eos": True,
            "temperature": 0.0,
            "drafter": "none",
        }
        drafted: GenerateOptions = {**plain, "drafter": "eagle3"}
        truth = client.generate(prompt, **plain)
        client.generate(prompt, drafter="eagle3", max_tokens=8)
        before = found(stack)
        with client.stream(prompt, **drafted) as stream:
            ids = list(next(stream).token_ids)
            stack.drafter.kill()
            stack.drafter.restart()
            wait_until(stack.healthy, what="a healthy fleet")
            ids += [token for delta in stream for token in delta.token_ids]
    assert tuple(ids) == truth.token_ids
    assert found(stack) > before
