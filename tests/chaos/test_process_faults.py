"""Processes are killed, stopped and restarted while they work; clients see what was promised."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.client import (
    Client,
    GenerateResult,
    OutriderError,
    user,
)
from tests.integration.stack import Stack, StackOptions, connect, metric
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
TOKENS = 100


def generate_through(
    client: Client, fault: Callable[[], None], **options: object
) -> GenerateResult:
    """Stream an answer and cause the fault once a few rounds have been heard."""
    with client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True, **options) as stream:  # type: ignore[arg-type]
        for count, _ in enumerate(stream):
            if count == 10:
                fault()
        return stream.result()


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_lost_drafter_changes_no_token_and_is_counted(stack: Stack, fault: str) -> None:
    sampling: dict[str, object] = {"temperature": 0.8, "seed": 7}
    losses = metric(stack.router, "outrider_drafter_losses_total{")
    with connect(stack) as client:
        plain = client.generate(
            PROMPT, max_tokens=TOKENS, ignore_eos=True, drafter="none", temperature=0.8, seed=7
        )
        began = time.monotonic()
        result = generate_through(client, getattr(stack.drafter, fault), **sampling)
        assert result.token_ids == plain.token_ids
        assert result.finish.stats.fallback_rounds > 0
        assert time.monotonic() - began < 30.0
        wait_until(
            lambda: metric(stack.router, "outrider_drafter_losses_total{") > losses, what="metric"
        )


def test_a_restarted_drafter_drafts_again_within_the_running_stream(stack: Stack) -> None:
    with connect(stack) as client:
        result = generate_through(client, stack.drafter.kill, temperature=0.0)
        stack.drafter.restart()
        wait_until(lambda: all(d.healthy for d in client.server_info().drafters), what="drafter")
        again = client.generate(PROMPT, max_tokens=64, ignore_eos=True, temperature=0.0)
        assert again.token_ids == result.token_ids[:64]
        assert again.finish.stats.proposed > 0


def test_a_frozen_drafter_that_wakes_up_does_no_harm(stack: Stack) -> None:
    with connect(stack) as client:
        plain = client.generate(
            PROMPT, max_tokens=TOKENS, ignore_eos=True, drafter="none", temperature=0.0
        )
        result = generate_through(client, stack.drafter.freeze, temperature=0.0)
        stack.drafter.thaw()
        wait_until(lambda: all(d.healthy for d in client.server_info().drafters), what="drafter")
        again = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        assert result.token_ids == again.token_ids == plain.token_ids


def test_with_a_planner_a_frozen_drafter_costs_a_short_gap_and_no_token(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    model, head = str(tiny_target), str(tiny_head)
    # Nothing but the planner would end the wait before the stream has gone on for long.
    router, verifier = tmp_path / "router.toml", tmp_path / "verifier.toml"
    router.write_text("[speculation]\nproposal_timeout_ms = 30000\n")
    verifier.write_text("peer_timeout_ms = 60000\n")
    options: StackOptions = {
        "router": ["--config", str(router)],
        "verifier": ["--planner", "automatic", "--config", str(verifier)],
    }
    with (
        Stack(tmp_path, model=model, head=head, **options) as stack,
        connect(stack) as client,
    ):
        plain = client.generate(
            PROMPT, max_tokens=TOKENS, ignore_eos=True, drafter="none", temperature=0.0
        )
        times: list[float] = []
        with client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True) as stream:
            for count, _ in enumerate(stream):
                times.append(time.monotonic())
                if count == 10:
                    stack.drafter.freeze()
            result = stream.result()
        stack.drafter.thaw()
        assert result.token_ids == plain.token_ids
        # A planner on a CPU waits for a quarter of a second; the rest is for a machine that stalls.
        assert max(b - a for a, b in itertools.pairwise(times)) < 3.0
        assert result.finish.stats.decision


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_the_stream_of_a_lost_verifier_goes_on_when_it_is_back(stack: Stack, fault: str) -> None:
    def lose_and_restart() -> None:
        getattr(stack.verifier, fault)()
        wait_until(lambda: not stack.healthy(), what="the loss")
        stack.verifier.restart()

    with connect(stack) as client:
        calm = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
        result = generate_through(client, lose_and_restart, temperature=0.0)
        assert (result.token_ids, result.text) == (calm.token_ids, calm.text)


def test_a_full_queue_refuses_with_a_hint_and_loses_no_admitted_request(stack: Stack) -> None:
    def run(index: int) -> tuple[str, float | None]:
        together.wait(60.0)
        try:
            result = client.generate(PROMPT, max_tokens=64, ignore_eos=True, seed=index)
        except OutriderError as error:
            return error.code, error.retry_after_s
        assert len(result.token_ids) == 64
        return "OK", None

    together = threading.Barrier(64)
    with connect(stack) as client, concurrent.futures.ThreadPoolExecutor(64) as pool:
        outcomes = list(pool.map(run, range(64)))
        codes = [code for code, _ in outcomes]
        assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        assert codes.count("OK") >= 8 + 16
        hints = [hint for code, hint in outcomes if code == "RESOURCE_EXHAUSTED"]
        assert all(hint is not None and hint > 0 for hint in hints)
        wait_until(lambda: client.server_info().running == 0, what="idle")


def test_a_thousand_cancelled_requests_leak_nothing(stack: Stack) -> None:
    def run(index: int) -> None:
        with client.stream(PROMPT, max_tokens=500, ignore_eos=True, seed=index) as stream:
            if index % 2:
                next(iter(stream), None)

    def cancelled(index: int) -> None:
        try:
            run(index)
        except OutriderError as error:
            assert error.code in ("RESOURCE_EXHAUSTED", "CANCELLED")

    with connect(stack) as client, concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(cancelled, range(1000)))
        wait_until(lambda: _idle(client), timeout_s=20.0, what="nothing held")
        assert client.generate(PROMPT, max_tokens=4).token_ids


def test_children_end_with_sigterm(stack: Stack) -> None:
    for process in (stack.router, stack.drafter, stack.verifier):
        process.stop()
        assert not process.alive


def _idle(client: Client) -> bool:
    info = client.server_info()
    return (
        info.running == 0
        and info.queued == 0
        and all(v.sessions == 0 and v.kv_free_blocks == v.kv_total_blocks for v in info.verifiers)
    )
