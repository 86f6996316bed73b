"""A drafter behind a slow link, or on a slow device: the same text, later, and it is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from outrider.client import Client, user
from outrider.client.commands.status import describe_server
from tests.integration.stack import Stack
from tests.integration.test_shm_channels import shm_channels_in

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
DELAY_MS = 30.0


@pytest.mark.parametrize("shm_channel", [True, False])
def test_every_round_takes_the_delay_both_ways(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, shm_channel: bool
) -> None:
    flags = [
        "--hook",
        f"outrider_bench.hooks.slow_link:delay_ms={DELAY_MS}",
        *([] if shm_channel else ["--no-shared-memory"]),
    ]
    model, head = str(tiny_target), str(tiny_head)
    with (
        Stack(tmp_path, model=model, head=head, drafter=flags) as stack,
        Client(stack.router.address, timeout_s=60.0) as client,
    ):
        assert shm_channels_in(tmp_path / "drafter.log") == [shm_channel]
        plain = client.generate(PROMPT, max_tokens=24, ignore_eos=True, drafter="none")
        began = time.monotonic()
        drafted = client.generate(
            PROMPT, max_tokens=24, ignore_eos=True, drafter="eagle3", look_ahead=0
        )
        taken_s = time.monotonic() - began
        assert drafted.token_ids == plain.token_ids
        stats = drafted.finish.stats
        drafts = stats.rounds - stats.fallback_rounds
        assert drafts > 0
        assert taken_s >= drafts * 2.0 * DELAY_MS / 1000.0
        told = "\n".join(describe_server(client.server_info()))
        assert "SLOWED DOWN: exchange held by 30 ms each way" in told
