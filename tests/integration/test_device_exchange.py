"""A verifier and a drafter that exchange between devices (on a CPU: by shared memory), as real
processes: texts are those without, whatever becomes of the drafter and whatever it writes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from outrider_bench.hooks.exchange_garbage import GARBAGE_WRITTEN

from outrider.client import Client, user
from outrider.client.commands.status import describe_server
from tests.integration.stack import Process, Stack, metric, slow_rounds
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
LENGTH = 80
LONG = 200
RECOVERIES = "outrider_verifier_draft_recoveries_total"
PROPOSED = "outrider_verifier_proposed_tokens_total"
GARBAGE = [
    f"buffer={buffer},number={number}"
    for buffer in ("drafts", "verdicts")
    for number in ("true", "false")
]


def count(process: Process, event: str) -> int:
    """How often a process has logged an event."""
    lines = process.log_path.read_text().splitlines()
    return sum(json.loads(line).get("event") == event for line in lines if line.startswith("{"))


def exchanges(stack: Stack) -> int:
    """How often the verifier has begun to exchange between devices."""
    return count(stack.verifier, "exchanging between devices")


@pytest.fixture(scope="module")
def switches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By options of the hook that writes garbage, the file that has it write."""
    directory = tmp_path_factory.mktemp("switches")
    return {options: directory / str(number) for number, options in enumerate(GARBAGE)}


@pytest.fixture(scope="module")
def stack(
    tiny_target: Path,
    tiny_head: Path,
    switches: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("exchange")
    hooks = [
        f"outrider_bench.hooks.exchange_garbage:switch={path},{options}"
        for options, path in switches.items()
    ]
    drafter = [part for hook in hooks for part in ("--hook", hook)]
    # On busy cores a drafter may be late.
    with serving(directory, tiny_target, tiny_head, drafter, timeout_ms=1000) as stack:
        wait_until(lambda: exchanges(stack) > 0, what="an exchange")
        yield stack


@pytest.fixture(scope="module")
def plain(stack: Stack) -> tuple[int, ...]:
    """The tokens of the greedy request without a drafter."""
    with Client(stack.router.address, timeout_s=60.0) as client:
        return text(client, "none", temperature=0.0)[0]


@contextmanager
def serving(
    directory: Path,
    tiny_target: Path,
    tiny_head: Path,
    drafter: list[str],
    *,
    timeout_ms: int = 30,
    round_ms: float = 4,
) -> Iterator[Stack]:
    """A stack that exchanges between devices."""
    flags = ["--device-exchange", "on"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_VERIFIER_EXCHANGE_TIMEOUT_MS", str(timeout_ms))
        with Stack(
            directory,
            model=str(tiny_target),
            head=str(tiny_head),
            verifier=[*flags, *slow_rounds(round_ms), "--metrics-port", "0"],
            drafter=[*flags, *drafter],
            verifier_module="tests.fakes.slow_verifier",
        ) as stack:
            yield stack


def text(client: Client, drafter: str, **options: object) -> tuple[tuple[int, ...], int]:
    """The tokens of a request, and how many were proposed."""
    result = client.generate(
        PROMPT, max_tokens=LENGTH, ignore_eos=True, drafter=drafter, seed=3, **options
    )
    return result.token_ids, result.finish.stats.proposed


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "presence_penalty": 1.0},
        {"temperature": 0.0, "regex": "[0-9 ]+"},
    ],
)
def test_drafts_between_devices_change_no_text(stack: Stack, options: dict[str, object]) -> None:
    with Client(stack.router.address, timeout_s=60.0) as client:
        drafted, proposed = text(client, "eagle3", **options)
        plain, none = text(client, "none", **options)
    assert drafted == plain
    assert proposed > 0 and none == 0


def test_drafts_of_the_rejection_rule_come_with_their_distributions(stack: Stack) -> None:
    with Client(stack.router.address, timeout_s=60.0) as client:
        result = client.generate(
            PROMPT,
            max_tokens=LENGTH,
            ignore_eos=True,
            drafter="eagle3",
            temperature=0.8,
            rule="rejection",
        )
    stats = result.finish.stats
    assert stats.proposed > 0 and stats.target_only_rounds == 0


def test_status_and_metrics_tell_the_exchange(stack: Stack) -> None:
    verifier = stack.verifier
    with Client(stack.router.address, timeout_s=60.0) as client:
        assert text(client, "eagle3", temperature=0.0)[1] > 0

        def is_measured() -> bool:
            exchange = client.server_info().verifiers[0].device_exchange
            return exchange is not None and exchange.idle_rows > 0

        wait_until(is_measured, what="an idle time")
        info = client.server_info()
    exchange = info.verifiers[0].device_exchange
    assert exchange is not None and exchange.draft_length > 0
    said = f"device exchange with {exchange.drafter_id} in pinned memory of the host, chains of"
    assert said in list(describe_server(info))[1]
    assert metric(verifier, 'outrider_verifier_device_exchange_open{memory="host"}') == 1
    assert metric(verifier, 'outrider_verifier_device_exchange_open{memory="device"}') == 0
    assert metric(verifier, "outrider_verifier_device_exchange_rounds_total") > 0
    assert metric(verifier, "outrider_verifier_device_exchange_idle_seconds_count") > 0


def text_through(client: Client, fault: Callable[[], None]) -> tuple[int, ...]:
    """The tokens of a greedy request, during which something happens."""
    options = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}
    with client.stream(PROMPT, drafter="eagle3", seed=3, **options) as stream:
        ids = list(next(iter(stream)).token_ids)
        fault()
        for delta in stream:
            ids += delta.token_ids
    return tuple(ids)


def check_drafts(stack: Stack, client: Client, plain: tuple[int, ...], before: int = 0) -> None:
    """The exchange has begun anew since it had begun `before` times, and drafts change no text."""
    wait_until(lambda: exchanges(stack) > before, what="another exchange")
    wait_until(lambda: text(client, "eagle3", temperature=0.0)[1] > 0, what="drafts")
    assert text(client, "eagle3", temperature=0.0)[0] == plain


def test_a_killed_drafter_changes_no_text_and_its_successor_drafts(
    stack: Stack, plain: tuple[int, ...]
) -> None:
    before = exchanges(stack)
    with Client(stack.router.address, timeout_s=60.0) as client:
        assert text_through(client, stack.drafter.kill) == plain
        stack.drafter.restart()
        check_drafts(stack, client, plain, before)


def test_a_stopped_drafter_changes_no_text_and_drafts_again_when_it_goes_on(
    stack: Stack, plain: tuple[int, ...]
) -> None:
    before = exchanges(stack)
    with Client(stack.router.address, timeout_s=60.0) as client:
        assert text_through(client, stack.drafter.freeze) == plain
        stack.drafter.thaw()
        check_drafts(stack, client, plain, before)


def test_requests_that_are_cancelled_while_rounds_wait_leave_nothing(
    stack: Stack, plain: tuple[int, ...]
) -> None:
    with Client(stack.router.address, timeout_s=60.0) as client:
        streams = [
            client.stream(PROMPT, drafter="eagle3", max_tokens=500, ignore_eos=True)
            for _ in range(4)
        ]
        for stream in streams:
            next(iter(stream))
        stack.drafter.freeze()
        for stream in streams:
            stream.close()
        assert text(client, "none", temperature=0.0)[0] == plain
        stack.drafter.thaw()
        wait_until(lambda: client.server_info().verifiers[0].sessions == 0, what="no sessions")
        check_drafts(stack, client, plain)


@pytest.mark.parametrize("options", GARBAGE)
def test_garbage_in_the_buffers_changes_no_text_and_ends_no_process(
    stack: Stack, switches: dict[str, Path], plain: tuple[int, ...], options: str
) -> None:
    pids = (stack.verifier.pid, stack.drafter.pid)
    with Client(stack.router.address, timeout_s=60.0) as client:
        for _ in range(2):
            wait_until(lambda: text(client, "eagle3", temperature=0.0)[1] > 0, what="drafts")
            begun, written = exchanges(stack), count(stack.drafter, GARBAGE_WRITTEN)
            assert text_through(client, switches[options].touch) == plain
            switches[options].unlink()
            assert count(stack.drafter, GARBAGE_WRITTEN) > written
            # With a sound number the exchange goes on, and garbage is read round after round.
            assert "number=true" in options or exchanges(stack) == begun
        check_drafts(stack, client, plain)
    assert stack.verifier.alive and stack.drafter.alive
    assert pids == (stack.verifier.pid, stack.drafter.pid)
    assert count(stack.drafter, "drafting thread: unexpected error") == 0


def test_a_drafter_that_is_late_changes_no_text(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    slow = ["--hook", "outrider_bench.hooks.exchange_delay:delay_ms=60"]
    with (
        serving(tmp_path, tiny_target, tiny_head, slow) as stack,
        Client(stack.router.address, timeout_s=60.0) as client,
    ):
        wait_until(lambda: exchanges(stack) > 0, what="an exchange")
        plain, _ = text(client, "none", temperature=0.0)
        assert text(client, "eagle3", temperature=0.0)[0] == plain


def test_sessions_whose_drafter_was_lost_draft_with_its_successor(stack: Stack) -> None:
    verifier = stack.verifier
    prompts = [PROMPT, [*PROMPT, user("Go on.")]]
    options: list[dict[str, Any]] = [
        {"max_tokens": LONG, "ignore_eos": True, "seed": 3, "temperature": temperature}
        for temperature in (0.0, 0.8)
    ]
    with Client(stack.router.address, timeout_s=90.0) as client:
        plain = [
            client.generate(prompt, drafter="none", **each).token_ids
            for prompt, each in zip(prompts, options, strict=True)
        ]
        before, recovered = exchanges(stack), metric(verifier, RECOVERIES)
        streams = [
            client.stream(prompt, drafter="eagle3", **each)
            for prompt, each in zip(prompts, options, strict=True)
        ]
        heard = [list(next(iter(stream)).token_ids) for stream in streams]
        # Answers are to last for longer than the next drafter takes to start.
        verifier.signal(signal.SIGUSR1)
        stack.drafter.kill()
        stack.drafter.restart()
        wait_until(lambda: exchanges(stack) > before, what="another exchange")
        wait_until(lambda: metric(verifier, RECOVERIES) == recovered + 2, what="both sessions")
        verifier.signal(signal.SIGUSR2)
        proposed = metric(verifier, PROPOSED)
        for ids, stream in zip(heard, streams, strict=True):
            for delta in stream:
                ids += delta.token_ids
        # A random head guesses next to nothing; what it drafts is verified round after round.
        assert metric(verifier, PROPOSED) > proposed + LONG
    assert [tuple(ids) for ids in heard] == plain


def test_a_verifier_without_room_at_its_drafter_drafts_by_messages(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_DRAFTER_EXCHANGE_KV_ROWS", "16")
    with (
        serving(tmp_path, tiny_target, tiny_head, []) as stack,
        Client(stack.router.address, timeout_s=60.0) as client,
    ):
        wait_until(lambda: count(stack.verifier, "no replica") > 0, what="a refusal")
        assert "device exchange not open" in list(describe_server(client.server_info()))[1]
        plain, _ = text(client, "none", temperature=0.0)
        drafted, proposed = text(client, "eagle3", temperature=0.0)
        assert (drafted, exchanges(stack)) == (plain, 0)
        assert proposed > 0
