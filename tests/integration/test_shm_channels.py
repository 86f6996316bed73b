"""Drafters and routers on the verifier's host use shared-memory channels, which change no text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.client import Client, user
from tests.integration.stack import Stack
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]


def shm_channels_in(log: Path) -> list[bool]:
    """Return for each exchange in a log whether it had a shared-memory channel."""
    return _found(log, "shared_memory")


def _found(log: Path, key: str) -> list[bool]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line[key] for line in lines if key in line]


def texts(stack: Stack) -> list[tuple[int, ...]]:
    """Return the tokens of a request with a drafter, and of the same request without."""
    found: list[tuple[int, ...]] = []
    with Client(stack.router.address, timeout_s=60.0) as client:
        for drafter in ("eagle3", "none"):
            result = client.generate(
                PROMPT, max_tokens=60, ignore_eos=True, drafter=drafter, temperature=0.8, seed=3
            )
            assert (result.finish.stats.proposed > 0) is (drafter != "none")
            found.append(result.token_ids)
    return found


@pytest.mark.parametrize(
    ("router", "verifier", "drafter", "shm_channel", "by_shm_channel"),
    [
        ([], [], [], True, True),
        ([], ["--no-shared-memory"], [], False, False),
        (["--no-shared-memory"], [], ["--no-shared-memory"], False, False),
    ],
)
def test_rounds_use_shared_memory_where_both_ends_allow_it(
    tiny_target: Path,
    tiny_head: Path,
    tmp_path: Path,
    router: list[str],
    verifier: list[str],
    drafter: list[str],
    shm_channel: bool,
    by_shm_channel: bool,
) -> None:
    flags = {"router": router, "verifier": verifier, "drafter": drafter}
    with Stack(tmp_path, model=str(tiny_target), head=str(tiny_head), **flags) as stack:
        drafted, plain = texts(stack)
        assert _found(tmp_path / "verifier.log", "by_shm") == [by_shm_channel]
        assert drafted == plain
        assert shm_channels_in(tmp_path / "verifier.log") == [shm_channel]
        assert shm_channels_in(tmp_path / "drafter.log") == [shm_channel]
        stack.drafter.kill()
        stack.drafter.restart()
        wait_until(stack.healthy, timeout_s=30.0, what="the drafter's return")
        assert texts(stack) == [drafted, plain]
        assert shm_channels_in(tmp_path / "verifier.log") == [shm_channel, shm_channel]
