"""What the planner decides of look-ahead reaches drafters, and what it sees of hits is sound."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from outrider_verifier.exchange.proposal_inbox import HeldProposal
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.model_runner.interface import RowOutput
from outrider_verifier.model_runner.results import RowResult
from outrider_verifier.planner.speculation_policy import SpeculationPolicy
from outrider_verifier.state.session import NO_LIMIT, Session

from outrider.engine.kv_cache import KVPool
from outrider.wire.messages import Proposals
from tests.fakes.scripted_drafter import Draft, Followed, ProposeFn
from tests.unit.verifier.harness import CHAIN, good_chain, half_good_chain, make_spec, verifier

AHEAD = replace(CHAIN, proposal_timeout_ms=20_000, look_ahead=1)


class Wavering(SpeculationPolicy):
    """Changes its mind about look-ahead every few rounds."""

    def __init__(self) -> None:
        super().__init__(automatic=True, ceiling_s=5.0)
        self._rounds = itertools.count()
        self._ahead = True

    def begin_round(self, sessions: int, now: float) -> None:
        """Every tenth round."""
        super().begin_round(sessions, now)
        if next(self._rounds) % 10 == 9:
            self._ahead, self.changed = not self._ahead, True

    def should_pause(self, session: Session) -> bool:
        """Never."""
        return False

    def should_look_ahead(self, session: Session) -> bool:
        """As it happens to think."""
        return self._ahead and session.plan.look_ahead > 0


def noting(plans: list[int], propose: ProposeFn) -> ProposeFn:
    """A drafter that writes down by which plans it is told to draft."""

    def noted(followed: Followed) -> Draft:
        plans.append(followed.plan.look_ahead)
        return propose(followed)

    return noted


async def test_a_drafter_hears_of_each_change_of_mind_and_no_text_changes() -> None:
    plans: list[int] = []
    async with verifier(planner="automatic") as rig:
        rig.service.core.policy = Wavering()
        drafter = await rig.attach(noting(plans, half_good_chain(rig.target)))
        specs = [make_spec(f"s{i}", max_new_tokens=120, plan=AHEAD) for i in range(3)]
        results = await rig.run_all(specs)
        for spec, result in zip(specs, results, strict=True):
            assert result.tokens == rig.reference(spec)
        assert sum(a != b for a, b in itertools.pairwise(plans)) > 3
        counters = rig.service.core.counters
        assert counters["look_ahead_ended"] > 3
        assert counters["look_ahead_started"] > 3
        # Announced once each, never withdrawn.
        assert drafter.starts == 3
        await rig.idle()


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_fixed_planner_has_drafters_do_what_plans_say(asked: int) -> None:
    plans: list[int] = []
    async with verifier(planner="fixed") as rig:
        await rig.attach(noting(plans, good_chain(rig.target)))
        await rig.run(make_spec(max_new_tokens=20, plan=replace(AHEAD, look_ahead=asked)))
    assert set(plans) == {asked}


def test_on_cpus_sessions_begin_in_lock_step_and_elsewhere_with_look_ahead() -> None:
    for shares_cores in (False, True):
        policy = SpeculationPolicy(automatic=True, ceiling_s=0.04, shares_cores=shares_cores)
        session = _session(policy)
        assert session.is_look_ahead_on is not shares_cores
        assert session.drafter_plan.look_ahead == int(not shares_cores)
        assert session.plan.look_ahead == 1


def test_a_plan_of_lock_step_is_never_overruled() -> None:
    policy = SpeculationPolicy(automatic=True, ceiling_s=0.04)
    session = _session(policy, look_ahead=0)
    assert not session.is_look_ahead_on
    assert not policy.should_look_ahead(session)


def test_drafts_that_were_branched_from_are_not_shortened() -> None:
    # Outcomes of a draft that was cut end where it was cut: none of those that were drafted for.
    for shares_cores, limit in ((False, NO_LIMIT), (True, 2)):
        policy = SpeculationPolicy(automatic=True, ceiling_s=0.04, shares_cores=shares_cores)
        session = _session(policy)
        assert session.speculation_state is not None
        assert session.speculation_state.workload is not None
        session.speculation_state.workload.limits[0] = 2
        assert policy.draft_limit(session) == limit


def test_a_hit_shows_that_the_drafter_follows_and_is_no_early_arrival() -> None:
    policy = SpeculationPolicy(automatic=True, ceiling_s=0.04)
    session = _session(policy)
    state = session.speculation_state
    assert state is not None and state.workload is not None
    policy.record_timeout(session)
    assert session.has_stalled_drafter
    now = 0.0
    for _ in range(6):
        policy.begin_round(1, now)
        now += 0.005
        _hit(policy, session, now)
    assert not session.has_stalled_drafter
    assert not state.wait.is_catching_up
    assert state.workload.arrivals[True].mean_s == 0.0


def _session(policy: SpeculationPolicy, look_ahead: int = 1) -> Session:
    pool = KVPool(
        num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=4, block_tokens=16, dtype=torch.float32
    )
    spec = make_spec(plan=replace(AHEAD, look_ahead=look_ahead))
    session = Session.create(spec, ticket=1, kv=pool.allocate(20), now=0.0, keeps_features=False)
    session.link_id = 1
    policy.update_session(session)
    return session


def _hit(policy: SpeculationPolicy, session: Session, now: float) -> None:
    result = RowOutput((1, 1, 1), features=None)
    row = VerifyRow(session, HeldProposal(Proposals.of_proposals([]), 0, 4, is_hit=True))
    policy.observe_round(
        [RowResult(session, result, (1, 1, 1), None, row)],
        seconds=0.005,
        forward_s=0.005,
        prompts=(),
        now=now,
    )
