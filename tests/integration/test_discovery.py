"""Processes that find each other by a name: the router's command line takes dns:///HOST:PORT."""

from __future__ import annotations

from pathlib import Path

from outrider.client import Client, user
from tests.integration.stack import Process
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]


def test_a_router_serves_with_peers_behind_names(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    model, head = str(tiny_target), str(tiny_head)
    flags = {
        "verifier": ["--model", model, "--feature-head", head, "--planner", "fixed"],
        "drafter": ["--model", model, "--head", head, "--methods", "eagle3"],
    }
    peers = {
        role: Process(role, f"outrider_{role}", own, tmp_path / f"{role}.log")
        for role, own in flags.items()
    }
    try:
        for process in peers.values():
            process.start()
        named = [
            part
            for role, process in peers.items()
            for part in (f"--{role}", f"dns:///{process.wait_ready().address}")
        ]
        peers["router"] = router = Process(
            "router", "outrider_router", ["--model", model, *named], tmp_path / "router.log"
        )
        router.start().wait_ready()
        with Client(router.address, timeout_s=30.0) as client:

            def drafts() -> bool:
                drafters = client.server_info().drafters
                return any(d.healthy and d.links for d in drafters)

            wait_until(drafts, timeout_s=30.0, what="a drafter at its verifier")
            result = client.generate(PROMPT, max_tokens=40, ignore_eos=True)
            assert len(result.token_ids) == 40 and result.finish.stats.proposed > 0
        assert router.end() == 0
    finally:
        for process in peers.values():
            process.stop()
