"""Which rounds are submitted before the last one is booked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.in_flight_round import InFlightRound
from outrider_verifier.engine.scheduler import Scheduler
from outrider_verifier.exchange.proposal_inbox import HeldProposal
from outrider_verifier.model_runner.batch import VerifyRow
from outrider_verifier.state.round_plan import RoundLimits, RoundPlan
from outrider_verifier.state.session import Session

from outrider.engine.kv_cache import KVSequence
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import CHAIN, make_spec

NODES = 4


def sessions(count: int = 2) -> list[Session]:
    pool = FakeTarget().pool
    made: list[Session] = []
    for number in range(count):
        kv: KVSequence = pool.new_sequence()
        spec = make_spec(f"s{number}", max_new_tokens=20, plan=CHAIN)
        session = Session.create(spec, ticket=number, kv=kv, now=0.0, keeps_features=False)
        session.commit_tokens((7,), 0.0)
        session.handle, session.link_id, session.covered_len = number, 1, 100
        made.append(session)
    return made


class Box:
    """An inbox in which every session has a draft."""

    def __init__(self, nodes: int = NODES) -> None:
        self._nodes = nodes
        self.taken = 0

    def num_nodes(self, handles: list[int]) -> list[int]:
        return [self._nodes] * len(handles)

    def take_proposals(self, handles: list[int]) -> list[HeldProposal]:
        self.taken += len(handles)
        return [
            HeldProposal(cast(Any, None), handle, self._nodes, is_hit=True) for handle in handles
        ]


def ask(
    of: list[Session], *, box: Box | None = None, running: int | None = None, most: int = 100
) -> tuple[tuple[RoundPlan, list[VerifyRow]] | None, Box]:
    box = box or Box()
    others = dict.fromkeys(range(len(of) if running is None else running))
    core = cast(
        EngineCore, SimpleNamespace(block_manager=SimpleNamespace(running=others), inbox=box)
    )
    in_flight = cast(InFlightRound, SimpleNamespace(verify=[VerifyRow(session) for session in of]))
    limits = RoundLimits(prefill_tokens=1, decode_tokens=most, batch_wait_s=0.0)
    engine = cast(Any, SimpleNamespace(verify_round_s=lambda rows, nodes: None))
    scheduler = Scheduler(core, engine, limits)
    return scheduler.plan_prefetched_round(in_flight, [3] * len(of)), box


def test_all_hits_go_straight_on_and_their_drafters_are_well() -> None:
    of = sessions()
    of[0].has_stalled_drafter = True
    found, box = ask(of)
    assert found is not None and box.taken == 2
    plan, rows = found
    assert [row.session for row in rows] == of
    assert [row.nodes for row in rows] == [NODES] * 2
    assert not of[0].has_stalled_drafter
    assert [(row.session_id, row.has_proposal) for row in plan.decode] == [
        ("s0", True),
        ("s1", True),
    ]
    assert not plan.is_self_contained and not plan.prefill


def ends(session: Session) -> None:
    session.emitted = 20 - 3 - NODES


def is_limited(session: Session) -> None:
    session.draft_limit = NODES - 1


def lacks_blocks(session: Session) -> None:
    session.covered_len = session.length + 2


def is_in_a_grammar(session: Session) -> None:
    session.constraint = cast(Any, object())


def is_paused(session: Session) -> None:
    session.is_speculation_off = True


@pytest.mark.parametrize("change", [ends, is_limited, lacks_blocks, is_in_a_grammar, is_paused])
def test_whoever_asks_for_more_is_booked_first(change: Any) -> None:
    of = sessions()
    change(of[1])
    rows, box = ask(of)
    assert rows is None and box.taken == 0


def test_whoever_is_not_in_the_round_is_thought_of_first() -> None:
    assert ask(sessions(), running=3)[0] is None


def test_a_round_has_its_bounds() -> None:
    assert ask(sessions(), most=2 * (1 + NODES))[0] is not None
    assert ask(sessions(), most=2 * (1 + NODES) - 1)[0] is None


def test_the_budget_is_enough_to_the_token() -> None:
    (session,) = sessions(1)
    # Three tokens are being committed, then the draft and one more.
    session.emitted = 20 - 3 - NODES - 1
    assert ask([session])[0] is not None
    session.emitted += 1
    assert ask([session])[0] is None


def test_empty_drafts_go_on_too_but_not_at_the_end() -> None:
    (session,) = sessions(1)
    session.emitted = 20 - 3 - 2
    assert ask([session], box=Box(nodes=0))[0] is not None
    session.emitted += 1
    assert ask([session], box=Box(nodes=0))[0] is None


def test_plans_that_do_not_speculate_are_booked_first() -> None:
    (session,) = sessions(1)
    session.plan = replace(session.plan, draft_tokens=0)
    assert ask([session])[0] is None
