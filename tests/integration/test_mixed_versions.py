"""Processes of different versions: one protocol works together, two are refused with a reason."""

from __future__ import annotations

from pathlib import Path

import outrider
from outrider.client import Client, user
from outrider.wire.messages import PROTOCOL_VERSION
from tests.integration.stack import Process, Stack, slow_rounds
from tests.waiting import wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
TOKENS = 60
NEXT_VERSION = ["--hook", "tests.fakes.other_version:version=9.1.0"]
OTHER_PROTOCOL = f"tests.fakes.other_version:version=9.1.0,protocol={PROTOCOL_VERSION + 1}"


def test_a_fleet_is_upgraded_process_by_process_while_it_serves(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    """The verifier and the drafter of the next version join, and those of this version leave."""
    model, head = str(tiny_target), str(tiny_head)
    upgraded = {
        "verifier": ["--model", model, "--feature-head", head, "--verifier-id", "next"],
        "drafter": ["--model", model, "--head", head, "--methods", "eagle3,ngram"],
    }
    following = {
        role: Process(role, f"outrider_{role}", [*flags, *NEXT_VERSION], tmp_path / f"next-{role}")
        for role, flags in upgraded.items()
    }
    following["verifier"].start(listen="127.0.0.1:0")
    try:
        joined = following["verifier"].wait_ready().address
        router = ["--verifier", joined]
        with (
            Stack(
                tmp_path, model=model, head=head, router=router, verifier=slow_rounds(15)
            ) as stack,
            stack.client() as client,
        ):
            calm = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
            stream = client.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True)
            first = next(iter(stream))
            # The drafter is replaced at its address, and the verifier by the one that joined.
            stack.drafter.end()
            following["drafter"].start(listen=stack.drafter.address).wait_ready()
            assert stack.verifier.end(timeout_s=40.0) == 0
            text = first.text + "".join(delta.text for delta in stream)
            assert text == calm.text

            def drafts() -> bool:
                info = client.server_info()
                return any(d.healthy for d in info.drafters)

            wait_until(drafts, timeout_s=30.0, what="the next drafter at the next verifier")
            result = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
            assert result.text == calm.text and result.finish.stats.proposed > 0
    finally:
        for process in following.values():
            process.stop()


def test_processes_of_another_protocol_are_refused_with_both_versions(
    tiny_target: Path, tmp_path: Path
) -> None:
    model = ["--model", str(tiny_target)]
    other = ["--hook", OTHER_PROTOCOL]
    flags = {
        "verifier": ("outrider_verifier", model),
        "other-verifier": ("outrider_verifier", [*model, "--verifier-id", "other", *other]),
        "other-drafter": ("outrider_drafter", [*model, "--methods", "ngram", *other]),
    }
    peers = [
        Process(name, module, arguments, tmp_path / f"{name}.log")
        for name, (module, arguments) in flags.items()
    ]
    router = Process("router", "outrider_router", [], tmp_path / "router.log")
    try:
        for peer in peers:
            peer.start()
        fleet = []
        for peer in peers:
            fleet += [f"--{peer.name.rpartition('-')[2]}", peer.wait_ready().address]
        router = Process("router", "outrider_router", [*model, *fleet], tmp_path / "router.log")
        router.start().wait_ready()
        with Client(router.address, timeout_s=30.0) as client:
            assert len(client.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5

            def refused() -> list[str]:
                info = client.server_info()
                return [peer.problem for peer in (*info.verifiers, *info.drafters) if peer.problem]

            wait_until(lambda: len(refused()) == 2, what="two peers that are refused")
            for problem in refused():
                for part in ("9.1.0", outrider.__version__, "second fleet"):
                    assert part in problem
        log = router.log_path.read_text(encoding="utf-8")
        assert log.count("peer refused") == 2 and "Traceback" not in log
    finally:
        for process in (router, *peers):
            process.stop()
