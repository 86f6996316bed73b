"""What `outrider status` says of peers that are not as usual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.client.commands.status import describe_server
from outrider.ids import DrafterId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.wire.inference import DrafterSummary, ServerInfo, VerifierSummary
from outrider.wire.messages import DeviceExchangeInfo, MemoryKind


def peer_line(
    *, verifiers: tuple[VerifierSummary, ...] = (), drafters: tuple[DrafterSummary, ...] = ()
) -> str:
    """What is said of the only peer of a server."""
    info = ServerInfo(
        version="1",
        protocol_version=1,
        queued=0,
        queue_bound=1,
        running=1,
        verifiers=verifiers,
        drafters=drafters,
    )
    return list(describe_server(info))[1]


def line(handicap: str) -> str:
    """What is said of a drafter."""
    drafter = DrafterSummary(
        drafter_id=DrafterId("d"),
        address="a:2",
        healthy=True,
        methods=(DraftMethod.EAGLE3,),
        sessions=1,
        handicap=handicap,
    )
    return peer_line(drafters=(drafter,))


def test_a_drafter_that_is_slowed_down_is_never_taken_for_a_usual_one() -> None:
    assert line("drafts 2x as slow").endswith("SLOWED DOWN: drafts 2x as slow")
    assert "SLOWED" not in line("")


def told(*, healthy: bool = True, **more: Any) -> str:
    """What is said of a verifier."""
    verifier = VerifierSummary(
        verifier_id=VerifierId("v"),
        address="a:1",
        healthy=healthy,
        model="m",
        sessions=3,
        max_sessions=8,
        kv_free_blocks=1,
        kv_total_blocks=4,
        **more,
    )
    return peer_line(verifiers=(verifier,))


def test_a_verifier_that_drains_or_preempts_is_told_from_a_usual_one() -> None:
    assert "about to stop" in told(draining=True)
    pressed = told(waiting_sessions=2, preemptions_swap=5, preemptions_recompute=7)
    assert "2 sessions wait for KV blocks" in pressed
    assert "preempted 5 times by swap, 7 by recompute" in pressed
    assert "25% of prompt tokens were there" in told(
        prefix_cache_query_tokens=80, prefix_cache_hit_tokens=20
    )
    assert "were there" not in told()
    assert "stop" not in told() and "preempted" not in told()


def test_the_reason_for_which_a_verifier_is_not_used_is_told() -> None:
    assert "NOT HEALTHY (it speaks protocol 1)," in told(
        healthy=False, problem="it speaks protocol 1"
    )
    assert "NOT HEALTHY," in told(healthy=False)


def test_how_a_verifier_exchanges_between_devices_is_told() -> None:
    exchange = DeviceExchangeInfo(
        drafter_id=DrafterId("d"), memory=MemoryKind.DEVICE, draft_length=3
    )
    assert told(device_exchange=exchange).endswith(
        "device exchange with d in device memory, chains of 3 draft tokens"
    )
    measured = replace(exchange, memory=MemoryKind.HOST, idle_us_p50=24.6, idle_rows=8)
    assert told(device_exchange=measured).endswith(
        "device exchange with d in pinned memory of the host, "
        "chains of 3 draft tokens, GPU idle 25 us before a round of 8 sessions"
    )
    assert told(device_exchange=DeviceExchangeInfo(draft_length=3)).endswith(
        "device exchange not open: drafts pass by messages (shared memory or gRPC)"
    )
    assert told().endswith("device exchange off")
    assert "device exchange" not in told(in_process_methods=(DraftMethod.EAGLE3,))
