"""The drafting thread."""

from __future__ import annotations

import queue
import time

import pytest
from outrider_drafter.ngram import NgramSource
from outrider_drafter.worker import DraftWorker

from outrider.spec.plan import DraftMethod, Plan
from outrider.wire.messages import Proposal
from tests.unit.drafter.helpers import Script, make_engine

NGRAM = Plan(method=DraftMethod.NGRAM, draft_tokens=3)


def test_verdicts_that_wait_together_are_drafted_once_at_the_newest() -> None:
    script = Script()
    script.tokens[:] = [i % 5 for i in range(len(script.tokens))]
    found: queue.Queue[tuple[int, Proposal]] = queue.Queue()
    worker = DraftWorker(
        make_engine([NgramSource(min_match=1)]),
        lambda c, p: found.put_nowait((c, p)),
        on_lost=_never,
    )
    worker.submit(7, script.start(plan=NGRAM))
    for end in (10, 12, 15):
        worker.submit(7, script.verdict(end))
    worker.start()
    connection, proposal = found.get(timeout=10)
    worker.stop()
    assert (connection, proposal.prefix_len) == (7, 15)
    assert found.empty()
    assert worker.backlog == 0 and not worker.alive


def test_an_error_while_delivering_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script()
    script.tokens[:] = [i % 5 for i in range(len(script.tokens))]
    found: queue.Queue[int] = queue.Queue()

    def deliver(connection: int, proposal: Proposal) -> None:
        if proposal.prefix_len == 10:
            raise RuntimeError("broken delivery")
        found.put_nowait(proposal.prefix_len)

    worker = DraftWorker(make_engine([NgramSource(min_match=1)]), deliver, on_lost=_never)
    worker.start()
    worker.submit(1, script.start(plan=NGRAM))
    worker.submit(1, script.verdict(10))
    for _ in range(2000):
        if caplog.records:
            break
        time.sleep(0.005)
    assert "unexpected error" in caplog.text
    worker.submit(1, script.verdict(12))
    assert found.get(timeout=10) == 12
    worker.stop()
    worker.stop()


def _never() -> None:
    raise AssertionError("no device was lost")
