"""The host's share of a round in both processes, step by step, without models or transport.

Everything is real but the device: programs return canned tensors and copies to and from a device
are left out. Processor time of the thread, of the lowest tenth of the rounds. A step is on the
round's critical path (an idle device waits for it) unless it is marked: `beside` runs while a
device, or the other process, works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
import torch
from outrider_drafter.device_head_source import DeviceHeadSource
from outrider_drafter.engine import DraftEngine
from outrider_drafter.metrics import Metrics
from outrider_drafter.sessions import Limits
from outrider_verifier.commands import Attached, Link, Offered, Open
from outrider_verifier.config import VerifierConfig
from outrider_verifier.device_engine import DeviceRoundEngine
from outrider_verifier.effects import Tell, told_by_link
from outrider_verifier.service import VerifierService
from torch import Tensor

from outrider.engine.device.round_program import Verified
from outrider.engine.device.shapes import PIECE_TOKENS, RoundShape
from outrider.ids import DrafterId, SessionId
from outrider.spec.plan import DraftMethod, Plan
from outrider.spec.sampling import SamplingParams
from outrider.transport.lane import Lane, lane_pair
from outrider.wire.codec import (
    decode_drafter_messages,
    decode_verifier_messages,
    encode_drafter_message,
)
from outrider.wire.messages import (
    DrafterMessage,
    FeatureLayout,
    Proposals,
    SessionSpec,
    SessionStart,
    Verdicts,
)
from outrider.wire.rounds import sound_proposals
from outrider_bench.gpu.random_model import TINY, head_shape, random_head, random_target
from outrider_bench.host_canned import (
    BESIDE,
    CannedDownloads,
    CannedGraphs,
    CannedLanding,
    Steps,
)
from outrider_bench.report import table

T = TypeVar("T")

WIDTH: Final = 4096
LENGTH: Final = 4
"""Drafted tokens; all of them but one stand."""
PROMPT: Final = 48
_LINK: Final = 1
_NAME: Final = DrafterId("bench")
_SHAPE: Final = replace(
    TINY, hidden_size=WIDTH, vocab_size=4096, num_kv_heads=1, max_position_embeddings=4096
)


def _verified(shape: RoundShape, width: int) -> Verified:
    """The canned outcome of a shape, with features of some width: all drafted tokens but the last
    stand."""
    words = np.zeros((shape.rows, shape.result_words), dtype=np.int32)
    kept = min(LENGTH, shape.nodes)
    words[:, 0] = kept
    words[:, 2 : 2 + kept] = np.arange(kept)
    words[:, 2 + shape.nodes : 2 + shape.nodes + kept] = np.arange(7, 7 + kept)
    first = np.full(shape.pieces, 9, dtype=np.int32)
    result = torch.from_numpy(np.concatenate((words.ravel(), first)))
    features = None
    if shape.features:
        rows = shape.rows * shape.nodes + shape.pieces * PIECE_TOKENS
        features = torch.ones(rows, width, dtype=torch.bfloat16)
    return Verified(result, None, None, None, features)


class VerifierSide:
    """A verifier's engine thread, without the thread."""

    offers = ""
    """Whether what is offered is taken in, and verdicts are told, `BESIDE` a round."""

    def __init__(
        self,
        sessions: int,
        steps: Steps,
        *,
        planner: str,
        width: int = WIDTH,
        lane: Lane | None = None,
    ) -> None:
        """`width`: of the target, and of its features. `lane`: to a drafter; without one what a
        drafter is told is dropped."""
        self._steps = steps
        config = VerifierConfig(
            model="canned",
            max_sessions=max(8, sessions),
            max_tree_nodes=16,
            dtype="bfloat16",
            feature_budget_mb=4096,
            planner=planner,
            prefill_tokens_per_round=1024,
            gather_ms=0.0,
        )
        target = random_target(
            replace(_SHAPE, hidden_size=width),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            kv_tokens=sessions * 2048,
        )
        heads = head_shape(target.config, 1024)
        self.head, projection = random_head(heads, target.embedding)
        runner = DeviceRoundEngine.build(config, target, projection)
        canned: Any = runner.rounds
        canned.graphs = CannedGraphs(
            lambda shape: _verified(shape, width), lambda: steps.mark("verifier: rows staged")
        )
        canned._downloads = CannedDownloads(self._arrived)
        self._service = VerifierService(
            config,
            target,
            projection,
            runner=runner,
            pool=target.pool,
            max_context_len=4096,
        )
        self._core, self._rounds = self._service._core, self._service._rounds
        self._outbox = self._service._outbox
        self._lanes = self._service._lanes
        if lane is not None:
            self._lanes.attach(_LINK, lane)
        self._waiting = self._unsaid = False
        self._rounds.flush = self._flushed
        handover: Any = self._core.handover
        before = "verifier: rest" + BESIDE if self.offers else "verifier: outcome settled"
        handover.follow = self.until(
            before, handover.follow, "verifier: prefixes moved" + self.offers
        )
        handover.verdicts = self.until(
            None, handover.verdicts, "verifier: verdicts made" + self.offers
        )
        self.vocab_size = target.vocab_size

    def until(self, before: str | None, function: Callable[..., T], after: str) -> Callable[..., T]:
        """`function` with a mark where it begins and where it ends."""

        def marked(*given: Any, **named: Any) -> T:
            if before is not None:
                self._steps.mark(before)
            result = function(*given, **named)
            self._steps.mark(after)
            return result

        return marked

    def open(self, sessions: int, max_new_tokens: int, plan: Plan, *, drafted: bool = True) -> None:
        """Attach a drafter, open sessions, which it is to follow if `drafted`, and run their
        prompts."""
        link = Link(
            link_id=_LINK,
            drafter_id=_NAME,
            incarnation="",
            methods=(DraftMethod.EAGLE3, DraftMethod.NGRAM),
            feature_layout=FeatureLayout.PROJECTED,
        )
        self._core.handle(Attached(link), time.monotonic())
        for ticket in range(sessions):
            self.open_one(ticket, PROMPT, max_new_tokens, plan, drafted=drafted)
        while any(not session.prefilled for session in self._core.sessions.values()):
            self.round()

    def open_one(
        self, ticket: int, prompt: int, max_new_tokens: int, plan: Plan, *, drafted: bool
    ) -> None:
        """Open a session with so many tokens of prompt; it waits for the next round."""
        spec = SessionSpec(
            session_id=SessionId(f"s{ticket}"),
            epoch=0,
            token_ids=tuple(range(prompt)),
            prompt_len=prompt,
            max_new_tokens=max_new_tokens,
            stop_token_ids=(2, 3),
            sampling=SamplingParams(),
            plan=plan,
            drafter_id=_NAME if drafted else None,
        )
        opened: Any = Open(ticket, spec, None)  # type: ignore[arg-type]
        self._core.handle(opened, time.monotonic())

    def round(self) -> None:
        """Plan, launch and settle a round; the drafter is told by its lane."""
        self._steps.begin()
        plan = self._rounds.plan(time.monotonic())
        assert not plan.empty, "nothing to do"
        self._steps.mark("verifier: planned")
        self._waiting, self._unsaid = True, True
        self._rounds.run(plan)
        self._steps.mark("verifier: features kept" + BESIDE)
        self.tell()

    def tell(self) -> int:
        """Send what was posted for the drafter since the last time, so many messages; other effects
        are dropped."""
        told = [effect for effect in self._outbox if isinstance(effect, Tell)]
        self._outbox.clear()
        self._core.seal()
        for link_id, messages in told_by_link(told).items():
            if self._lanes.carries(link_id):
                self._lanes.tell(link_id, messages)
        return len(told)

    def offer(self, frames: list[bytes]) -> None:
        """Proposals have come."""
        for frame in frames:
            self._steps.begin()
            for message in decode_drafter_messages(frame):
                assert isinstance(message, Proposals)
                self._steps.mark("verifier: proposals decoded" + self.offers)
                sound = sound_proposals(message, vocab_size=self.vocab_size, max_nodes=16)
                self._steps.mark("verifier: proposals checked" + self.offers)
                self._core.handle(Offered(_LINK, message, sound), time.monotonic())
                self._steps.mark("verifier: proposals offered" + self.offers)

    def _flushed(self) -> bool:
        """Marks the step; no other thread has a part in it."""
        if self._unsaid:
            self._unsaid = False
            self.tell()
            self._steps.mark("verifier: verdicts sent" + self.offers)
        else:
            self._steps.mark("verifier: accounts, events" + BESIDE)
        return False

    def _arrived(self) -> None:
        if self._waiting:
            self._waiting = False
            self._steps.mark("verifier: submitted" + BESIDE)


class DrafterSide:
    """A drafter's working thread, without the thread."""

    def __init__(self, sessions: int, steps: Steps, head: Any) -> None:
        self._steps = steps
        self._source = DeviceHeadSource(
            head,
            max_rows=sessions * 2048,
            max_context=2048,
            max_sessions=max(8, sessions),
            device="cpu",
            bounded=True,
        )
        canned: Any = self._source
        canned.graphs = CannedGraphs(_drafted, lambda: steps.mark("drafter: batch staged"))
        canned._landing = CannedLanding(lambda: steps.mark("drafter: launched" + BESIDE))
        canned._writer.write = lambda *_: None
        self._engine = DraftEngine(
            [self._source],
            limits=Limits(vocab_size=_SHAPE.vocab_size, feature_size=WIDTH, max_context=2048),
            max_sessions=max(8, sessions),
            metrics=Metrics(),
        )

    def follow(self, told: Lane) -> list[bytes]:
        """Take in what was told, draft; the proposals."""
        steps, engine = self._steps, self._engine
        steps.begin()
        while frames := told.receive():
            steps.mark("drafter: verdicts received")
            for message in [each for frame in frames for each in decode_verifier_messages(frame)]:
                steps.mark("drafter: verdicts decoded")
                assert isinstance(message, Verdicts | SessionStart)
                engine.handle(1, message)
                steps.mark("drafter: verdicts taken in")
        written: list[bytes] = []
        steps.begin()
        for answers in engine.draft():
            steps.mark("drafter: answered")
            for _, answer in answers:
                sent: DrafterMessage = answer
                written.append(encode_drafter_message(sent))
            steps.mark("drafter: proposals to bytes")
        steps.mark("drafter: ended" + BESIDE)
        while engine.has_unbooked:
            engine.book()
        steps.mark("drafter: metrics" + BESIDE)
        return written


def _drafted(key: Any) -> tuple[Tensor, None]:
    shape, size, _, _ = key
    return torch.full((size, shape.depth), 5, dtype=torch.int32), None


def measure(sessions: int, rounds: int, *, planner: str = "fixed") -> Steps:
    """Run so many rounds of both sides."""
    steps = Steps()
    ours, theirs = lane_pair()
    with torch.inference_mode(), closing(ours), closing(theirs):
        verifier = VerifierSide(sessions, steps, planner=planner, lane=ours)
        drafter = DrafterSide(sessions, steps, verifier.head)
        plan = Plan(method=DraftMethod.EAGLE3, draft_tokens=LENGTH, patience_ms=60_000)
        verifier.open(sessions, LENGTH * (rounds + 4), plan)
        for count in range(rounds + 2):
            if count == 2:
                steps.taken.clear()
            verifier.offer(drafter.follow(theirs))
            verifier.round()
            steps.end_round()
    return steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--sessions", default="1,64", help="sessions a round, several with commas")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--planner", default="fixed", choices=("automatic", "fixed"))
    parser.add_argument(
        "--look-ahead",
        type=int,
        default=0,
        metavar="N",
        help="the verifier where every round is a hit, of N drafts for outcomes a session",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="the verifier where nothing is drafted: sessions that pause beside sessions without",
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=0,
        metavar="N",
        help="with --plain: answers have N tokens about, and others take their places",
    )
    parser.add_argument(
        "--pause-ms", type=float, default=0.0, help="how long the device works, with --look-ahead"
    )


def run(args: argparse.Namespace) -> None:
    """Print a table of microseconds by step."""
    counts = [int(sessions) for sessions in args.sessions.split(",")]
    if args.plain:
        from outrider_bench import host_churn, host_plain

        if args.answers:
            host_churn.run(counts, args.rounds, args.answers)
        else:
            host_plain.run(counts, args.rounds)
        return
    found = [_measure(count, args) for count in counts]
    names = list(found[0].taken)
    sides = [side for side in ("verifier", "drafter") if any(n.startswith(side) for n in names)]
    rows = [[name, *(f"{steps.lowest(name):.0f}" for steps in found)] for name in names]
    for side in sides:
        critical = [name for name in names if name.startswith(side) and BESIDE not in name]
        totals = [sum(map(steps.lowest, critical)) for steps in found]
        rows.append([f"**{side}, critical**", *(f"{total:.0f}" for total in totals)])
    print(table(["us", *(f"{count} sessions" for count in counts)], rows))


def _measure(sessions: int, args: argparse.Namespace) -> Steps:
    if not args.look_ahead:
        return measure(sessions, args.rounds, planner=args.planner)
    from outrider_bench import host_ahead

    return host_ahead.measure(
        sessions, args.rounds, offered=args.look_ahead, pause_s=args.pause_ms / 1e3
    )
