"""A verifier is killed, stopped or told to stop beside a spare one: its streams pause, and their
texts are what they would have been."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from outrider.client import Client, GenerateResult, Usage, user
from tests.integration.stack import Process, Stack, StackOptions, connect, metric, slow_rounds
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
TOKENS = 60
LIMIT_S = 12.0
"""Longest pause of a stream; a peer that falls silent is given up after 2 s."""
LONG: dict[str, object] = {"max_tokens": TOKENS, "ignore_eos": True}
COUPLED: dict[str, object] = {**LONG, "temperature": 0.8, "seed": 7}
KINDS: dict[str, dict[str, object]] = {
    "greedy": LONG,
    "coupled": COUPLED,
    "tree": {**COUPLED, "draft_tokens": 6, "draft_top_k": 2},
    "lock-step": {**COUPLED, "look_ahead": 0, "seed": 8},
    "plain": {**COUPLED, "drafter": "none", "seed": 9},
    "penalties": {**COUPLED, "presence_penalty": 0.9, "repetition_penalty": 1.2, "top_p": 0.9},
    "biased": {**COUPLED, "logit_bias": {5: 4.0, 17: -50.0}, "banned_token_ids": [3]},
    "n-gram": {**LONG, "drafter": "ngram", "presence_penalty": 0.5},
}
Wishes = dict[str, dict[str, object]]


@dataclass(frozen=True)
class Calm:
    """Requests by kind, and what they answer when nothing happens."""

    wishes: Wishes
    results: dict[str, GenerateResult]


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {
        "router": ["--metrics-port", "0"],
        "verifier": slow_rounds(14),
        "spare": 1,
    }


@pytest.fixture(scope="module")
def calm(survivor: Stack) -> Calm:
    """What each kind of request answers when nothing happens; those that stop by themselves do so
    in the middle of another one's text."""
    with connect(survivor) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:

        def answers(wishes: Wishes) -> dict[str, GenerateResult]:
            jobs = {name: pool.submit(client.generate, PROMPT, **w) for name, w in wishes.items()}  # type: ignore[arg-type]
            return {name: job.result() for name, job in jobs.items()}

        results = answers(KINDS)
        ids = results["coupled"].token_ids
        at = next(i for i in range(TOKENS // 2, TOKENS) if ids[i] not in ids[:i])
        ending: Wishes = {
            "stop token": {**COUPLED, "stop_token_ids": [ids[at]]},
            "least length": {
                **COUPLED,
                "stop_token_ids": [ids[TOKENS // 4]],
                "min_tokens": TOKENS // 2,
            },
        }
        return Calm(KINDS | ending, results | answers(ending))


class Streams:
    """One stream of each kind at once, and the longest pause of each."""

    def __init__(self, stack: Stack, calm: Calm) -> None:
        self._stack, self._calm = stack, calm
        self._begun = threading.Semaphore(0)
        self.pauses: dict[str, float] = {}

    def run(self, fault: Callable[[], None]) -> dict[str, GenerateResult]:
        """Cause the fault once all have begun; what they answer."""
        with (
            connect(self._stack) as client,
            concurrent.futures.ThreadPoolExecutor(len(self._calm.wishes)) as pool,
        ):
            futures = {
                name: pool.submit(self._one, client, name, wish)
                for name, wish in self._calm.wishes.items()
            }
            for _ in futures:
                assert self._begun.acquire(timeout=30)
            fault()
            return {name: future.result(timeout=60) for name, future in futures.items()}

    def _one(self, client: Client, name: str, wish: dict[str, object]) -> GenerateResult:
        longest, last = 0.0, time.monotonic()
        with client.stream(PROMPT, **wish) as stream:  # type: ignore[arg-type]
            for count, _ in enumerate(stream):
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if count == 3:
                    self._begun.release()
            self.pauses[name] = longest
            return stream.result()


def usage_but_cache(result: GenerateResult) -> Usage:
    """The usage without `cached_tokens`, which depend on what was served before."""
    return dataclasses.replace(result.finish.usage, cached_tokens=0)


def assert_same(results: dict[str, GenerateResult], calm: Calm) -> None:
    for name, result in results.items():
        before = calm.results[name]
        assert result.token_ids == before.token_ids, name
        assert result.text == before.text, name
        assert result.finish.reason == before.finish.reason, name
        assert usage_but_cache(result) == usage_but_cache(before), name


@pytest.mark.parametrize("fault", ["kill", "freeze", "terminate"])
def test_its_streams_pause_and_their_texts_are_the_same(
    stack: Stack, calm: Calm, fault: str
) -> None:
    resumed = metric(stack.router, "outrider_resumed_sessions_total{")
    streams = Streams(stack, calm)
    results = streams.run(getattr(stack.verifier, fault))
    assert_same(results, calm)
    assert metric(stack.router, "outrider_resumed_sessions_total{") > resumed
    assert max(streams.pauses.values()) < LIMIT_S, streams.pauses
    if fault == "terminate":
        # Its sessions were taken away: it need not wait for their end.
        assert stack.verifier.wait_ended(10.0) == 0


def test_what_a_stopped_verifier_says_when_it_goes_on_changes_nothing(
    stack: Stack, calm: Calm
) -> None:
    def stop_for_a_while() -> None:
        stack.verifier.freeze()
        timer = threading.Timer(2.6, stack.verifier.thaw)
        timer.start()

    results = Streams(stack, calm).run(stop_for_a_while)
    assert_same(results, calm)
    wait_until(stack.healthy, timeout_s=20.0, what="both verifiers")
    with connect(stack) as client:
        wait_until(
            lambda: all(v.sessions == 0 for v in client.server_info().verifiers), what="no session"
        )


def test_one_after_the_other_is_restarted_under_load_and_no_request_fails(
    stack: Stack, calm: Calm
) -> None:
    done = threading.Event()
    wish = KINDS["coupled"]

    def client_of() -> int:
        turns = 0
        while not done.is_set() or not turns:
            assert client.generate(PROMPT, **wish).token_ids == calm.results["coupled"].token_ids  # type: ignore[arg-type]
            turns += 1
        return turns

    with connect(stack) as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(client_of) for _ in range(4)]
        try:
            for process in stack.verifiers:
                restart_gently(process)
                wait_until(stack.healthy, timeout_s=20.0, what="a restarted verifier")
        finally:
            done.set()
        assert all(loop.result(timeout=60) for loop in loops)


def restart_gently(process: Process) -> None:
    process.terminate()
    assert process.wait_ended(30.0) == 0
    process.restart()
