"""Log-probabilities and structured output under faults: a verifier or the drafter killed in
mid-stream, a session preempted; what comes is what comes when nothing happens."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Callable

import numpy as np
import pytest

from outrider.client import Client, FinishReason, GenerateResult, RetryPolicy, user
from outrider.wire.logprobs import TokenLogprobs
from tests.integration.stack import Stack, StackOptions, connect, metric, slow_rounds
from tests.integration.test_structured_output import SCHEMA, conforms
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
TOP = 3
FIRST = 4
"""Tokens of every stream before anything happens."""
SESSIONS = 4
"""Of a verifier at once; more of a higher priority make others wait."""
PERSON = r'\{"name": "[a-z]{2,8}", "age": [1-9][0-9]\}'
PEOPLE = rf"\[({PERSON}, ){{4}}{PERSON}\]"
"""JSON without white space of free length: how long it takes is known."""
LIMIT_S = 120.0
COUPLED: dict[str, object] = {"temperature": 0.8, "seed": 7, "top_logprobs": TOP}
WISHES: dict[str, dict[str, object]] = {
    "greedy": {"max_tokens": 120, "ignore_eos": True, "top_logprobs": TOP},
    "coupled tree": {
        **COUPLED,
        "max_tokens": 120,
        "ignore_eos": True,
        "draft_tokens": 6,
        "draft_top_k": 2,
    },
    "form": {**COUPLED, "max_tokens": 400, "json_schema": SCHEMA},
    "plain form": {
        "max_tokens": 400,
        "regex": PEOPLE,
        "top_logprobs": TOP,
        "drafter": "none",
    },
}
Heard = dict[str, tuple[GenerateResult, list[TokenLogprobs]]]


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {
        "router": ["--metrics-port", "0"],
        "verifier": ["--max-sessions", str(SESSIONS), *slow_rounds(6)],
        "spare": 1,
    }


def patient(stack: Stack) -> Client:
    """A client that tries once, on a machine with much else to do."""
    return Client(stack.router.address, timeout_s=LIMIT_S, retry=RetryPolicy(max_attempts=1))


def hear(stack: Stack, fault: Callable[[], None]) -> Heard:
    """Stream all wishes at once, cause the fault once all have begun; what was heard."""
    begun = threading.Semaphore(0)

    def one(wish: dict[str, object]) -> tuple[GenerateResult, list[TokenLogprobs]]:
        entries: list[TokenLogprobs] = []
        with client.stream(PROMPT, **wish) as stream:  # type: ignore[arg-type]
            waiting = True
            for delta in stream:
                entries += delta.logprobs
                if waiting and len(entries) >= FIRST:
                    begun.release()
                    waiting = False
            return stream.result(), entries

    with patient(stack) as client, concurrent.futures.ThreadPoolExecutor(len(WISHES)) as pool:
        futures = {name: pool.submit(one, wish) for name, wish in WISHES.items()}
        for _ in futures:
            assert begun.acquire(timeout=LIMIT_S)
        fault()
        return {name: future.result(timeout=LIMIT_S) for name, future in futures.items()}


@pytest.fixture(scope="module")
def calm(survivor: Stack) -> Heard:
    """What is heard when nothing happens."""
    return hear(survivor, lambda: None)


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
    schema, people = calm["form"][0], calm["plain form"][0]
    conforms(schema.text)
    assert len(json.loads(people.text)) == 5
    assert {each.finish.reason for each in (schema, people)} == {FinishReason.STOP_TOKEN}
    assert schema.finish.stats.proposed > 0


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
            together.wait(LIMIT_S)
            client.generate(PROMPT, max_tokens=60, ignore_eos=True, priority=5, seed=number)

        count = len(stack.verifiers) * SESSIONS + 2
        together = threading.Barrier(count)
        with patient(stack) as client, concurrent.futures.ThreadPoolExecutor(count) as pool:
            list(pool.map(urgent, range(count)))
        wait_until(lambda: preemptions(stack) > before, timeout_s=30.0, what="a preemption")

    assert_same(hear(stack, crowd), calm)
