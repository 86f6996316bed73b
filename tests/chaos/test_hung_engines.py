"""The engine thread of a verifier or drafter hangs, or a verifier says nothing of its sessions:
streams go on elsewhere, or end with a typed error, and the process ends so that it is restarted."""

from __future__ import annotations

import signal
import threading
import time
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.build_info import COMPILED
from outrider.client import UnavailableError, user
from outrider.watchdog import EXIT_STALLED
from tests.integration.gap_meter import GapMeter, Gaps, measure_calm
from tests.integration.stack import Stack, StackOptions, connect, metric, slow_rounds
from tests.waiting import wait_until

STALL_S, ROUTER_STALL_S, FAILOVER_S = 2.5, 4.0, 5.0
EXTRA_S = 2.0
"""What noticing and a prefill may take on a busy machine."""

REPLACES = pytest.mark.skipif(COMPILED, reason="its fake process replaces a part of compiled code")


@pytest.fixture(scope="module")
def stack_options(tmp_path_factory: pytest.TempPathFactory) -> StackOptions:
    directory = tmp_path_factory.mktemp("settings")
    watched, router = directory / "watched.toml", directory / "router.toml"
    watched.write_text(f"stall_s = {STALL_S}\n")
    router.write_text(f"verifier_stall_s = {ROUTER_STALL_S}\nfailover_timeout_s = {FAILOVER_S}\n")
    return {
        "router": ["--metrics-port", "0", "--http", "127.0.0.1:0", "--config", str(router)],
        "verifier": [*slow_rounds(14), "--config", str(watched)],
        "drafter": ["--config", str(watched), "--metrics-port", "0"],
        "spare": 1,
        "verifier_module": "tests.fakes.hung_verifier",
        "drafter_module": "tests.fakes.hung_drafter",
    }


@pytest.fixture(scope="module")
def calm(survivor: Stack) -> Gaps:
    return measure_calm(survivor.router.address, survivor.router.ready["http"], streams=4)


def health(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0).status)


def router_status(stack: Stack) -> int:
    try:
        with urllib.request.urlopen(f"http://{stack.router.ready['http']}/health") as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_with_a_spare_its_streams_go_on_there_and_the_process_ends(
    stack: Stack, calm: Gaps
) -> None:
    http = stack.router.ready["http"]
    with GapMeter(stack.router.address, http, streams=4) as meter:
        wait_until(lambda: meter.gaps.tokens > 40, what="streams")
        stack.verifier.signal(signal.SIGUSR1)
        assert stack.verifier.wait_ended(STALL_S + EXTRA_S + 5.0) == EXIT_STALLED
        tokens = meter.gaps.tokens
        wait_until(lambda: meter.gaps.tokens > tokens + 40, what="streams that go on")
    meter.gaps.assert_close_to(calm, extra_s=STALL_S + EXTRA_S)
    assert meter.gaps.stream_s >= STALL_S - 0.5
    assert meter.gaps.health_s < calm.health_s + 1.0


@REPLACES
def test_a_router_notices_a_verifier_that_says_nothing(stack: Stack, calm: Gaps) -> None:
    http, losses = stack.router.ready["http"], "outrider_verifier_losses_total"
    before = metric(stack.router, losses)
    stack.verifier.signal(signal.SIGUSR2)
    with GapMeter(stack.router.address, http, streams=4) as meter:
        # Texts of a stream that was opened there begin elsewhere.
        time.sleep(ROUTER_STALL_S + EXTRA_S + 1.0)
    assert not meter.gaps.errors
    assert meter.gaps.health_s < calm.health_s + 1.0
    assert metric(stack.router, losses) > before
    with connect(stack) as client:
        peers = {str(peer.verifier_id): peer for peer in client.server_info().verifiers}
        assert peers["spare"].healthy and not peers["verifier-0"].healthy
        # It gets nothing as long as it makes no progress.
        began = time.monotonic()
        for _ in range(3):
            client.generate([user("hello")], max_tokens=4)
        assert time.monotonic() - began < ROUTER_STALL_S
    stack.verifier.restart()


def test_without_a_spare_the_client_gets_a_typed_error_and_a_restart_serves_again(
    stack: Stack,
) -> None:
    hung, spare = stack.verifiers
    spare.kill()
    states: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            try:
                states.append(health(hung.address))
            except grpc.RpcError:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    with connect(stack) as client:
        stream = client.stream([user("Count.")], max_tokens=400, ignore_eos=True)
        with stream, pytest.raises(UnavailableError) as refused:
            began = 0.0
            for count, _ in enumerate(stream):
                if count == 5:
                    hung.signal(signal.SIGUSR1)
                    began = time.monotonic()
        # The wait for a hung verifier is part of the time that a failover may take.
        assert time.monotonic() - began < FAILOVER_S + EXTRA_S
        assert refused.value.reason == "VERIFIER_LOST"
    ended.set()
    watcher.join()
    assert hung.wait_ended(5.0) == EXIT_STALLED
    assert health_pb2.HealthCheckResponse.NOT_SERVING in states
    assert router_status(stack) == 503
    hung.restart()
    wait_until(lambda: router_status(stack) == 200, timeout_s=20.0, what="a healthy router")
    with connect(stack) as client:
        assert client.generate([user("Count.")], max_tokens=4, ignore_eos=True).token_ids


@REPLACES
def test_a_hung_drafter_ends_and_its_sessions_go_on(stack: Stack, calm: Gaps) -> None:
    with GapMeter(stack.router.address, streams=2) as meter:
        wait_until(lambda: meter.gaps.tokens > 20, what="streams")
        stack.drafter.signal(signal.SIGUSR1)
        assert stack.drafter.wait_ended(STALL_S + EXTRA_S + 5.0) == EXIT_STALLED
        tokens = meter.gaps.tokens
        wait_until(lambda: meter.gaps.tokens > tokens + 20, what="streams that go on")
    # The fixed planner waits for a proposal as long as the plan says, a second.
    meter.gaps.assert_close_to(calm, extra_s=STALL_S + EXTRA_S)
