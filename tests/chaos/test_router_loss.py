"""The router is killed while streams run: with a journal and the SDK nobody hears but a pause."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest

from outrider.client import Client, ConnectionLostError, GenerateResult, RetryPolicy, user
from tests.integration.stack import Process, Stack, StackOptions, slow_rounds
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
TOKENS = 84
PATIENT = RetryPolicy(max_attempts=8)
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.3},
    "rejection": {"temperature": 0.8, "seed": 7, "rule": "rejection"},
    "plain rejection": {"temperature": 0.8, "seed": 7, "rule": "rejection", "drafter": "none"},
}


@pytest.fixture(scope="module")
def stack_options(tmp_path_factory: pytest.TempPathFactory) -> StackOptions:
    log = tmp_path_factory.mktemp("journalled") / "journal" / "log"
    return {"router": ["--journal", str(log)], "verifier": slow_rounds(15)}


def answer(client: Client, options: dict[str, object]) -> GenerateResult:
    return client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, **options)  # type: ignore[arg-type]


class Told:
    """One stream, read in a thread of its own."""

    def __init__(self, client: Client, options: dict[str, object]) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.result: GenerateResult | None = None
        self.error: Exception | None = None
        self._stream = client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True, **options)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            with self._stream as stream:
                for delta in stream:
                    self.tokens += delta.token_ids
                    self.times.append(time.monotonic())
                self.result = stream.result()
        except Exception as error:
            self.error = error

    @property
    def longest_gap_s(self) -> float:
        return max(b - a for a, b in itertools.pairwise(self.times))


def held(client: Client) -> tuple[int, int, int]:
    info = client.server_info()
    return info.running, info.queued, sum(peer.sessions for peer in info.verifiers)


@pytest.mark.parametrize("stop", ["kill", "stop"])
def test_streams_go_on_over_a_restart_of_the_router_with_the_same_texts(
    survivor: Stack, stop: str
) -> None:
    router = survivor.router
    with Client(router.address, timeout_s=90.0, retry=PATIENT) as client:
        calm = {name: answer(client, options) for name, options in OPTIONS.items()}
        streams = {name: Told(client, options) for name, options in OPTIONS.items()}
        wait_until(lambda: all(len(told.tokens) > 20 for told in streams.values()))
        getattr(router, stop)()
        heard = {name: list(told.tokens) for name, told in streams.items()}
        assert any(len(tokens) < TOKENS for tokens in heard.values()), "the stop came too late"
        router.restart()
        for name, told in streams.items():
            told.thread.join(60)
            assert told.error is None and told.result is not None
            assert tuple(told.tokens) == told.result.token_ids and len(told.tokens) == TOKENS
            assert told.tokens[: len(heard[name])] == heard[name]
            if name != "rejection":
                # Whose text depends on what was drafted, but never takes back what was said.
                assert told.result.token_ids == calm[name].token_ids
                assert told.result.text == calm[name].text
        wait_until(lambda: held(client) == (0, 0, 0), what="nothing held")


def test_two_routers_of_one_fleet_do_not_disturb_each_other(
    survivor: Stack, tiny_target: Path, tmp_path: Path
) -> None:
    fleet = ["--verifier", survivor.verifier.address, "--drafter", survivor.drafter.address]
    other = Process(
        "other", "outrider_router", ["--model", str(tiny_target), *fleet], tmp_path / "log"
    )
    # A router without a journal: what ran there ends with it, and nothing else does.
    other.start().wait_ready()
    try:
        with (
            Client(survivor.router.address, timeout_s=90.0, retry=PATIENT) as mine,
            Client(
                other.address, timeout_s=90.0, retry=RetryPolicy(max_attempts=1, resume_s=0.5)
            ) as theirs,
        ):
            wait_until(lambda: all(peer.healthy for peer in theirs.server_info().drafters))
            # The same id at both: ids are each router's own.
            options: dict[str, object] = {"temperature": 0.8, "seed": 7, "request_id": "same"}
            calm = answer(mine, options)
            streams = [Told(mine, options), Told(theirs, options)]
            wait_until(lambda: all(len(told.tokens) > 20 for told in streams))
            other.kill()
            for told in streams:
                told.thread.join(60)
            kept, lost = streams
            assert kept.error is None and kept.result is not None
            assert kept.result.token_ids == calm.token_ids
            assert isinstance(lost.error, ConnectionLostError) or lost.result is not None
            assert tuple(lost.tokens) == calm.token_ids[: len(lost.tokens)]
            wait_until(lambda: held(mine) == (0, 0, 0), what="nothing held")
            again = answer(mine, options)
            assert again.token_ids == calm.token_ids and again.finish.stats.proposed > 0
    finally:
        other.stop()
