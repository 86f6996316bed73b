"""The drafting thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from outrider_drafter.proposers.interface import OutcomeScores, PendingProposal, SessionDrafts
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.draft_engine import OutgoingProposals, SessionMessage
from outrider_drafter.server.draft_loop import DraftLoop
from outrider_drafter.state.session import FollowedSession

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.wire.messages import Proposals, SessionStart
from tests.unit.drafter.helpers import Script, counted, make_engine, name_of, repeating
from tests.unit.drafter.scripted_look_ahead import AHEAD, ScriptedProposer, counting

NGRAM = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=3)


def test_verdicts_that_wait_together_are_drafted_once_at_the_newest() -> None:
    script = Script()
    script.tokens[:] = [i % 5 for i in range(len(script.tokens))]
    found: queue.Queue[OutgoingProposals] = queue.Queue()
    worker = DraftLoop(make_engine([NgramProposer(min_match=1)]), found.put_nowait, on_lost=_never)
    worker.submit_messages(7, script.start(plan=NGRAM))
    for end in (10, 12, 15):
        worker.submit_messages(7, script.verdict(end))
    worker.start()
    ((connection, message),) = found.get(timeout=10)
    (proposal,) = message.iter_proposals()
    worker.stop()
    assert (connection, proposal.prefix_len) == (7, 15)
    assert found.empty()
    assert worker.backlog(7) == 0 and not worker.is_alive


def test_an_error_while_delivering_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = Script()
    script.tokens[:] = [i % 5 for i in range(len(script.tokens))]
    found: queue.Queue[int] = queue.Queue()

    def deliver(answers: OutgoingProposals) -> None:
        ((_, message),) = answers
        (proposal,) = message.iter_proposals()
        if proposal.prefix_len == 10:
            raise RuntimeError("broken delivery")
        found.put_nowait(proposal.prefix_len)

    worker = DraftLoop(make_engine([NgramProposer(min_match=1)]), deliver, on_lost=_never)
    worker.start()
    worker.submit_messages(1, script.start(plan=NGRAM))
    worker.submit_messages(1, script.verdict(10))
    for _ in range(2000):
        if caplog.records:
            break
        time.sleep(0.005)
    assert "unexpected error" in caplog.text
    worker.submit_messages(1, script.verdict(12))
    assert found.get(timeout=10) == 12
    worker.stop()
    worker.stop()


class Asking(NgramProposer):
    """Notes whether each step of its drafting is in inference mode."""

    def __init__(self) -> None:
        super().__init__(min_match=1)
        self.modes: list[bool] = []

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        self.modes.append(torch.is_inference_mode_enabled())
        yield from super().draft_sessions(sessions)
        self.modes.append(torch.is_inference_mode_enabled())


def test_all_drafting_is_in_inference_mode_whatever_a_proposer_says_of_itself() -> None:
    script, proposer = Script(), Asking()
    found: queue.Queue[OutgoingProposals] = queue.Queue()
    worker = DraftLoop(make_engine([proposer]), found.put_nowait, on_lost=_never)
    worker.submit_messages(1, script.start(plan=NGRAM))
    worker.submit_messages(1, script.verdict(10))
    worker.start()
    found.get(timeout=10)
    worker.stop()
    assert proposer.modes and all(proposer.modes)


class Counting(NgramProposer):
    """Notes how many sessions each batch has."""

    def __init__(self) -> None:
        super().__init__(min_match=1)
        self.sizes: list[int] = []

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        self.sizes.append(len(sessions))
        return super().draft_sessions(sessions)


def test_verdicts_submitted_together_are_drafted_and_delivered_together() -> None:
    proposer, scripts = Counting(), [repeating(name) for name in "abc"]
    found: queue.Queue[OutgoingProposals] = queue.Queue()
    worker = DraftLoop(make_engine([proposer]), found.put_nowait, on_lost=_never)
    worker.start()
    worker.submit_messages(1, *[script.start(plan=NGRAM) for script in scripts])
    for end in (10, 12):
        worker.submit_messages(1, *[script.verdict(end) for script in scripts])
        answers = found.get(timeout=10)
        assert [(c, name_of(p), p.prefix_len) for c, m in answers for p in m.iter_proposals()] == [
            (1, name, end) for name in "abc"
        ]
    worker.stop()
    assert proposer.sizes == [3, 3] and found.empty()


class OneByOne(NgramProposer):
    """Has a draft ready only when the one before it was taken."""

    def __init__(self, taken: queue.Queue[OutgoingProposals]) -> None:
        super().__init__(min_match=1)
        self._taken = taken

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        for place, session in enumerate(sessions):
            assert self._taken.qsize() == place
            yield from super().draft_sessions([session])


def test_a_draft_that_is_ready_early_leaves_early() -> None:
    scripts = [repeating(name) for name in "ab"]
    found: queue.Queue[OutgoingProposals] = queue.Queue()
    worker = DraftLoop(make_engine([OneByOne(found)]), found.put_nowait, on_lost=_never)
    worker.submit_messages(1, *[script.start(plan=NGRAM) for script in scripts])
    worker.submit_messages(1, *[script.verdict(10) for script in scripts])
    worker.start()
    drafts = [found.get(timeout=10) for _ in scripts]
    worker.stop()
    assert [
        [len(p.tree) for _, m in answers for p in m.iter_proposals()] for answers in drafts
    ] == [
        [3],
        [3],
    ]


def test_a_message_that_breaks_the_engine_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = repeating("good"), repeating("bad")
    engine = make_engine([NgramProposer(min_match=1)])
    handle = engine.handle_message

    def fragile(connection: int, message: SessionMessage) -> None:
        if isinstance(message, SessionStart) and message.session_id == "bad":
            raise RuntimeError("injected")
        handle(connection, message)

    monkeypatch.setattr(engine, "handle_message", fragile)
    found: queue.Queue[OutgoingProposals] = queue.Queue()
    worker = DraftLoop(engine, found.put_nowait, on_lost=_never)
    worker.submit_messages(1, bad.start(plan=NGRAM), good.start(plan=NGRAM), good.verdict(10))
    assert worker.backlog(1) == 3 and worker.backlog(2) == 0
    worker.start()
    ((_, message),) = found.get(timeout=10)
    (proposal,) = message.iter_proposals()
    worker.stop()
    assert name_of(proposal) == "good" and worker.backlog(1) == 0
    assert "unexpected error" in caplog.text


def test_metrics_are_written_once_nobody_waits() -> None:
    script = Script()
    found: queue.Queue[OutgoingProposals] = queue.Queue()
    drafting = make_engine([NgramProposer(min_match=1)])
    written: list[float | None] = []

    def verdicts() -> float | None:
        return drafting.metrics.registry.get_sample_value("outrider_drafter_verdicts_total")

    def deliver(answers: OutgoingProposals) -> None:
        written.append(verdicts())
        found.put_nowait(answers)

    worker = DraftLoop(drafting, deliver, on_lost=_never)
    worker.submit_messages(1, script.start(plan=NGRAM))
    worker.submit_messages(1, script.verdict(10))
    worker.start()
    found.get(timeout=10)
    deadline = time.monotonic() + 10
    while verdicts() != 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    worker.stop()
    assert written == [0] and verdicts() == 1


def test_outcomes_are_drafted_for_when_nothing_else_waits() -> None:
    script, proposer = counting(), ScriptedProposer()
    found: queue.Queue[OutgoingProposals] = queue.Queue()
    worker = DraftLoop(make_engine([proposer]), found.put_nowait, on_lost=_never)
    worker.submit_messages(1, script.start(plan=AHEAD), script.verdict(10, with_features=False))
    worker.start()
    assert lengths_of(found.get(timeout=10)) == [10]
    assert lengths_of(found.get(timeout=10))[:2] == [13, 11]
    # A hit: the next thing that leaves is drafted for its outcomes.
    worker.submit_messages(1, script.verdict(13, with_features=False))
    assert 16 in lengths_of(found.get(timeout=10))
    worker.stop()
    assert found.empty() and len(proposer.scored) == 2


def test_a_message_that_waits_ends_a_look_ahead() -> None:
    script, proposer = counting(), ScriptedProposer()
    script.tokens[11:] += 50
    proposer.batch = 1
    found: list[list[int]] = []
    done = threading.Event()

    def deliver(answers: OutgoingProposals) -> None:
        found.append(lengths_of(answers))
        if len(found) == 2:
            # The first draft for an outcome has left: now a verdict contradicts the others.
            worker.submit_messages(1, script.verdict(12, with_features=False))
        if len(found) == 6:
            done.set()

    worker = DraftLoop(make_engine([proposer]), deliver, on_lost=_never)
    worker.submit_messages(1, script.start(plan=AHEAD), script.verdict(10, with_features=False))
    worker.start()
    assert done.wait(10)
    worker.stop()
    assert found[:3] == [[10], [13], [12]]
    assert all(length > 12 for (length,) in found[3:])


def lengths_of(answers: OutgoingProposals) -> list[int]:
    return [
        proposal.prefix_len
        for _, message in answers
        if isinstance(message, Proposals)
        for proposal in message.iter_proposals()
    ]


def _never() -> None:
    raise AssertionError("no device was lost")


class SlowToScore(ScriptedProposer):
    """Scores take far longer than its verdicts."""

    def score_proposals(self, pending: Sequence[PendingProposal]) -> OutcomeScores:
        time.sleep(0.1)
        return super().score_proposals(pending)


def test_look_ahead_that_verdicts_never_wait_for_is_left() -> None:
    script, proposer = counting(), SlowToScore()
    script.tokens[11:] += 50
    engine = make_engine([proposer], in_time=True)
    lengths: list[int] = []
    over = threading.Event()

    def deliver(answers: OutgoingProposals) -> None:
        lengths.extend(lengths_of(answers))
        if script.told == 50:
            over.set()
        elif lengths[-1] == script.told:
            verdict = script.verdict(script.told + 1, with_features=False)
            threading.Timer(0.005, worker.submit_messages, (1, verdict)).start()

    worker = DraftLoop(engine, deliver, on_lost=_never)
    worker.submit_messages(1, script.start(plan=AHEAD), script.verdict(10, with_features=False))
    worker.start()
    assert over.wait(30)
    worker.stop()
    left = counted(engine, "outrider_drafter_shortened_look_aheads_total", part="pass")
    assert left > 10 and len(proposer.scored) < 30
