"""A verifier sends tokens for ever, and a router is started on a journal that it cannot write or
that was crafted: clients get what they asked for, or a typed error."""

from __future__ import annotations

import signal
import struct
import time
from pathlib import Path

import pytest
from outrider_router.requests.resumption.log_records import EMITTED, HEADER, RECORD_MARK

from outrider.client import InternalError, user
from tests.integration.gap_meter import GapMeter, measure_calm
from tests.integration.stack import Stack, StackOptions, connect, metric, slow_rounds
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal that the router cannot have: its folder is a file."""
    folder = tmp_path_factory.mktemp("journalled") / "folder"
    folder.touch()
    return folder / "log"


@pytest.fixture(scope="module")
def stack_options(journal: Path) -> StackOptions:
    return {
        "router": ["--metrics-port", "0", "--http", "127.0.0.1:0", "--journal", str(journal)],
        "verifier": slow_rounds(14),
        "with_drafter": False,
        "spare": 1,
        "verifier_module": "tests.fakes.hostile_verifier",
    }


def test_a_router_serves_without_a_journal_until_it_can_be_had(stack: Stack, journal: Path) -> None:
    failing = "outrider_journal_failing"
    assert metric(stack.router, failing) == 1
    with connect(stack) as client:
        assert client.generate([user("hello")], max_tokens=4, ignore_eos=True).token_ids
    journal.parent.unlink()
    wait_until(lambda: metric(stack.router, failing) == 0, what="a journal")


def test_a_crafted_journal_holds_no_start(stack: Stack, journal: Path) -> None:
    size = 8 << 20
    head = struct.Struct("<4sIIB")
    heads = (head.pack(RECORD_MARK, size - 13 * at, 1, EMITTED) for at in range(size // 13))
    stack.router.stop()
    journal.write_bytes(HEADER + b"".join(heads) + bytes(size))
    began = time.monotonic()
    stack.router.start(listen=stack.router.address).wait_ready()
    # It took 45 s for half of this.
    assert time.monotonic() - began < 20.0
    wait_until(stack.healthy, timeout_s=20.0, what="a healthy fleet")


def test_a_verifier_that_sends_tokens_for_ever_ends_no_stream_late(stack: Stack) -> None:
    http = stack.router.ready["http"]
    calm = measure_calm(stack.router.address, http, streams=4)
    stack.verifier.signal(signal.SIGUSR1)
    with GapMeter(stack.router.address, http, streams=4) as meter:
        for _ in range(6):
            with connect(stack) as client:
                result = client.generate([user("hello")], max_tokens=20, ignore_eos=True)
            assert len(result.token_ids) == 20
            assert result.finish.usage.completion_tokens == 20
    meter.gaps.assert_close_to(calm)


def test_ids_that_there_are_not_are_a_typed_error_or_a_failover(stack: Stack) -> None:
    stack.verifier.signal(signal.SIGUSR2)
    with connect(stack) as client:
        for _ in range(4):
            try:
                result = client.generate([user("hello")], max_tokens=20, ignore_eos=True)
            except InternalError as error:
                assert error.reason == "INVALID_EVENTS"
            else:
                assert len(result.token_ids) == 20
                assert max(result.token_ids) < 1 << 20
