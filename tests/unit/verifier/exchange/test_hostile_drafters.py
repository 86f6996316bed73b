"""Hostile drafters: what they send costs itself, never a session or the process."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import DraftTree
from outrider.wire.bundles import join_messages
from outrider.wire.codec import encode_drafter_message
from outrider.wire.messages import Proposal, Proposals
from tests.fakes.scripted_drafter import (
    Draft,
    Followed,
    ProposeFn,
    ScriptedDrafter,
    make_tree,
)
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import (
    good_chain,
    half_good_chain,
    make_spec,
    mid_stream,
    verifier,
)
from tests.waiting import PATIENCE_S, until

LONG_PATIENCE = SpeculationPlan(
    method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=30_000
)


def bad_trees(vocab_size: int) -> dict[str, ProposeFn]:
    """Proposals that must cost themselves only."""
    loop = make_tree([1, 2])
    loop.parents[:] = [1, 0]
    rising = make_tree([1, 2])
    rising.logprobs[:] = [-2.0, -1.0]
    return {
        "token out of range": lambda _f: make_tree([vocab_size]),
        "negative token": lambda _f: make_tree([-1]),
        "parent after child": lambda _f: loop,
        "too many nodes": lambda _f: make_tree([1] * 17),
        "twin siblings": lambda _f: make_tree([1, 1], [-1, -1]),
        "rising log-probs": lambda _f: rising,
    }


@pytest.mark.parametrize("kind", bad_trees(24))
async def test_an_invalid_proposal_costs_only_itself(kind: str) -> None:
    async with verifier() as rig:
        bad = bad_trees(rig.target.vocab_size)[kind]
        chain = good_chain(rig.target)
        await rig.attach(lambda f: bad(f) if len(f.verdicts) == 2 else chain(f))
        plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=300)
        spec = make_spec(max_new_tokens=30, plan=plan)
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
        assert result.last.stats.fallback_rounds >= 1
        assert result.last.stats.accepted > 0
        assert rig.service.drafter_connections.counters["messages_invalid"] >= 1
        assert result.last.drafter_attached


async def test_nobody_waits_for_a_drafter_whose_proposal_was_invalid() -> None:
    async with verifier() as rig:
        await rig.attach(lambda _f: make_tree([rig.target.vocab_size]))
        spec = make_spec(plan=LONG_PATIENCE)
        async with asyncio.timeout(PATIENCE_S):
            result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
        assert result.last.stats.fallback_rounds > 0


async def test_a_proposal_that_was_never_used_goes_with_its_session() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        drafter = await rig.attach(half_good_chain(rig.target))
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=60)))
        await mid_stream(rig)
        ahead = len(next(iter(drafter.sessions.values())).tokens) + 15
        draft = Proposal(handle=0, prefix_digest=5, prefix_len=ahead, tree=make_tree([1]))
        await drafter.send(draft)
        await until(lambda: rig.service.core.num_proposals > 0)
        await running
        await rig.idle()


async def test_proposals_nobody_asked_for_are_counted_and_ignored() -> None:
    async with verifier() as rig:
        drafter = await rig.attach(good_chain(rig.target))
        for handle in (0, 1 << 19):
            await drafter.send(
                Proposal(
                    handle=handle,
                    prefix_digest=5,
                    prefix_len=3,
                    tree=make_tree([1]),
                )
            )
        counters = rig.service.core.counters
        await until(lambda: counters["proposals_unknown"] == 2)
        spec = make_spec()
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)


async def test_malformed_proposals_of_a_bundle_cost_only_themselves() -> None:
    async with verifier() as rig:
        drafter = await rig.attach(good_chain(rig.target))
        frames: Any = drafter.connection
        stray = Proposal(handle=9, prefix_digest=1, prefix_len=1, tree=make_tree([1]))
        beyond = replace(stray, tree=make_tree([rig.target.vocab_size]))
        encoded = [
            encode_drafter_message(Proposals.of_proposals([draft]))
            for draft in (stray, beyond, stray)
        ]
        (frame,) = join_messages(
            [encoded[0], b"\xff\xff", *encoded[1:], b"", join_messages(encoded)[0]]
        )
        assert frames.inner.frames.try_send(frame)
        counters, core = rig.service.drafter_connections.counters, rig.service.core.counters
        await until(lambda: counters["messages_invalid"] == 4)
        await until(lambda: core["proposals_unknown"] == 2)
        spec = make_spec()
        assert (await rig.run(spec)).tokens == rig.reference(spec)


async def test_a_bad_entry_costs_its_own_session_alone() -> None:
    async with verifier() as rig:
        chain = good_chain(rig.target)
        wrong = make_tree([rig.target.vocab_size])
        await rig.attach(lambda f: wrong if f.start.session_id == "bad" else chain(f))
        plan = SpeculationPlan(
            method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=30_000
        )
        rig.target.forward_s = 0.005
        specs = [make_spec(name, max_new_tokens=30, plan=plan) for name in ("bad", "good")]
        async with asyncio.timeout(PATIENCE_S):
            bad, good = await rig.run_all(specs)
        assert bad.tokens == rig.reference(specs[0]) and good.tokens == rig.reference(specs[1])
        assert bad.last.stats.accepted == 0
        assert good.last.stats.accepted > 10


async def test_a_drafter_cannot_propose_for_the_sessions_of_another() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        seen: list[int] = []

        def propose(followed: Followed) -> Draft:
            seen.append(followed.digest)
            return None

        await rig.attach(propose)
        stranger = await rig.attach(lambda _f: None, drafter_id="stranger")
        patient = SpeculationPlan(
            method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=300
        )
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=4, plan=patient)))
        await until(lambda: bool(seen))
        await stranger.send(
            Proposal(handle=0, prefix_digest=seen[0], prefix_len=6, tree=make_tree([1]))
        )
        counters = rig.service.core.counters
        await until(lambda: counters["proposals_unknown"] == 1)
        assert (await running).last.stats.proposed == 0


class Disorderly:
    """Sends what it drafts late, twice, out of order, and again when its session is long gone."""

    def __init__(self, target: FakeTarget, seed: int) -> None:
        self._good = half_good_chain(target)
        self._rng = random.Random(seed)
        self.past: list[Proposal] = []
        self.drafter: ScriptedDrafter | None = None

    def __call__(self, followed: Followed) -> Draft:
        tree = self._good(followed)
        assert isinstance(tree, DraftTree)
        verdict = followed.verdicts[-1]
        mine = Proposal(
            handle=verdict.handle,
            prefix_digest=verdict.prefix_digest,
            prefix_len=len(followed.tokens),
            tree=tree,
        )
        self.past.append(mine)
        again = self._rng.sample(self.past, min(len(self.past), 6))
        # Of another prefix, and with another handle than it was made for.
        swapped = [replace(one, handle=(one.handle + 1) % 4) for one in again[:2]]
        asyncio.get_running_loop().create_task(self.send([*again, *swapped, mine, mine]))
        return None if self._rng.random() < 0.5 else tree

    async def send(self, proposals: list[Proposal]) -> None:
        assert self.drafter is not None and self.drafter.connection is not None
        self._rng.shuffle(proposals)
        with contextlib.suppress(OutriderError):
            await self.drafter.connection.send(Proposals.of_proposals(proposals))


@pytest.mark.parametrize("seed", range(3))
async def test_old_frames_out_of_order_and_over_again_change_no_text(seed: int) -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.001
        disorder = Disorderly(rig.target, seed)
        disorder.drafter = await rig.attach(disorder)
        plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=50)
        coupled = SamplingParams(temperature=0.8, seed=seed, rule=Rule.COUPLED)
        specs = [
            make_spec(f"s{n}", prompt=(3, 1, n), max_new_tokens=40, plan=plan, sampling=sampling)
            for n, sampling in enumerate([SamplingParams(), coupled] * 4)
        ]
        # Handles are used again and again, so what was for one session comes to another.
        for begin in range(0, len(specs), 2):
            pair = specs[begin : begin + 2]
            for spec, result in zip(pair, await rig.run_all(pair), strict=True):
                assert result.tokens == rig.reference(spec)
        counters = rig.service.read_counters()
        assert counters["proposals_duplicate"] and counters["proposals_stale"]
        assert counters["proposals_unknown"] and counters["drafters_disconnected_flooding"] == 0
        await rig.idle()
