"""A process whose device stops working ends with status 1, and is missed like a killed one."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.client import user
from tests.integration.stack import Process, Stack, connect
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
AFTER = 40
"""Rounds or drafts that work."""
EXIT_S = 60.0

MakeStack = Callable[[str], AbstractContextManager[tuple[Stack, "Lossy"]]]


class Lossy(Process):
    """A process whose device is lost after `AFTER` calls."""

    def __init__(self, which: str, arguments: list[str], log: Path) -> None:
        self.log = log
        lose = ["--lose", which, "--after", str(AFTER)]
        super().__init__(which, "tests.fakes.lossy", [*lose, *arguments], log)

    def status(self) -> int:
        """The exit status, once the process has ended by itself."""
        return self.wait_ended(EXIT_S)

    def levels(self) -> list[str]:
        """Levels of the log records."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["level"].upper() for line in lines if line.startswith("{")]


@pytest.fixture
def lossy_stack(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> MakeStack:
    """Makes a stack in which the named process loses its device."""

    @contextmanager
    def make(which: str) -> Iterator[tuple[Stack, Lossy]]:
        model, head = str(tiny_target), str(tiny_head)
        stack = Stack(tmp_path, model=model, head=head)
        own = {
            "verifier": ["--model", model, "--feature-head", head],
            "drafter": ["--model", model, "--head", head, "--methods", "eagle3"],
        }
        lossy = Lossy(which, own[which], tmp_path / f"{which}.log")
        if which == "verifier":
            stack.verifier = stack.verifiers[0] = lossy
        else:
            stack.drafter = lossy
        with stack:
            yield stack, lossy

    return make


def test_a_verifier_that_loses_its_device_ends_and_its_streams_go_on_with_the_next_one(
    lossy_stack: MakeStack,
) -> None:
    with (
        lossy_stack("verifier") as (stack, verifier),
        connect(stack) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        stream = pool.submit(
            client.generate, PROMPT, max_tokens=AFTER + 20, ignore_eos=True, drafter="none"
        )
        assert verifier.status() == 1
        assert verifier.levels().count("CRITICAL") == 1
        assert not stream.done()
        # What a keeper does.
        verifier.restart()
        result = stream.result(timeout=60)
        assert len(result.token_ids) == AFTER + 20
        assert result.finish.reason == "length"


def test_a_drafter_that_loses_its_device_ends_and_changes_no_token(
    lossy_stack: MakeStack,
) -> None:
    with lossy_stack("drafter") as (stack, drafter), connect(stack) as client:
        options: Any = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "seed": 7}
        plain = client.generate(PROMPT, drafter="none", **options)
        result = client.generate(PROMPT, **options)
        assert result.token_ids == plain.token_ids
        assert result.finish.stats.proposed > 0
        assert drafter.status() == 1
        assert drafter.levels().count("CRITICAL") == 1
        wait_until(lambda: not client.server_info().drafters[0].healthy, what="noticed")
        assert client.generate(PROMPT, **options).token_ids == plain.token_ids
