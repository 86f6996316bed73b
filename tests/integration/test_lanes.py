"""Drafters of the verifier's host get a lane; texts are the same with and without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.client import Client, user
from tests.integration.stack import Stack, wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]


def lanes_in(log: Path) -> list[bool]:
    """Of each connection that a log tells of, whether it had a lane."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line["lane"] for line in lines if "lane" in line]


def texts(stack: Stack) -> list[tuple[int, ...]]:
    """Answers with drafts and without."""
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
    ("verifier", "drafter", "lane"),
    [([], [], True), (["--no-lanes"], [], False), ([], ["--no-lanes"], False)],
)
def test_rounds_go_by_a_lane_where_both_want_one(
    tiny_target: Path,
    tiny_head: Path,
    tmp_path: Path,
    verifier: list[str],
    drafter: list[str],
    lane: bool,
) -> None:
    model, head = str(tiny_target), str(tiny_head)
    with Stack(tmp_path, model=model, head=head, verifier=verifier, drafter=drafter) as stack:
        drafted, plain = texts(stack)
        assert drafted == plain
        assert lanes_in(tmp_path / "verifier.log") == [lane]
        assert lanes_in(tmp_path / "drafter.log") == [lane]
        stack.drafter.kill()
        stack.drafter.restart()
        wait_until(stack.healthy, timeout_s=30.0, what="the drafter's return")
        assert texts(stack) == [drafted, plain]
        assert lanes_in(tmp_path / "verifier.log") == [lane, lane]
