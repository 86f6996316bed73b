"""The router is killed while streams run; with a journal and the SDK nobody hears more than a pause."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import Client, GenerateResult, RetryPolicy, user
from tests.integration.stack import Stack, wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
TOKENS = 400
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.3},
    "rejection": {"temperature": 0.8, "seed": 7, "rule": "rejection"},
    "plain rejection": {"temperature": 0.8, "seed": 7, "rule": "rejection", "drafter": "none"},
}


@pytest.fixture(scope="module")
def survivor(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("journalled")
    with Stack(
        directory,
        model=str(tiny_target),
        head=str(tiny_head),
        router=["--metrics-port", "0", "--journal", str(directory / "journal" / "log")],
    ) as running:
        yield running


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
        self.thread = threading.Thread(target=self._read)
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
    with Client(router.address, timeout_s=90.0, retry=RetryPolicy(max_attempts=8)) as client:
        calm = {name: answer(client, options) for name, options in OPTIONS.items()}
        streams = {name: Told(client, options) for name, options in OPTIONS.items()}
        unary: list[GenerateResult] = []
        asking = threading.Thread(target=lambda: unary.append(answer(client, OPTIONS["coupled"])))
        asking.start()
        wait_until(lambda: all(len(told.tokens) > 40 for told in streams.values()))
        getattr(router, stop)()
        heard = {name: list(told.tokens) for name, told in streams.items()}
        assert any(len(tokens) < TOKENS for tokens in heard.values()), "the kill came too late"
        router.restart()
        for told in streams.values():
            told.thread.join(60)
            assert told.error is None
        asking.join(60)
        for name, told in streams.items():
            assert told.result is not None
            assert tuple(told.tokens) == told.result.token_ids and len(told.tokens) == TOKENS
            assert told.tokens[: len(heard[name])] == heard[name]
            if name != "rejection":
                # Whose text depends on what was drafted, but never takes back what was said.
                assert told.result.token_ids == calm[name].token_ids
                assert told.result.text == calm[name].text
        assert unary[0].text == calm["coupled"].text
        print({name: round(told.longest_gap_s, 2) for name, told in streams.items()})
        wait_until(lambda: held(client) == (0, 0, 0), what="nothing held")
