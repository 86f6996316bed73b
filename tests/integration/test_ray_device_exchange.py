"""Ray actors of one node exchange between devices: on a CPU, by memory that both map."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.client import Client, RetryPolicy, user
from tests.integration.test_ray_runtime import Launcher
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]


def test_actors_exchange_between_devices_and_texts_stay(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    file = tmp_path / "ray.toml"
    # On busy cores a drafter may be late.
    file.write_text("[verifier]\nexchange_timeout_ms = 1000\n")
    arguments = ["--config", str(file), "--model", str(tiny_target), "--head", str(tiny_head)]
    arguments += ["--threads", "1", "--planner", "fixed", "--device-exchange", "on"]
    launcher = Launcher(tmp_path, *arguments)
    try:
        launcher.start().wait_ready()
        with Client(launcher.address, timeout_s=60.0, retry=RetryPolicy(max_attempts=1)) as client:
            plain = client.generate(PROMPT, max_tokens=48, ignore_eos=True, drafter="none")

            def is_drafted_between_devices() -> bool:
                drafted = client.generate(
                    PROMPT, max_tokens=48, ignore_eos=True, drafter="eagle3", draft_tokens=1
                )
                assert drafted.token_ids == plain.token_ids
                # By messages a round has the one node that was asked for, else the verifier's
                # draft_length.
                stats = drafted.finish.stats
                return stats.proposed > 2 * stats.rounds

            wait_until(is_drafted_between_devices, what="an exchange", timeout_s=60.0)
    finally:
        launcher.stop()
