"""Verifier engine over a fake device without computing time, shared by the host benchmarks."""

from __future__ import annotations

import time
from dataclasses import replace
from types import MethodType
from typing import Any, Final

import numpy as np
import torch
from outrider_verifier.config import VerifierConfig
from outrider_verifier.model_runner.gpu_runner.runner import GpuModelRunner
from outrider_verifier.server.service import VerifierService
from outrider_verifier.state.commands import (
    DrafterAttached,
    ExchangeLink,
    OpenSession,
    ProposalsReceived,
)
from outrider_verifier.state.effects import SendMessage, messages_by_link

from outrider.engine.device.graphs.shapes import CHUNK_TOKENS, RoundShape
from outrider.engine.device.round_program import VerifyOutput
from outrider.ids import DrafterId, SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.transport.shm import ShmChannel
from outrider.wire.codec import decode_drafter_messages
from outrider.wire.messages import FeatureLayout, Proposals, SessionSpec
from outrider.wire.rounds import valid_proposals
from outrider_bench.gpu.support.random_model import TINY, head_shape, random_head, random_target
from outrider_bench.host.fake_device import BESIDE, CannedDownloads, CannedGraphs, Steps

WIDTH: Final = 4096
LENGTH: Final = 4
"""Number of draft tokens per round. All of them but one are accepted."""
PROMPT: Final = 48
SHAPE: Final = replace(
    TINY, hidden_size=WIDTH, vocab_size=4096, num_kv_heads=1, max_position_embeddings=4096
)
"""Shape of the target model."""
_LINK: Final = 1
_NAME: Final = DrafterId("bench")
_DRAFTER: Final = ExchangeLink(
    link_id=_LINK,
    drafter_id=_NAME,
    incarnation="",
    methods=(DraftMethod.EAGLE3, DraftMethod.NGRAM),
    feature_layout=FeatureLayout.PROJECTED,
    reads_shm_features=True,
)


def spec_of(
    name: str,
    prompt: int,
    max_new_tokens: int,
    plan: SpeculationPlan,
    drafter_id: DrafterId | None = None,
) -> SessionSpec:
    """Return the specification of a greedy session with a prompt of `prompt` tokens."""
    return SessionSpec(
        session_id=SessionId(name),
        epoch=0,
        token_ids=tuple(range(prompt)),
        prompt_len=prompt,
        max_new_tokens=max_new_tokens,
        stop_token_ids=(2, 3),
        sampling=SamplingParams(),
        plan=plan,
        drafter_id=drafter_id,
    )


def _fused(length: int) -> dict[str, Any]:
    """Return the settings of a verifier whose in-process drafter drafts chains."""
    return {"placement": "fused", "draft_length": length, "feature_head": "canned"}


def _shape_of(key: Any) -> RoundShape:
    """Return the round shape that the key of a CUDA graph contains. Keys of graphs that also make
    in-process drafts are tuples."""
    shape: RoundShape = key[1] if isinstance(key, tuple) else key
    return shape


def _verified(shape: RoundShape, width: int) -> VerifyOutput:
    """Return the prepared result of a round of this shape, with features of `width` values. All
    draft tokens but the last are accepted."""
    words = np.zeros((shape.rows, shape.result_words), dtype=np.int32)
    kept = min(LENGTH, shape.nodes)
    words[:, 0] = kept
    words[:, 2 : 2 + kept] = np.arange(kept)
    words[:, 2 + shape.nodes : 2 + shape.nodes + kept] = np.arange(7, 7 + kept)
    first = np.full(shape.chunks, 9, dtype=np.int32)
    result = torch.from_numpy(np.concatenate((words.ravel(), first)))
    features = None
    if shape.has_features:
        rows = shape.rows * shape.nodes + shape.chunks * CHUNK_TOKENS
        features = torch.ones(rows, width, dtype=torch.bfloat16)
    return VerifyOutput(result, None, None, None, features)


class VerifierSide:
    """Work of a verifier's engine thread. The caller's thread runs it."""

    offers = ""
    """Suffix of the names of the steps that read proposals and send verdicts: `BESIDE` if they run
    while a round is in flight, else empty."""

    def __init__(
        self,
        sessions: int,
        steps: Steps,
        *,
        planner: str,
        width: int = WIDTH,
        shm_channel: ShmChannel | None = None,
        in_process_draft: int = 0,
        drives_rounds: bool = True,
    ) -> None:
        """Create the verifier.

        `width` is the hidden size of the target and the number of values of a feature.
        `shm_channel` leads to a drafter. Without one, messages to drafters are dropped.
        `in_process_draft` is the number of tokens that a fused head in the verifier drafts; 0 means
        that there is no head. `drives_rounds` must be False if the service is started, because its
        own engine thread then runs the rounds.
        """
        self._steps = steps
        config = VerifierConfig(
            model="canned",
            max_sessions=max(8, sessions),
            max_tree_nodes=16,
            dtype="bfloat16",
            feature_budget_mb=4096,
            planner=planner,
            prefill_tokens_per_round=1024,
            batch_wait_ms=0.0,
            **(_fused(in_process_draft) if in_process_draft else {}),
        )
        target = random_target(
            replace(SHAPE, hidden_size=width),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            kv_tokens=sessions * 2048,
        )
        heads = head_shape(target.config, 1024)
        self.head, projection = random_head(heads, target.embedding)
        runner = GpuModelRunner.build(
            config, target, projection, self.head if in_process_draft else None
        )
        canned: Any = runner.rounds
        canned.graphs = CannedGraphs(
            lambda key: _verified(_shape_of(key), width),
            lambda: steps.mark("verifier: rows staged"),
        )
        canned.downloads = CannedDownloads(self._arrived)
        self.service = VerifierService(
            config,
            target,
            projection,
            runner=runner,
            pool=target.pool,
            max_context_len=4096,
        )
        self._core, self._rounds = self.service.core, self.service.rounds
        self._shm_channels = self.service._shm_channels
        if shm_channel is not None:
            self._shm_channels.attach_drafter(_DRAFTER, shm_channel)
        self._waiting = self._unsaid = False
        if drives_rounds:
            outbox: Any = self.service.outbox
            outbox.flush = self._flushed
        handover = self._core.verdict_builder
        before = "verifier: rest" + BESIDE if self.offers else "verifier: outcome settled"
        self.bracket(handover, "advance_prefixes", before, "verifier: prefixes moved" + self.offers)
        self.bracket(handover, "build_verdicts", None, "verifier: verdicts made" + self.offers)
        kept = "verifier: features kept" + BESIDE
        self.bracket(self._rounds._keeping, "run_deferred", "verifier: submitted" + BESIDE, kept)
        self.vocab_size = target.vocab_size

    def bracket(self, owner: object, method: str, before: str | None, after: str) -> None:
        """Time the calls of a method as a step called `after`. The step called `before`, if given,
        ends when a call begins.

        Methods of compiled classes (decision 48) cannot be timed. Their time is part of the step
        that follows.
        """
        function = getattr(owner, method)

        def marked(*given: Any, **named: Any) -> Any:
            if before is not None:
                self._steps.mark(before)
            result = function(*given, **named)
            self._steps.mark(after)
            return result

        if isinstance(function, MethodType):
            setattr(owner, method, marked)

    def open(
        self, sessions: int, max_new_tokens: int, plan: SpeculationPlan, *, drafted: bool = True
    ) -> None:
        """Attach a drafter, open sessions and compute their prompts. The drafter drafts for the
        sessions if `drafted`."""
        self._core.handle_command(DrafterAttached(_DRAFTER), time.monotonic())
        for ticket in range(sessions):
            self.open_one(ticket, PROMPT, max_new_tokens, plan, drafted=drafted)
        while any(not session.is_prefilled for session in self._core.sessions.values()):
            self.round()

    def open_one(
        self, ticket: int, prompt: int, max_new_tokens: int, plan: SpeculationPlan, *, drafted: bool
    ) -> None:
        """Open a session with a prompt of `prompt` tokens. Its prefill begins in the next round."""
        drafter_id = _NAME if drafted else None
        spec = spec_of(f"s{ticket}", prompt, max_new_tokens, plan, drafter_id)
        nobody: Any = None
        self._core.handle_command(OpenSession(ticket, spec, nobody), time.monotonic())

    def replace(self, ticket: int, max_new_tokens: int, plan: SpeculationPlan) -> None:
        """End the oldest session and open another one."""
        self._steps.begin()
        self._core.free_session(next(iter(self._core.sessions.values())))
        self.open_one(ticket, PROMPT, max_new_tokens, plan, drafted=True)
        self._steps.mark("verifier: ended and opened" + BESIDE)
        self.deliver_verdicts()

    def round(self) -> None:
        """Plan, launch and commit a round. Send the messages for the drafter over the shared-memory
        channel."""
        self._steps.begin()
        plan = self._rounds.plan_round(time.monotonic())
        assert not plan.is_empty, "nothing to do"
        self._steps.mark("verifier: planned")
        self._waiting, self._unsaid = True, True
        self._rounds.run_round(plan)
        self._steps.mark("verifier: rest" + BESIDE)
        self.deliver_verdicts()

    def deliver_verdicts(self) -> int:
        """Send the messages for the drafter that the verifier has made since the last call, and
        return their number. Messages for routers are dropped."""
        effects = self.service.outbox.take_effects()
        told = [effect for effect in effects if isinstance(effect, SendMessage)]
        for link_id, messages in messages_by_link(told).items():
            if self._shm_channels.has_channel(link_id):
                self._shm_channels.send_messages(link_id, messages)
        return len(told)

    def offer(self, frames: list[bytes]) -> None:
        """Process the proposals in received frames."""
        for frame in frames:
            self._steps.begin()
            for message in decode_drafter_messages(frame):
                assert isinstance(message, Proposals)
                self._steps.mark("verifier: proposals decoded" + self.offers)
                sound = valid_proposals(message, vocab_size=self.vocab_size, max_nodes=16)
                self._steps.mark("verifier: proposals checked" + self.offers)
                self._core.handle_command(
                    ProposalsReceived(_LINK, message, sound), time.monotonic()
                )
                self._steps.mark("verifier: proposals offered" + self.offers)

    def _flushed(self) -> bool:
        """Record the end of a step when the verifier flushes its outbox. At the first flush of a
        round, send the verdicts."""
        if self._unsaid:
            self._unsaid = False
            self.deliver_verdicts()
            self._steps.mark("verifier: verdicts sent" + self.offers)
        else:
            self._steps.mark("verifier: accounts, events" + BESIDE)
        return False

    def _arrived(self) -> None:
        if self._waiting:
            self._waiting = False
            self._steps.mark("verifier: submitted" + BESIDE)


class LookAheadSide(VerifierSide):
    """Work of a verifier's engine thread with a round always in flight, because rounds need no
    input from other processes. The planner is `automatic`."""

    def __init__(self, sessions: int, *, width: int = WIDTH, in_process_draft: int = 0) -> None:
        """Create the verifier. The arguments are those of `VerifierSide`."""
        self.steps = Steps()
        super().__init__(
            sessions,
            self.steps,
            planner="automatic",
            width=width,
            in_process_draft=in_process_draft,
        )

    def mark_steps(self, before_planner: str) -> None:
        """Time the steps of all following rounds. `before_planner` is the name of the step that
        ends when the planner begins to evaluate a round."""
        rounds = self._rounds
        self.bracket(rounds, "_attempt", None, "verifier: submitted")
        self.bracket(rounds, "_collect", "verifier: made ready", "verifier: outcome read")
        self.bracket(self._core.policy, "observe_round", before_planner, "verifier: planner")

    def plan_and_run(self, rest: str) -> bool:
        """Plan and submit a round, then process the results of the previous one. Return False if
        there was no round to submit. `rest` is the name of the step that ends with this call."""
        plan = self._rounds.plan_round(time.monotonic())
        self._steps.mark("verifier: planned")
        if plan.is_empty:
            self._rounds.finish_round()
        else:
            self._rounds.run_round(plan)
        self._steps.mark(rest)
        return not plan.is_empty
