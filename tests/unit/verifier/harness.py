"""A verifier over the in-process transport with a fake target, and drafts that know the truth."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from outrider_verifier.config import VerifierConfig
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.server.service import VerifierService

from outrider.busy_polling import BusyCores
from outrider.errors import OutriderError
from outrider.ids import DrafterId, SessionId
from outrider.spec.noise import NoiseStream
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree
from outrider.transport.heartbeat import HeartbeatConfig
from outrider.transport.in_process import InprocNetwork
from outrider.wire.messages import SessionEvent, SessionSpec
from tests.fakes.scripted_drafter import Followed, ProposeFn, ScriptedDrafter, make_tree
from tests.fakes.target import FakeProjection, FakeTarget
from tests.waiting import until

ADDRESS = "verifier:1"
DRAFTER = DrafterId("drafter-0")
CHAIN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=30_000)
TREE = SpeculationPlan(
    method=DraftMethod.EAGLE3, draft_tokens=12, top_k=3, proposal_timeout_ms=30_000
)
LONG = replace(CHAIN, proposal_timeout_ms=20_000)


def make_spec(
    name: str = "s",
    *,
    prompt: Sequence[int] = (3, 1, 4, 1, 5),
    max_new_tokens: int = 16,
    drafter: DrafterId | None = DRAFTER,
    plan: SpeculationPlan = CHAIN,
    sampling: SamplingParams | None = None,
    **other: Any,
) -> SessionSpec:
    """A session with defaults."""
    return SessionSpec(
        session_id=SessionId(name),
        epoch=other.pop("epoch", 0),
        token_ids=tuple(prompt),
        prompt_len=other.pop("prompt_len", len(prompt)),
        max_new_tokens=max_new_tokens,
        stop_token_ids=other.pop("stop_token_ids", ()),
        sampling=sampling or SamplingParams(),
        plan=plan,
        drafter_id=drafter,
        **other,
    )


@dataclass(slots=True)
class Result:
    """A stream read to its end."""

    tokens: list[int]
    events: list[SessionEvent]
    error: OutriderError | None = None

    @property
    def last(self) -> SessionEvent:
        """The last event."""
        return self.events[-1]


class Rig:
    """A verifier, its target, and drafters to attach."""

    def __init__(self, target: FakeTarget, service: VerifierService, network: InprocNetwork):
        self.target, self.service, self.network = target, service, network
        self.drafters: list[ScriptedDrafter] = []

    async def attach(self, propose: ProposeFn, **options: Any) -> ScriptedDrafter:
        """Attach a scripted drafter and wait until the engine knows it."""
        before = self.service.core.counters["attached"]
        drafter = ScriptedDrafter(
            self.network.dialer(), ADDRESS, propose, vocab_size=self.target.vocab_size, **options
        )
        self.drafters.append(drafter)
        await drafter.attach()
        await until(lambda: self.service.core.counters["attached"] > before)
        return drafter

    async def run(self, spec: SessionSpec) -> Result:
        """Serve a session to its end."""
        result = Result([], [])
        try:
            async for event in self.service.open_session(spec):
                result.events.append(event)
                result.tokens += event.tokens
        except OutriderError as error:
            result.error = error
        return result

    async def run_all(self, specs: Sequence[SessionSpec]) -> list[Result]:
        """Serve sessions at the same time."""
        return list(await asyncio.gather(*(self.run(spec) for spec in specs)))

    def reference(self, spec: SessionSpec) -> list[int]:
        """What plain decoding gives."""
        return self.target.decode(
            spec.token_ids,
            spec.max_new_tokens,
            spec.sampling,
            stop=spec.stop_token_ids,
            min_new=spec.min_new_tokens,
        )

    async def idle(self) -> None:
        """Wait until nothing is held any more."""
        pool = self.target.pool
        await until(lambda: pool.free_blocks == pool.total_blocks)
        assert self.service.core.num_sessions == 0
        assert self.service.core.num_proposals == 0
        store = self.service.core.store
        assert store is None or store.used_bytes == 0
        block_manager = self.service.core.block_manager
        assert (
            not block_manager.running
            and not block_manager.waiting
            and block_manager.swapped_bytes == 0
        )


@asynccontextmanager
async def verifier(
    *,
    target: FakeTarget | None = None,
    features: bool = True,
    runner: ModelRunner | None = None,
    heartbeat: HeartbeatConfig | None = None,
    busy_cores: BusyCores | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A running verifier; everything is stopped at the end."""
    target = target or FakeTarget(num_blocks=256)
    settings.setdefault("max_tree_nodes", 16)
    # What a planner decides depends on time; tests that are about it ask for it.
    settings.setdefault("planner", "fixed")
    settings.setdefault("prefill_tokens_per_round", 8)
    service = VerifierService(
        VerifierConfig(model="fake", **settings),
        target,
        FakeProjection() if features else None,
        runner=runner,
        pool=target.pool,
        max_context_len=4096,
        busy_cores=busy_cores,
    )
    network = InprocNetwork(heartbeat=heartbeat)
    network.serve_verifier(ADDRESS, service)
    service.start()
    rig = Rig(target, service, network)
    try:
        yield rig
    finally:
        for drafter in rig.drafters:
            with contextlib.suppress(OutriderError):
                await drafter.detach()
            assert drafter.broken is None, drafter.broken
        await network.remove(ADDRESS)
        await service.stop()


async def mid_stream(rig: Rig, name: str = "s") -> None:
    """Wait until a session has run some rounds."""
    sessions, session = rig.service.core.sessions, SessionId(name)
    await until(lambda: session in sessions and sessions[session].round_id >= 3)


async def close(stream: AsyncGenerator[SessionEvent]) -> None:
    """Close a stream as a client that left would."""
    await stream.aclose()


def truth(target: FakeTarget, followed: Followed, depth: int) -> list[int]:
    """What the target will emit after the session's present prefix; where that depends on random
    draws, which a drafter does not know, the most probable text."""
    sampling = followed.start.sampling
    if not (
        sampling.effective_rule is Rule.GREEDY or sampling.has_noise_stream(NoiseStream.TARGET)
    ):
        sampling = replace(sampling, temperature=0.0, draft_key=0)
    return target.decode(followed.tokens, depth, sampling)


def good_chain(target: FakeTarget, depth: int = 4) -> ProposeFn:
    """Always right."""
    return lambda followed: make_tree(truth(target, followed, depth))


def half_good_chain(target: FakeTarget, depth: int = 4) -> ProposeFn:
    """Right up to a depth that changes from round to round."""

    def propose(followed: Followed) -> DraftTree:
        tokens = truth(target, followed, depth)
        right = len(followed.verdicts) % (depth + 1)
        return make_tree(
            [t if i < right else (t + 1) % target.vocab_size for i, t in enumerate(tokens)]
        )

    return propose


def bushy_tree(target: FakeTarget, depth: int = 3) -> ProposeFn:
    """The true path among wrong siblings, every node of it the second child; sometimes cut."""

    def propose(followed: Followed) -> DraftTree:
        right = truth(target, followed, depth)[: 1 + len(followed.verdicts) % depth]
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        for token in right:
            for shift in (1, 0, 2):
                tokens.append((token + shift) % target.vocab_size)
                parents.append(above)
            above = len(tokens) - 2
        return make_tree(tokens, parents)

    return propose


def beside_wrong_siblings(path: Sequence[int], vocab_size: int = 384) -> DraftTree:
    """A tree that holds the path, and beside each of its tokens, before it, one that is wrong."""
    tokens: list[int] = []
    parents: list[int] = []
    above = -1
    for token in path:
        tokens += [(token + 1) % vocab_size, token]
        parents += [above, above]
        above = len(tokens) - 1
    return make_tree(tokens, parents)


def garbage(target: FakeTarget, seed: int = 0) -> ProposeFn:
    """Valid trees without sense."""
    rng = np.random.default_rng(seed)

    def propose(followed: Followed) -> DraftTree:
        count = int(rng.integers(1, 8))
        parents = [int(rng.integers(-1, i)) for i in range(count)]
        tokens: list[int] = []
        for i in range(count):
            taken = {tokens[j] for j in range(i) if parents[j] == parents[i]}
            free = [t for t in range(target.vocab_size) if t not in taken]
            tokens.append(int(rng.choice(free)))
        return make_tree(tokens, parents)

    return propose
