"""Log-probabilities and structured output under faults: a verifier or the drafter killed in
mid-stream, a session preempted; what comes is what comes when nothing happens."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.client import FinishReason, GenerateResult, user
from outrider.wire.logprobs import TokenLogprobs
from tests.integration.stack import Stack, connect, metric, wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
TOP = 3
FIRST = 4
"""Messages of every stream before anything happens."""
SESSIONS = 4
"""Of a verifier at once; more of a higher priority make others wait."""
SCHEMA = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 2, "maxLength": 8},
                    "age": {"type": "integer", "minimum": 10, "maximum": 99},
                },
                "required": ["name", "age"],
                "additionalProperties": False,
            },
            "minItems": 8,
            "maxItems": 8,
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}
COUPLED: dict[str, object] = {"temperature": 0.8, "seed": 7, "top_logprobs": TOP}
WISHES: dict[str, dict[str, object]] = {
    "greedy": {"max_tokens": 250, "ignore_eos": True, "top_logprobs": TOP},
    "coupled tree": {
        **COUPLED,
        "max_tokens": 250,
        "ignore_eos": True,
        "draft_tokens": 6,
        "draft_top_k": 2,
    },
    "form": {**COUPLED, "max_tokens": 600, "json_schema": SCHEMA},
    "plain form": {
        "top_logprobs": TOP,
        "max_tokens": 600,
        "json_schema": SCHEMA,
        "drafter": "none",
    },
}
Heard = dict[str, tuple[GenerateResult, list[TokenLogprobs]]]


@pytest.fixture(scope="module")
def pair(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("stack"),
        model=str(tiny_target),
        head=str(tiny_head),
        router=["--metrics-port", "0"],
        verifier=["--max-sessions", str(SESSIONS)],
        spare=True,
    ) as running:
        yield running


@pytest.fixture
def stack(pair: Stack) -> Stack:
    pair.repair()
    return pair


def hear(stack: Stack, fault: Callable[[], None]) -> Heard:
    """Stream all wishes at once, cause the fault once all have begun; what was heard."""
    begun = threading.Semaphore(0)

    def one(wish: dict[str, object]) -> tuple[GenerateResult, list[TokenLogprobs]]:
        entries: list[TokenLogprobs] = []
        with client.stream(PROMPT, **wish) as stream:  # type: ignore[arg-type]
            for count, delta in enumerate(stream):
                entries += delta.logprobs
                if count == FIRST:
                    begun.release()
            return stream.result(), entries

    with connect(stack) as client, concurrent.futures.ThreadPoolExecutor(len(WISHES)) as pool:
        futures = {name: pool.submit(one, wish) for name, wish in WISHES.items()}
        for _ in futures:
            assert begun.acquire(timeout=30)
        fault()
        return {name: future.result(timeout=90) for name, future in futures.items()}


@pytest.fixture(scope="module")
def calm(pair: Stack) -> Heard:
    """What is heard when nothing happens."""
    return hear(pair, lambda: None)


def assert_same(heard: Heard, calm: Heard) -> None:
    for name, (result, entries) in heard.items():
        before, expected = calm[name]
        assert result.token_ids == before.token_ids and result.text == before.text, name
        assert result.finish.reason is before.finish.reason, name
        assert len(entries) == len(result.token_ids) == len(expected), name
        # The top ids may change places where two are as likely.
        for entry, other in zip(entries, expected, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4), name
            values, others = ([value for _, value in each.top] for each in (entry, other))
            np.testing.assert_allclose(values, others, atol=1e-4)


def test_a_calm_run_is_in_its_form(calm: Heard) -> None:
    for name in ("form", "plain form"):
        result, _ = calm[name]
        assert result.finish.reason is FinishReason.STOP_TOKEN
        assert len(json.loads(result.text)["people"]) == 8
    assert calm["form"][0].finish.stats.proposed > 0


def test_a_verifier_dies(stack: Stack, calm: Heard) -> None:
    resumed = metric(stack.router, "outrider_resumed_sessions_total{")
    heard = hear(stack, stack.verifier.kill)
    assert_same(heard, calm)
    assert metric(stack.router, "outrider_resumed_sessions_total{") > resumed


def test_the_drafter_dies(stack: Stack, calm: Heard) -> None:
    heard = hear(stack, stack.drafter.kill)
    assert_same(heard, calm)
    assert not stack.drafter.alive


def preemptions(stack: Stack) -> int:
    with connect(stack) as client:
        verifiers = client.server_info().verifiers
    return sum(v.preemptions_swap + v.preemptions_recompute for v in verifiers)


def test_sessions_are_preempted(stack: Stack, calm: Heard) -> None:
    before = preemptions(stack)

    def crowd() -> None:
        """More requests of a higher priority than there are places."""

        def urgent(number: int) -> None:
            client.generate(PROMPT, max_tokens=60, ignore_eos=True, priority=5, seed=number)

        count = 2 * len(stack.verifiers) * SESSIONS
        with connect(stack) as client, concurrent.futures.ThreadPoolExecutor(count) as pool:
            list(pool.map(urgent, range(count)))
        wait_until(lambda: preemptions(stack) > before, timeout_s=30.0, what="a preemption")

    assert_same(hear(stack, crowd), calm)
