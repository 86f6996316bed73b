"""A verifier and a drafter that exchange between devices (on a CPU: by shared memory), as real
processes: texts are those without, also when the drafter is killed or stopped meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import Client, user
from tests.integration.stack import Stack
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
LENGTH = 80


def exchanges(log: Path) -> int:
    """How often a verifier has begun to exchange between devices."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return sum(line.get("event") == "exchanging between devices" for line in lines)


@pytest.fixture(scope="module")
def stack(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("exchange")
    # On busy cores a drafter may be late.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_VERIFIER_EXCHANGE_TIMEOUT_MS", "1000")
        yield from serving(directory, tiny_target, tiny_head)


def serving(directory: Path, tiny_target: Path, tiny_head: Path) -> Iterator[Stack]:
    flags = ["--device-exchange"]
    with Stack(
        directory,
        model=str(tiny_target),
        head=str(tiny_head),
        verifier=flags,
        drafter=flags,
    ) as stack:
        wait_until(lambda: exchanges(stack.verifier.log_path) > 0, what="an exchange")
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


def test_a_killed_drafter_changes_no_text_and_its_successor_drafts(stack: Stack) -> None:
    log = stack.verifier.log_path
    before = exchanges(log)
    with Client(stack.router.address, timeout_s=60.0) as client:
        plain, _ = text(client, "none", temperature=0.0)
        options = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.0}
        with client.stream(PROMPT, drafter="eagle3", seed=3, **options) as stream:
            ids = list(next(iter(stream)).token_ids)
            stack.drafter.kill()
            for delta in stream:
                ids += delta.token_ids
        assert tuple(ids) == plain
        stack.drafter.restart()
        wait_until(lambda: exchanges(log) > before, what="another exchange")
        wait_until(lambda: text(client, "eagle3", temperature=0.0)[1] > 0, what="drafts")
        assert text(client, "eagle3", temperature=0.0)[0] == plain
